"""Bounds of a run, with the deployment's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from services.errors import InvalidField

TOKENS_MAX: Final = 2**53
"""Most tokens that a budget can have."""

_NONE_IS_ZERO: Final = frozenset({"total_tokens_max", "topped_up_tokens_max"})
_MAY_BE_ZERO: Final = frozenset({"agent_depth_max"})


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
    approval_expiry_seconds: float = 900.0
    offer_deadline_seconds: float = 600.0
    answer_timeout_seconds: float = 86_400.0
    context_bytes_max: int = 400_000
    total_tokens_max: int = 0
    topped_up_tokens_max: int = 0
    top_up_timeout_seconds: float = 86_400.0
    agent_depth_max: int = 2

    def narrowed(self, asked: Mapping[str, float]) -> Limits:
        """Return these limits with those of `asked`, which may only be smaller.

        `asked` has the fields that are present, by name.

        Raises:
            InvalidField: a value is not positive, or larger than here.
        """
        known = {name: getattr(self, name) for name in self.__struct_fields__}
        for name, value in asked.items():
            is_open = name in _NONE_IS_ZERO and known[name] == 0
            most = TOKENS_MAX if is_open else known[name]
            may_be_zero = is_open or name in _MAY_BE_ZERO
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise InvalidField(f"limits.{name} must be above 0", field=f"options.limits.{name}")
            if value > most:
                raise InvalidField(
                    f"limits.{name} may only narrow the deployment's {most:g}", field=f"options.limits.{name}"
                )
        return replace(self, **{name: type(known[name])(value) for name, value in asked.items()})
