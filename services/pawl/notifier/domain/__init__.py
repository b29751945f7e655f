"""What a notification is, and which events become one. Pure."""
