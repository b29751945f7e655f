"""The registry on the wire: pawl.tool.v1."""
