"""What the ledger promises, judged by a model of its own, on the simulated store and on PostgreSQL."""
