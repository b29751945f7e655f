"""Real servers and a whole suite over TLS."""
