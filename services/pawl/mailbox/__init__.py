"""Reads mailboxes over IMAP and delivers their messages to triggers (docs/guides/triggers.md, "Mailboxes")."""
