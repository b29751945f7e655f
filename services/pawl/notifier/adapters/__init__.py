"""The notifier's outside things: PostgreSQL, NATS, Prometheus."""
