"""Commands to runs. Numbers are those of pawl.job.v1."""

from __future__ import annotations

from enum import IntEnum


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
