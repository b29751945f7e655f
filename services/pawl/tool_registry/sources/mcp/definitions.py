"""Lists the tools of an MCP server within limits, and defines them without trusting the server."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import mcp
import mcp.types
import msgspec

from pawl.errors import SourceUnreachable
from pawl.tool_registry.sources.rules import (
    TOOLS_MAX,
    DiscoveredTool,
    LeftOut,
    plain_schema,
    registered_names,
    short_description,
)
from pawl.tools.rules.definition import ToolDefinition
from pawl.tools.sdk.values import without
from pawl.values import Category, EffectClass

_DIGESTED_FIELDS: Final = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
_LIST_SECONDS_MAX: Final = 30.0
_PAGES_MAX: Final = 50
_LISTED_MAX: Final = 5 * TOOLS_MAX
_BYTES_MAX: Final = 16 * 1024 * 1024


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """The data for calling a registered tool, and the digest of the description that was approved."""

    tool: str
    digest: str


# A server's description of a tool, in JSON.
Described: TypeAlias = Mapping[str, Any]


def digest_of(tool: Described) -> str:
    """Return the SHA-256, in hex, of every field that could change the meaning of a call."""
    fields = {key: tool.get(key) for key in _DIGESTED_FIELDS}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


async def listed(client: mcp.Client, secrets: Collection[str]) -> tuple[Mapping[str, Described], Sequence[LeftOut]]:
    """Return a server's tools by name, with secrets removed, and the tools that were omitted.

    Raises:
        SourceUnreachable: The server takes too long, or sends too much.
    """
    found: dict[str, Described] = {}
    left_out: dict[str, str] = {}
    size, cursor = 0, None
    try:
        async with asyncio.timeout(_LIST_SECONDS_MAX):
            for _ in range(_PAGES_MAX):
                page = await client.session.list_tools(params=mcp.types.PaginatedRequestParams(cursor=cursor))
                for tool in page.tools[: _LISTED_MAX - len(found)]:
                    size += len(tool.model_dump_json())
                    if size > _BYTES_MAX:
                        raise SourceUnreachable(f"its tool descriptions are larger than {_BYTES_MAX} bytes")
                    described = without(secrets, tool.model_dump(by_alias=True, mode="json", exclude_none=True))
                    name = str(described["name"]) if isinstance(described, dict) else ""
                    if not isinstance(described, dict) or name in found:
                        left_out[name] = "its server lists it twice; only the first is used"
                    elif tool.execution is not None and tool.execution.task_support == "required":
                        left_out[name] = "it only runs as a task (protocol 2025-11-25), which is not supported"
                    else:
                        found[name] = described
                cursor = page.next_cursor
                if cursor is None or len(found) == _LISTED_MAX:
                    break
    except TimeoutError:
        raise SourceUnreachable(f"it did not list its tools within {_LIST_SECONDS_MAX:g} s") from None
    if cursor is not None or len(found) == _LISTED_MAX:
        limits = f"{_LISTED_MAX} tools or {_PAGES_MAX} pages"
        left_out["further tools"] = f"its server lists more than {limits}"
    return found, [LeftOut(name=name, reason=reason) for name, reason in left_out.items()]


def discovered(source_name: str, tools: Mapping[str, Described]) -> list[DiscoveredTool]:
    """Return definitions of a server's tools, with cautious categories and effect classes."""
    names = registered_names(source_name, tools.keys())
    return [_discovered(names[own_name], own_name, tool) for own_name, tool in tools.items()]


def _discovered(name: str, own_name: str, tool: Described) -> DiscoveredTool:
    annotations = tool.get("annotations") or {}
    title = tool.get("title") or annotations.get("title") or ""
    definition = ToolDefinition(
        name=name,
        description=short_description(tool.get("description") or title or f"{own_name} (no description)"),
        arguments_schema=plain_schema(tool.get("inputSchema")),
        # A hint is trusted only if it makes the category stricter.
        category=Category.DESTRUCTIVE if annotations.get("destructiveHint") is True else Category.SENSITIVE,
        effect=EffectClass.AT_MOST_ONCE,
    )
    binding = Binding(tool=own_name, digest=digest_of(tool))
    return DiscoveredTool(definition=definition, binding=msgspec.json.encode(binding))
