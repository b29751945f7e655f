"""What the registry talks to: PostgreSQL, Python tools, mail, the ledger, metrics."""
