"""Notifies users about their runs.

The notifier owns the users' inboxes (schema `notifier`). It reads run events from JetStream, and writes a notification
for each event that concerns a user. It publishes the notification on NATS, serves it over gRPC, and delivers it to the
user's channels.

Guarantees:
- An event is acknowledged to JetStream only after its notification is durable.
- One event produces one notification, even if JetStream delivers it more than once.
- A notification is published at least once, always with the same id.
- Each notification has one delivery per subscribed channel. Attempts span a day and always carry the same id and body.
- Any replica can serve any user, and no failure here affects a run.

If JetStream loses an event before the notifier reads it (for example, because its storage is wiped), the notification
is missing, but the run and its log are unaffected.
"""
