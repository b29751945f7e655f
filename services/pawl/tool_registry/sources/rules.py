"""Tools as sources describe them: their names and descriptions, and how they differ from the approved tools."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pawl.chassis.strict_json import dumps_canonical
from pawl.errors import InvalidField
from pawl.tools.rules.definition import (
    CONTROL,
    DESCRIPTION_BYTES_MAX,
    ToolDefinition,
    ToolVersion,
    encode_definition,
)

SOURCES_MAX: Final = 50
TOOLS_MAX: Final = 200

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)
_NOT_IN_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_-]+", re.ASCII)
_NAME_CHARACTERS_MAX: Final = 63
_DIGEST_DIGITS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredTool:
    """A source's current description of a tool. `binding` is the data that the connector needs to run the tool."""

    definition: ToolDefinition
    binding: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A tool that cannot be registered. `name` is the source's name for it."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    tools: Sequence[DiscoveredTool]
    left_out: Sequence[LeftOut] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChange:
    """The difference between a tool and its approved version.

    If the tool exists on only one side, the other side is None.
    """

    tool_name: str
    approved: ToolDefinition | None
    found: ToolDefinition | None


def may_be_source(name: str) -> bool:
    """Return whether a source can have this name. If not, no database query is needed."""
    return _NAME.fullmatch(name) is not None


def check_source_name(name: str) -> None:
    """Validate a source's name.

    Raises:
        InvalidField: The name is invalid.
    """
    if not may_be_source(name):
        message = (
            "name must have 1 to 32 lower-case letters, digits, _ and -, and start with a letter or digit,"
            f" got {name[:80]!r}"
        )
        raise InvalidField(message, field="name")


def definitions_hash(tools: Iterable[DiscoveredTool]) -> str:
    """Return the SHA-256, in hex, of definitions and bindings, independent of their order."""
    items = sorted((tool.definition.name, *_digests(tool)) for tool in tools)
    return hashlib.sha256(dumps_canonical([list(item) for item in items])).hexdigest()


def _digests(tool: DiscoveredTool) -> tuple[str, str]:
    definition = hashlib.sha256(encode_definition(tool.definition)).hexdigest()
    return definition, hashlib.sha256(tool.binding).hexdigest()


def as_approved(versions: Iterable[ToolVersion]) -> list[DiscoveredTool]:
    return [DiscoveredTool(definition=version.definition, binding=version.binding) for version in versions]


def changes(approved: Iterable[DiscoveredTool], found: Iterable[DiscoveredTool]) -> list[ToolChange]:
    """Return the differences, sorted by name."""
    before = {tool.definition.name: tool for tool in approved}
    now = {tool.definition.name: tool for tool in found}
    return [
        ToolChange(
            tool_name=name,
            approved=before[name].definition if name in before else None,
            found=now[name].definition if name in now else None,
        )
        for name in sorted(before.keys() | now.keys())
        if name not in before or name not in now or _digests(before[name]) != _digests(now[name])
    ]


def registered_names(source_name: str, names: Collection[str]) -> Mapping[str, str]:
    """Map each of a source's tool names to its unique registered name, `<source>.<tool>`.

    Valid names do not change. In other names, `_` replaces invalid characters. Names that are too long are truncated,
    and names that would collide get a digest as a suffix. The result does not depend on the order of the names.
    """
    room = _NAME_CHARACTERS_MAX - len(source_name) - 1
    fitting = {name for name in names if 1 <= len(name) <= room and not _NOT_IN_A_NAME.search(name)}
    made = {name: name for name in fitting}
    taken = set(fitting)
    for name in sorted(set(names) - fitting):
        plain = _NOT_IN_A_NAME.sub("_", name).strip("_") or "tool"
        own_name, salt = plain[:room], 0
        while own_name in taken:
            digest = hashlib.sha256(f"{salt}:{name}".encode(errors="surrogatepass")).hexdigest()[:_DIGEST_DIGITS]
            own_name, salt = f"{plain[: room - _DIGEST_DIGITS - 1]}_{digest}", salt + 1
        taken.add(own_name)
        made[name] = own_name
    return {name: f"{source_name}.{own_name}" for name, own_name in made.items()}


def short_description(text: str) -> str:
    """Return a source's description without control characters, truncated to the limit."""
    clean = CONTROL.sub("", text).encode(errors="replace")
    if len(clean) > DESCRIPTION_BYTES_MAX:
        clean = clean[: DESCRIPTION_BYTES_MAX - 3] + b"..."
    return clean.decode(errors="ignore").strip() or "No description."


def plain_schema(schema: Any) -> dict[str, Any]:
    """Return a source's arguments schema as an object schema in the supported dialect.

    Sources often declare an older dialect of JSON Schema but use only features that all dialects share. A schema that
    depends on features of an older dialect does not compile.
    """
    given = dict(schema) if isinstance(schema, Mapping) else {}
    given.pop("$schema", None)
    return {"type": "object"} | given
