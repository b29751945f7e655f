"""The tools of an MCP server, as it describes them: page by page, and not without end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Final

import mcp
import mcp.types

from pawl.errors import SourceUnreachable
from pawl.tool_registry.adapters.mcp.definitions import ServerTool
from pawl.tool_registry.domain.source import TOOLS_MAX, LeftOut
from pawl.tool_registry.sdk.values import without

_SECONDS_MAX: Final = 30.0
_PAGES_MAX: Final = 50
_TOOLS_MAX: Final = 5 * TOOLS_MAX
_BYTES_MAX: Final = 16 * 1024 * 1024


class _TooMany(Exception):
    """The server lists more than is read."""


async def listed(client: mcp.Client, secrets: Collection[str]) -> tuple[Mapping[str, ServerTool], Sequence[LeftOut]]:
    """Return the tools of a server by its names, without secrets, and what was left out.

    Raises:
        SourceUnreachable: it takes too long, or says too much.
    """
    found: dict[str, ServerTool] = {}
    left_out: dict[str, LeftOut] = {}
    size = 0
    try:
        async with asyncio.timeout(_SECONDS_MAX), aclosing(_pages(client)) as pages:
            async for tool in pages:
                size += len(tool.model_dump_json())
                if size > _BYTES_MAX:
                    raise SourceUnreachable(f"it describes its tools with more than {_BYTES_MAX} bytes")
                said = without(secrets, tool.model_dump(by_alias=True, mode="json", exclude_none=True))
                name = str(said["name"]) if isinstance(said, dict) else ""
                if not isinstance(said, dict) or name in found:
                    left_out[name] = LeftOut(name=name, reason="its server describes it twice, and the first counts")
                else:
                    found[name] = ServerTool(said=said)
    except _TooMany:
        limits = f"{_TOOLS_MAX} tools or {_PAGES_MAX} pages"
        left_out[""] = LeftOut(name="what follows", reason=f"its server lists more than {limits}")
    except TimeoutError:
        raise SourceUnreachable(f"it did not list its tools within {_SECONDS_MAX:g} s") from None
    return found, list(left_out.values())


async def _pages(client: mcp.Client) -> AsyncGenerator[mcp.types.Tool, None]:
    """Give the tools of a server, page by page."""
    cursor: str | None = None
    count = 0
    for _ in range(_PAGES_MAX):
        params = mcp.types.PaginatedRequestParams(cursor=cursor) if cursor is not None else None
        page = await client.session.list_tools(params=params)
        count += len(page.tools)
        if count > _TOOLS_MAX:
            raise _TooMany
        for tool in page.tools:
            yield tool
        cursor = page.next_cursor
        if cursor is None:
            return
    raise _TooMany
