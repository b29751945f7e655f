"""The answers of the gateway over HTTP."""
