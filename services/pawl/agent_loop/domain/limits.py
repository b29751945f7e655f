"""Bounds of a run: what holds where nothing is asked for, and the most that may be asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.errors import InvalidField
from pawl.values import TOKENS_MAX

CONTEXT_BYTES_MIN: Final = 10_000
"""Fewest bytes of history: below it there is no room for a summary and the message that it is for."""

RESULT_BYTES_MIN: Final = 1024
"""Fewest bytes of the results of a round: below it a cut result is little more than the note that says so."""

IDENTICAL_CALLS_MIN: Final = 2
"""With 1, the first call of any tool would be a loop."""

_SMALLEST: Final = {
    "context_bytes_max": CONTEXT_BYTES_MIN,
    "result_bytes_per_round_max": RESULT_BYTES_MIN,
    "identical_calls_max": IDENTICAL_CALLS_MIN,
}
NONE_IS_ZERO: Final = frozenset({"total_tokens_max", "topped_up_tokens_max"})
"""Limits of which 0 means that there is none."""
_MAY_BE_ZERO: Final = frozenset({"agent_depth_max", "provider_wait_seconds"})
OF_TOOLS: Final = ("tool_timeout_seconds_max", "answer_timeout_seconds_max")
"""The most that tools may say for themselves; the deployment's value is the ceiling of what runs may."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Every bound that holds for a run; see pawl.event.v1.RunLimits for what each means."""

    rounds_max: int = 10
    calls_per_round_max: int = 20
    identical_calls_max: int = 4
    tool_timeout_seconds: float = 10.0
    round_timeout_seconds: float = 120.0
    run_timeout_seconds: float = 300.0
    model_headers_timeout_seconds: float = 30.0
    model_idle_timeout_seconds: float = 45.0
    model_attempts_max: int = 4
    result_bytes_per_round_max: int = 51_200
    approval_expiry_seconds: float = 86_400.0
    offer_deadline_seconds: float = 600.0
    answer_timeout_seconds: float = 86_400.0
    context_bytes_max: int = 400_000
    total_tokens_max: int = 0
    topped_up_tokens_max: int = 0
    top_up_timeout_seconds: float = 86_400.0
    agent_depth_max: int = 2
    tool_timeout_seconds_max: float = 100.0
    answer_timeout_seconds_max: float = 30 * 86_400.0
    provider_wait_seconds: float = 0.0

    def with_asked(self, asked: Mapping[str, float], ceilings: Limits) -> Limits:
        """Return these limits with those of `asked`, which may reach `ceilings`.

        `asked` has the fields that are present, by name.

        Raises:
            InvalidField: a value is not positive, above its ceiling, or too small to work with.
        """
        for name, value in asked.items():
            ceiling = getattr(ceilings, name)
            is_open = name in NONE_IS_ZERO and ceiling == 0
            most = TOKENS_MAX if is_open else ceiling
            may_be_zero = is_open or name in _MAY_BE_ZERO
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise InvalidField(f"limits.{name} must be above 0", field=f"options.limits.{name}")
            if value < (smallest := _SMALLEST.get(name, 0)):
                raise InvalidField(f"limits.{name} must be at least {smallest}", field=f"options.limits.{name}")
            if value > most:
                raise InvalidField(f"limits.{name} may be at most {most:g} here", field=f"options.limits.{name}")
        return replace(self, **{name: type(getattr(self, name))(value) for name, value in asked.items()})

    def seconds_of_tool(self, own: float) -> float:
        """Return how long a call of a tool may take whose own timeout is that; 0 if it has none."""
        return min(own or self.tool_timeout_seconds, self.tool_timeout_seconds_max)

    def seconds_of_question(self, own: float) -> float:
        """Return how long a question may wait whose own timeout is that; 0 if it has none."""
        return min(own or self.answer_timeout_seconds, self.answer_timeout_seconds_max)


CEILINGS: Final = Limits(
    rounds_max=1000,
    calls_per_round_max=100,
    identical_calls_max=100,
    # Shorter than a round, so that a slow tool ends its call and not its run.
    tool_timeout_seconds=100.0,
    round_timeout_seconds=3600.0,
    run_timeout_seconds=86_400.0,
    model_headers_timeout_seconds=600.0,
    model_idle_timeout_seconds=600.0,
    model_attempts_max=20,
    result_bytes_per_round_max=1024 * 1024,
    approval_expiry_seconds=30 * 86_400.0,
    offer_deadline_seconds=7 * 86_400.0,
    answer_timeout_seconds=30 * 86_400.0,
    context_bytes_max=4_000_000,
    top_up_timeout_seconds=30 * 86_400.0,
    agent_depth_max=10,
    provider_wait_seconds=86_400.0,
)
"""The most that a run may ask for where the deployment says nothing."""


def read_ceilings(text: str, defaults: Limits) -> Limits:
    """Return the ceilings that `text` names (`rounds_max=50,tool_timeout_seconds=600`), the usual ones for all others.

    None is below the deployment's default. A budget of tokens costs money: without a
    ceiling of its own it is its default.

    Raises:
        ValueError: a name or a number is none, or below the default.
    """
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name not in defaults.__struct_fields__ or name in OF_TOOLS:
            raise ValueError(f"{name!r} is no limit of a run")
        value = float(number)
        least = getattr(defaults, name)
        is_open = name in NONE_IS_ZERO and value == 0
        if not math.isfinite(value) or (value < least and not is_open):
            raise ValueError(f"{name}: must be a number, and not below the default of {least:g}")
        found[name] = value
    for name in defaults.__struct_fields__:
        usual = 0 if name in NONE_IS_ZERO else getattr(CEILINGS, name)
        found.setdefault(name, max(usual, getattr(defaults, name)))
    found |= {name: found[name.removesuffix("_max")] for name in OF_TOOLS}
    return Limits(**{name: type(getattr(defaults, name))(value) for name, value in found.items()})
