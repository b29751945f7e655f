"""Processes that the registry starts: for tools of their own, and for what strangers wrote."""
