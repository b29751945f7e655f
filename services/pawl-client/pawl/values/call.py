"""Defines states of tool calls, and questions to users. Numbers match pawl.event.v1."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final

import msgspec

from pawl.chassis.ids import CallId


class CallState(IntEnum):
    PROPOSED = 1
    AWAITING_APPROVAL = 2
    OFFERED = 3
    ASKED = 4
    RUNNABLE = 5
    RUNNING = 6
    DELEGATED = 7
    SUCCEEDED = 10
    FAILED = 11
    REJECTED = 12
    EXPIRED = 13
    CANCELLED = 14
    OUTCOME_UNKNOWN = 15
    DETACHED = 16

    @property
    def is_terminal(self) -> bool:
        return self >= CallState.SUCCEEDED


# These states never change; a call in one of them has its result.
SETTLED: Final[frozenset[int]] = frozenset(state for state in CallState if state.is_terminal)
# The call is waiting for a user or a front end.
WITH_PEOPLE: Final = frozenset({CallState.AWAITING_APPROVAL, CallState.ASKED, CallState.OFFERED})


class DecisionKind(IntEnum):
    APPROVE = 1
    EDIT = 2
    REJECT = 3
    ANSWER = 4


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The series of job iterations to which a call belongs.

    `digest` identifies the grant that covers the iterations, or the grant to request. It is empty if there is neither.
    `grant_call_id` identifies the call whose approval created the grant. It is empty without a grant.
    """

    digest: str = ""
    interval_seconds: float
    iterations_max: int
    end_time: float | None = None
    # Used only by the registry.
    grant_call_id: CallId = CallId("")


class QuestionKind(StrEnum):
    CLARIFICATION = "clarification"
    PERMISSION = "permission"
    CONFIRMATION = "confirmation"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A call's question to a user, with a reason and suggested answers. Other answers are also accepted."""

    question: str
    why: str = ""
    kind: QuestionKind = QuestionKind.CLARIFICATION
    options: tuple[str, ...] = ()
    # Used when the deadline passes.
    default_answer: str = ""
    # 0 means the run's default.
    timeout_seconds: float = 0.0
    # The JSON Schema of the answer; empty accepts any answer.
    answer_schema_json: bytes = b""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a question that a running tool asked."""

    question: str
    answer: str = ""
    declined: bool = False


class CommandOutcome(IntEnum):
    ACCEPTED = 1
    DUPLICATE = 2
    LATE = 3
    WRONG_HOLDER = 4
    UNKNOWN = 5
    REFUSED = 6

    @property
    def is_taken(self) -> bool:
        """True if the command took effect, either through this request or through an earlier one."""
        return self in {CommandOutcome.ACCEPTED, CommandOutcome.DUPLICATE}


class CallResolution(IntEnum):
    """An operator's decision about a call whose outcome was unknown."""

    HAPPENED = 1
    RUN_AGAIN = 2
    TELL_MODEL = 3


class DecisionRight(IntEnum):
    OWN_RUNS = 1
    STORE = 2
    QUESTIONS = 3
