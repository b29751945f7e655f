"""Notifies users about their runs.

Owns each user's inbox (schema `notifier`). Reads run events from JetStream, writes a notification for each event that
concerns a person, publishes it on NATS, serves it over gRPC, and delivers it to the user's channels.

Guarantees:
- An event is acknowledged to JetStream only after its notification is durable.
- One event gives one notification, even if JetStream delivers it repeatedly.
- A notification is published at least once, always with the same id.
- It has one delivery per subscribed channel. Attempts span a day and always carry the same id and body.
- Any replica serves any user, and no failure here affects a run.

If JetStream loses an event before it is read (its storage is wiped), the notification is missing; the run and its log
are unaffected.
"""
