"""A reader of mailboxes over IMAP. It delivers messages to triggers (docs/guides/triggers.md, "Mailboxes")."""
