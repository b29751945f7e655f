"""Outside things: PostgreSQL and NATS."""
