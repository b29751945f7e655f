"""The door for what speaks HTTP: browsers, programs without gRPC, and senders of webhooks."""
