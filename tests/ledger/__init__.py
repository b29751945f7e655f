"""Model-based tests of the ledger: a reference model against the simulated store and PostgreSQL."""
