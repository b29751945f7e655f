"""Objections to a tool before any model has seen it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pawl.tool_registry.domain.pointers import resolve
from pawl.tool_registry.sdk.tool import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An error, which makes the check fail, or a warning."""

    is_error: bool
    text: str


def find(tool: Tool[..., Any]) -> Iterator[Finding]:
    """Yield what is wrong with a tool, or could be better."""
    schema = tool.definition.arguments_schema
    for name, part in schema.get("properties", {}).items():
        if "description" not in part and "description" not in _target(schema, part):
            text = f"parameter {name} has no description (Args: of the docstring, or a text in Annotated)"
            yield Finding(is_error=False, text=text)
    if tool.process is not None and not _is_found(tool):
        yield Finding(
            is_error=True,
            text=f"it is no name at the top of its module {tool.function.__module__}: its own process cannot find it",
        )


def _target(schema: Any, part: Any) -> Any:
    resolved = resolve(schema, part)
    return resolved if isinstance(resolved, dict) else {}


def _is_found(tool: Tool[..., Any]) -> bool:
    names = vars(sys.modules[tool.function.__module__]).values()
    return any(isinstance(value, Tool) and value.name == tool.name for value in names)
