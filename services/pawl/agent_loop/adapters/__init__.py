"""The outside things: the model server, the ledger, the registry, NATS."""
