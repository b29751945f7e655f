"""The gRPC face of the ledger: translates requests to operations and rows to messages."""
