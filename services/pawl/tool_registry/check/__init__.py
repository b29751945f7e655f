"""Checks Python tools without a deployment or a model: `python -m pawl.tool_registry.check`."""
