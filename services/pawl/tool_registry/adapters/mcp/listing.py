"""The tools of an MCP server, as it describes them: page by page, and not without end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Final

import mcp
import mcp.types

from pawl.errors import SourceUnreachable
from pawl.tool_registry.adapters.mcp.definitions import ServerTool
from pawl.tool_registry.domain.source import TOOLS_MAX
from pawl.tool_registry.sdk.values import without

_SECONDS_MAX: Final = 30.0
_PAGES_MAX: Final = 50
_TOOLS_MAX: Final = 5 * TOOLS_MAX
_BYTES_MAX: Final = 16 * 1024 * 1024


async def listed(client: mcp.Client, secrets: Collection[str]) -> Mapping[str, ServerTool]:
    """Return the tools of a server by its names, without secrets.

    Raises:
        SourceUnreachable: it does not list them as it should, or takes too long, or says too much.
    """
    found: dict[str, ServerTool] = {}
    size = 0
    try:
        async with asyncio.timeout(_SECONDS_MAX), aclosing(_pages(client)) as pages:
            async for tool in pages:
                size += len(tool.model_dump_json())
                if size > _BYTES_MAX:
                    raise SourceUnreachable(f"it describes its tools with more than {_BYTES_MAX} bytes")
                said = without(secrets, tool.model_dump(by_alias=True, mode="json", exclude_none=True))
                if not isinstance(said, dict) or tool.name in found:
                    raise SourceUnreachable("it describes a tool twice")
                found[str(said["name"])] = ServerTool(said=said)
    except TimeoutError:
        raise SourceUnreachable(f"it did not list its tools within {_SECONDS_MAX:g} s") from None
    return found


async def _pages(client: mcp.Client) -> AsyncGenerator[mcp.types.Tool, None]:
    """Give the tools of a server, page by page."""
    cursor: str | None = None
    count = 0
    for _ in range(_PAGES_MAX):
        params = mcp.types.PaginatedRequestParams(cursor=cursor) if cursor is not None else None
        page = await client.session.list_tools(params=params)
        count += len(page.tools)
        if count > _TOOLS_MAX:
            break
        for tool in page.tools:
            yield tool
        cursor = page.next_cursor
        if cursor is None:
            return
    raise SourceUnreachable(f"it has more than {_TOOLS_MAX} tools, or more than {_PAGES_MAX} pages of them")
