"""The services behind the gateway, its seal, its server and its metrics."""
