"""MCP servers as sources of tools. What imports the package `mcp` is imported late: that takes most of a second."""
