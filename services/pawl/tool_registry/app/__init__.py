"""The use cases of the registry, over ports."""
