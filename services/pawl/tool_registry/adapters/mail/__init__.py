"""Outgoing mail."""
