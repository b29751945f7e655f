"""The voice: tells users what became of their runs.

Owns the inbox of each user (schema `notifier`). Reads the life cycle of runs from
JetStream, writes one notification per event that concerns a person, publishes it
on NATS, serves it over gRPC and delivers it to the channels of its user.

Promises: an event is acknowledged to JetStream only when its notification is
durable; the same event gives one notification, whatever is delivered twice; a
notification is published at least once, always under the same id, and normally
once; it has one delivery to each channel that wants it, which is tried over a day,
always with the same id and bytes; any replica serves any user; nothing here can harm a run.

Does not promise: an event that JetStream lost before it was read (its storage was
wiped within the moment between the outbox and this service) gives no
notification. The run itself and its log are not concerned.
"""
