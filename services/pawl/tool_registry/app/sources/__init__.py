"""Tool sources that stores connect: MCP servers and HTTP services."""
