"""The HTTP gateway for browsers, programs without gRPC, and webhook senders."""
