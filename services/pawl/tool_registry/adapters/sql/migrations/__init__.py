"""Numbered migrations of the schema tool_registry."""
