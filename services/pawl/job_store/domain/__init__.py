"""What the ledger decides: values, tables and operations. Pure: no I/O, no clock, no randomness of its own."""
