"""Mailboxes that triggers read."""
