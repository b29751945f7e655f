"""The states of tool calls, and what people are asked about them. Numbers are those of pawl.event.v1."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final

import msgspec

from pawl.chassis.ids import CallId


class CallState(IntEnum):
    """The states of a tool call."""

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
        """True if the state never changes again."""
        return self >= CallState.SUCCEEDED


SETTLED: Final[frozenset[int]] = frozenset(state for state in CallState if state.is_terminal)
"""The states that never change; a call in one of them has its result."""
WITH_PEOPLE: Final = frozenset({CallState.AWAITING_APPROVAL, CallState.ASKED, CallState.OFFERED})
"""States in which a call waits for a person, or for a front end."""


class DecisionKind(IntEnum):
    """The kinds of decision that a person makes about a call."""

    APPROVE = 1
    EDIT = 2
    REJECT = 3
    ANSWER = 4


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The iterations of a job, of which a call is one.

    `digest` is that of the grant that covers or would cover them, `grant_call_id` the call with which it was given;
    both are empty without one.
    """

    digest: str = ""
    interval_seconds: float
    iterations_max: int
    end_time: float | None = None
    grant_call_id: CallId = CallId("")
    """For the registry alone."""


class QuestionKind(StrEnum):
    """The kinds of question, by what they want."""

    CLARIFICATION = "clarification"
    PERMISSION = "permission"
    CONFIRMATION = "confirmation"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question of a call to a person, its reason, and the answers to choose from; free text is always an answer."""

    question: str
    why: str = ""
    kind: QuestionKind = QuestionKind.CLARIFICATION
    options: tuple[str, ...] = ()
    default_answer: str = ""
    """The answer after the deadline."""
    timeout_seconds: float = 0.0
    """The time for which it waits; 0 means as long as the run says."""
    answer_schema_json: bytes = b""
    """The schema that an answer must meet; empty if any will do."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a question that a running tool asked."""

    question: str
    answer: str = ""
    declined: bool = False


class CommandOutcome(IntEnum):
    """The final word on a command."""

    ACCEPTED = 1
    DUPLICATE = 2
    LATE = 3
    WRONG_HOLDER = 4
    UNKNOWN = 5
    REFUSED = 6

    @property
    def is_taken(self) -> bool:
        """True if the command is in effect, now or since before."""
        return self in {CommandOutcome.ACCEPTED, CommandOutcome.DUPLICATE}


class CallResolution(IntEnum):
    """The finding of an operator about a call in doubt."""

    HAPPENED = 1
    RUN_AGAIN = 2
    TELL_MODEL = 3


class DecisionRight(IntEnum):
    """The right of a user to decide about calls."""

    OWN_RUNS = 1
    STORE = 2
    QUESTIONS = 3
