"""Looks at Python tools without a suite and without a model: `python -m pawl.tool_registry.check`."""
