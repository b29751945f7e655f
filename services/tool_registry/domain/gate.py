"""Which calls need a person's approval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from services.chassis.strict_json import JsonValue
from services.tool_registry.domain.definition import Category, Effect, ExecutionContext, ToolDefinition

BULK_ITEMS_MIN: Final = 3


def longest_array(arguments: Mapping[str, JsonValue]) -> int:
    """Return the length of the longest top-level array."""
    return max((len(value) for value in arguments.values() if isinstance(value, list)), default=0)


def approval_cause(definition: ToolDefinition, items: int) -> str:
    """Return why a call on `items` things is gated, or an empty text if it is not.

    A question to a person is not gated: the answer is the person's decision. What
    an agent is told is no bulk: its own calls are gated.
    """
    if definition.context is ExecutionContext.HUMAN:
        return ""
    causes = []
    if definition.category is not Category.SAFE:
        causes.append(f"category {definition.category}")
    counts = definition.effect is not Effect.READ_ONLY and definition.context is not ExecutionContext.AGENT
    if items >= BULK_ITEMS_MIN and counts:
        causes.append(f"bulk of {items}")
    return ", ".join(causes)
