"""pawl.notify.v1 over gRPC: translation only."""
