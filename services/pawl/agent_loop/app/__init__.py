"""The use cases, over ports."""
