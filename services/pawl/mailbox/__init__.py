"""Reads mailboxes over IMAP and delivers their mails to triggers (docs/triggers.md, "Mailboxes")."""
