"""The SDK for tool authors. Its public names are exported by `pawl.tools`."""
