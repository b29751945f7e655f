"""Converts calls to `file_operations` into calls to the file tools (TOOL-7).

The call is replaced before it is checked. The action's tool therefore determines the call's category, effect, keys,
rules, audit, cache and undo.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules.tool import Tool
from pawl.chassis import strict_json
from pawl.errors import InvalidJson

TOOL: Final = "file_operations"
ACTIONS: Final = {
    "list": "list_files",
    "read": "read_file",
    "write": "write_file",
    "append": "append_file",
    "edit": "edit_file",
    "move": "move_file",
    "make_folder": "make_folder",
    "delete": "delete_file",
    "process_large_file": "process_file",
}
_PATHS: Final = ("path", "new_path", "output_path")
_PATH: Final = {"type": "string", "description": "relative to the store's folder: notes/plan.md"}
_ALIAS: Final = {"type": "string", "description": "another name for path"}


class Resolved(NamedTuple):
    """A call to the action's tool. If there is no such call, `fault` contains the reason."""

    tool_name: str
    arguments: str
    fault: str = ""


def registered(tools: Sequence[Tool]) -> frozenset[str]:
    """Return the names of the tools that `file_operations` may call. Tools supplied by a client are not file tools."""
    return frozenset(tool.name for tool in tools if not tool.is_own)


def resolve(arguments: str, tool_names: Collection[str]) -> Resolved:
    """Return the call that a call to `file_operations` requests. `tool_names` lists the agent's registered tools.

    `arguments` can be any string.
    """
    try:
        data = arguments.encode()
        given = strict_json.loads(data, bytes_max=len(data))
    except (InvalidJson, UnicodeError):
        given = None
    if not isinstance(given, dict):
        return Resolved(TOOL, arguments, "The arguments must be a JSON object with an `action`.")
    action = given.pop("action", None)
    known = _actions(tool_names)
    name = known.get(action, action) if isinstance(action, str) else ""
    if name not in known.values():
        shown = "nothing" if action is None else f"{msgspec.json.encode(action).decode():.100}"
        return Resolved(TOOL, arguments, f"`action` must be one of {', '.join(known)}, got {shown}.")
    # Models that must provide every parameter send null for the parameters of other actions.
    given = {key: value for key, value in given.items() if value is not None}
    if "file_path" in given:
        path = given.pop("file_path")
        if given.setdefault("path", path) != path:
            return Resolved(TOOL, arguments, "`path` and `file_path` differ; leave out one of them.")
    for key in _PATHS:
        if isinstance(path := given.get(key), str):
            given[key] = path.removeprefix("/")
    return Resolved(name, msgspec.json.encode(given).decode())


def offered(tools: Sequence[Tool]) -> list[Tool]:
    """Return `tools`, with `file_operations` limited to the actions whose tools are in `tools`."""
    names = registered(tools)
    if TOOL not in names:
        return list(tools)
    used = tuple(tool for tool in tools if not tool.is_own and tool.name in ACTIONS.values())
    found = (_narrowed(tool, used) if tool.name == TOOL else tool for tool in tools)
    return [tool for tool in found if used or tool.name != TOOL]


@lru_cache(maxsize=64)
def _narrowed(front: Tool, used: tuple[Tool, ...]) -> Tool:
    actions = list(_actions({tool.name for tool in used}))
    properties: dict[str, Any] = {"action": {"type": "string", "enum": actions}, "path": _PATH, "file_path": _ALIAS}
    for tool in used:
        schema = msgspec.json.decode(tool.arguments_schema_json or b"{}")
        properties = {**schema.get("properties", {}), **properties}
    schema = {"type": "object", "properties": properties, "required": ["action"], "additionalProperties": False}
    return replace(front, arguments_schema_json=msgspec.json.encode(schema))


def _actions(tool_names: Collection[str]) -> dict[str, str]:
    return {action: name for action, name in ACTIONS.items() if name in tool_names}
