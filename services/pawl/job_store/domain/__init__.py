"""The decisions of the ledger: values, tables, operations. Pure: no I/O, no clock, no randomness of its own."""
