"""An MCP server over streamable HTTP with the newest protocol, based on the `mcp` package. The argument is its port."""

from __future__ import annotations

import sys
from typing import Annotated

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import BaseModel

server = MCPServer("newest", log_level="ERROR")


class Size(BaseModel):
    """The answer to the question."""

    size: str


def size() -> Elicit[Size]:
    return Elicit("Which size?", Size)


@server.tool()
def add(a: int, b: int) -> int:
    """Add numbers."""
    return a + b


@server.tool()
def whoami(context: Context) -> str:
    """Return the header value."""
    return f"you sent {(context.headers or {}).get('x-token')}"


@server.tool()
def order(answer: Annotated[Size, Resolve(size)]) -> str:
    """Order in the size that the user wants."""
    return f"ordered {answer.size}"


if __name__ == "__main__":
    server.run("streamable-http", port=int(sys.argv[1]))
