"""Use cases of the ledger over ports: gathering operations into groups, relaying, sweeping, paging."""
