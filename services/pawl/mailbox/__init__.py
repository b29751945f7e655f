"""Reads mailboxes over IMAP, and delivers messages to triggers (docs/guides/triggers.md, "Mailboxes")."""
