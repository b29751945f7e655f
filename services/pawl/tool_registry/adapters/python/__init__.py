"""Python tools: where they are found, and how they run inside the registry."""
