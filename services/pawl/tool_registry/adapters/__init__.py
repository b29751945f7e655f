"""The adapters of the registry: PostgreSQL, Python tools, mail, the ledger, metrics."""
