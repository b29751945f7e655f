"""Reads mailboxes over IMAP and delivers their mails to triggers (docs/guides/triggers.md, "Mailboxes")."""
