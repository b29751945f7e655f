"""Looks at Python tools without a suite and without a model: `python -m services.tool_registry.check`."""
