"""SQL of the registry."""
