"""Notifications, and the events that become one. Pure."""
