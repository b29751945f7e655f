"""From what an MCP server says of its tools to definitions, believing as little as possible."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pawl.tool_registry.domain.definition import CONTROL, DESCRIPTION_BYTES_MAX, ToolDefinition
from pawl.tool_registry.domain.source import DiscoveredTool, plain_schema, registered_names
from pawl.values import Category, EffectClass

_SAID: Final = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """The way to call a registered tool, and what its server said of it when it was approved."""

    tool: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTool:
    """A tool in the words of its server, as JSON."""

    said: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The server's own name for it."""
        return str(self.said["name"])

    @property
    def demands_task(self) -> bool:
        """True if it can be called as a task only, and not by a request that is answered with its result."""
        execution = self.said.get("execution") or {}
        return bool(execution.get("taskSupport") == "required")

    @property
    def digest(self) -> str:
        """The SHA-256, in hex, of all that could change what a call of it means."""
        words = {key: self.said.get(key) for key in _SAID}
        if self.demands_task:
            words["execution"] = self.said["execution"]
        return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


def discovered(source_name: str, tools: Sequence[ServerTool]) -> list[DiscoveredTool]:
    """Return the definitions of a server's tools, with cautious values where it would have to be believed."""
    names = registered_names(source_name, [tool.name for tool in tools])
    return [_discovered(names[tool.name], tool) for tool in tools]


def _discovered(name: str, tool: ServerTool) -> DiscoveredTool:
    annotations = tool.said.get("annotations") or {}
    title = tool.said.get("title") or annotations.get("title") or ""
    definition = ToolDefinition(
        name=name,
        description=_description(tool.said.get("description") or title or f"{tool.name} (it has no description)"),
        arguments_schema=plain_schema(tool.said.get("inputSchema")),
        # That a tool does harm is believed; that it does none is not.
        category=Category.DESTRUCTIVE if annotations.get("destructiveHint") is True else Category.SENSITIVE,
        # A task can be asked for.
        effect=EffectClass.RECONCILABLE if tool.demands_task else EffectClass.AT_MOST_ONCE,
    )
    binding = Binding(tool=tool.name, digest=tool.digest)
    return DiscoveredTool(definition=definition, binding=msgspec.json.encode(binding))


def _description(text: str) -> str:
    clean = CONTROL.sub("", text).encode(errors="replace")
    if len(clean) > DESCRIPTION_BYTES_MAX:
        clean = clean[: DESCRIPTION_BYTES_MAX - 3] + b"..."
    return clean.decode(errors="ignore").strip() or "It has no description."
