"""Sources: what a store has connected to get tools from."""

from __future__ import annotations

from dataclasses import dataclass

from services.tool_registry.domain.definition import ToolDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An MCP server or an HTTP service of a store. Its tools are named `<name>.<tool>`.

    `kind` says who understands `config`, which is JSON and holds names of secrets,
    never their values.
    """

    store_id: str
    name: str
    kind: str
    config: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredTool:
    """A tool as its source describes it now; `binding` is how the source runs it."""

    definition: ToolDefinition
    binding: bytes = b""
