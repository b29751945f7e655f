"""Rules that determine which calls need a user's approval."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pawl.chassis.strict_json import JsonValue
from pawl.tool_registry.rules.execution import ExecutionResult, ended_badly
from pawl.tools.rules.definition import ToolDefinition
from pawl.values import Category, EffectClass, ExecutionContext, Outcome

BULK_ITEMS_MIN: Final = 3
COUNT_PATH_CHARACTERS_MAX: Final = 200

_NAME: Final = r"[^.\[\]$\x00-\x1f]+"
_COUNT_PATH: Final = re.compile(rf"(\$\.)?{_NAME}(\[\*\])*(\.{_NAME}(\[\*\])*)*")


def longest_array(arguments: Mapping[str, JsonValue]) -> int:
    """Return the length of the longest array at any depth."""
    longest, to_visit = 0, list(arguments.values())
    while to_visit:
        value = to_visit.pop()
        if isinstance(value, list):
            longest = max(longest, len(value))
            to_visit += value
        elif isinstance(value, dict):
            to_visit += value.values()
    return longest


def may_be_count_path(path: str) -> bool:
    """Return whether a path has the form that `count_at` supports, such as `$.body.orders[*].lines`."""
    return len(path) <= COUNT_PATH_CHARACTERS_MAX and _COUNT_PATH.fullmatch(path) is not None


def count_at(arguments: Mapping[str, JsonValue], path: str) -> int:
    """Return the number of values that a path selects.

    An array counts as the number of its items, and any other value counts as 1. `[*]` selects the items of an array. A
    missing value counts as 0.
    """
    found: list[JsonValue] = [dict(arguments)]
    for step in path.removeprefix("$").removeprefix(".").replace("[*]", ".[*]").split("."):
        if step == "[*]":
            found = [item for value in found if isinstance(value, list) for item in value]
        else:
            found = [value[step] for value in found if isinstance(value, dict) and step in value]
    return sum(len(value) if isinstance(value, list) else 1 for value in found)


def items_of(definition: ToolDefinition, arguments: Mapping[str, JsonValue]) -> int:
    if definition.bulk_count:
        return count_at(arguments, definition.bulk_count)
    return longest_array(arguments)


def approval_cause(definition: ToolDefinition, items: int) -> str:
    """Return why a call that affects `items` items needs approval, or an empty string if it needs none.

    Questions to a user are never gated, because the user decides by answering. Delegating to an agent never counts as a
    bulk call, because the agent's own calls are gated.
    """
    if definition.context is ExecutionContext.HUMAN:
        return ""
    causes = []
    if definition.category is not Category.SAFE:
        causes.append(f"category {definition.category}")
    counts = definition.effect is not EffectClass.READ_ONLY and definition.context is not ExecutionContext.AGENT
    if items >= BULK_ITEMS_MIN and counts:
        causes.append(f"bulk of {items}")
    return ", ".join(causes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate limit. A minute's worth of calls may start in one burst. `name` is unique within a store."""

    name: str
    per_minute: int


@dataclass(eq=False)
class Exceeded(Exception):
    """Raised when a rate limit is used up. A call may start after `wait_seconds`."""

    rate: Rate
    wait_seconds: float


STORE_RATE_NAME: Final = "store"


def rate_limited(tool_name: str, exceeded: Exceeded) -> ExecutionResult:
    what = "Calls to all tools in this store" if exceeded.rate.name == STORE_RATE_NAME else f"Calls to {tool_name}"
    wait = max(1, math.ceil(exceeded.wait_seconds))
    return ended_badly(
        Outcome.FAILED,
        "RATE_LIMITED",
        f"{what} are limited to {exceeded.rate.per_minute} a minute. Nothing was done. Try again in {wait} s.",
    )
