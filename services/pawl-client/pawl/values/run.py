"""Defines states of runs and the values that change them. Numbers match pawl.event.v1 and pawl.job.v1."""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Final

import msgspec

# The largest token count; larger ones are capped.
TOKENS_MAX: Final = 2**53


class RunState(IntEnum):
    QUEUED = 1
    RUNNING = 2
    WAITING = 3
    CANCELLING = 4
    NEEDS_ATTENTION = 5
    COMPLETED = 10
    FAILED = 11
    CANCELLED = 12
    EXPIRED = 13

    @property
    def is_terminal(self) -> bool:
        return self >= RunState.COMPLETED


# A set of int, so that a message's `state`, which is an int, can also be looked up.
ENDED: Final[frozenset[int]] = frozenset(state for state in RunState if state.is_terminal)
# States of a run that has ended, or is waiting for a user, a program or a point in time.
RESTING: Final[frozenset[int]] = ENDED | {RunState.WAITING, RunState.NEEDS_ATTENTION}


class WaitKind(IntEnum):
    TOOL_RESULT = 1
    APPROVAL = 2
    ANSWER = 3
    BUDGET = 4
    AGENT = 5
    AGENT_QUOTA = 6
    TIME = 7
    PAUSED = 8
    COMPLETION = 9
    PROVIDER = 10
    EVENT = 11
    JOB = 12
    PERSON = 13
    STORE_DAILY_TOKENS = 14
    STORE_MONTHLY_TOKENS = 15
    USER_DAILY_TOKENS = 16
    USER_MONTHLY_TOKENS = 17
    RATE = 18


class StopCause(IntEnum):
    USER = 1
    SUPERSEDED = 2
    OPERATOR = 4
    PARENT = 5
    MODEL = 6
    FEATURE_OFF = 7


class Feature(StrEnum):
    """A feature that can be disabled for individual stores."""

    RUNS = "runs"
    BACKGROUND = "background"
    DELEGATION = "delegation"
    SCHEDULES = "schedules"
    TRIGGERS = "triggers"


class MessagePolicy(IntEnum):
    """Policy for a message to a conversation that has an active run."""

    QUEUE = 1
    STEER = 2
    INTERRUPT = 3
    REJECT = 4


class LeaseAction(IntEnum):
    KEEP = 1
    PARK = 2
    RELEASE = 3


class Overlap(IntEnum):
    """The overlap policy of a schedule or trigger. It applies when the previous run is still active."""

    SKIP = 1
    QUEUE = 2
    ALLOW = 3
    CANCEL = 4


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token usage of model calls. `model_calls` includes failed attempts.

    `estimated_tokens` counts the input and output tokens that the model server did not report.
    """

    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    model_calls: int = 0
    estimated_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """The number of tokens that count against the budget, including cached input and reasoning."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        """Return the sum, capped at TOKENS_MAX."""
        return self._with_each(lambda one, more: min(one + more, TOKENS_MAX), other)

    def __sub__(self, other: Usage) -> Usage:
        return self._with_each(operator.sub, other)

    def _with_each(self, combine: Callable[[int, int], int], other: Usage) -> Usage:
        return Usage(**{name: combine(getattr(self, name), getattr(other, name)) for name in Usage.__struct_fields__})
