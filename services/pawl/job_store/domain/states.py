"""The closed sets of values that the ledger judges. Numbers are those of the contract (`pawl.event.v1`)."""

from __future__ import annotations

from enum import IntEnum


class RunState(IntEnum):
    """The states of a run."""

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
        """True if the state never changes again."""
        return self >= RunState.COMPLETED


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


class StopCause(IntEnum):
    """The cause for which a run was asked to stop."""

    USER = 1
    SUPERSEDED = 2
    OPERATOR = 4
    PARENT = 5
    MODEL = 6


class AttentionReason(IntEnum):
    """The reason why a run needs an operator."""

    UNKNOWN_OUTCOME = 1
    QUARANTINED = 2


class OperatorAct(IntEnum):
    """The act of an operator on a run."""

    RESOLVED = 1
    REDRIVEN = 2
    ENDED = 3


class DecisionKind(IntEnum):
    """The kinds of decision that a person makes about a call."""

    APPROVE = 1
    EDIT = 2
    REJECT = 3
    ANSWER = 4


class DecisionRight(IntEnum):
    """The right of a user to decide."""

    OWN_RUNS = 1
    STORE = 2
    QUESTIONS = 3


class MessagePolicy(IntEnum):
    """The effect of a message while a run of its conversation is active."""

    QUEUE = 1
    STEER = 2
    INTERRUPT = 3
    REJECT = 4


class LeaseAction(IntEnum):
    """The effect of a commit on the lease of its worker."""

    KEEP = 1
    PARK = 2
    RELEASE = 3


class Sharing(IntEnum):
    """The rights of other users of the store on a conversation."""

    PRIVATE = 1
    READ = 2
    WRITE = 3


class CommandOutcome(IntEnum):
    """The final word on a command."""

    ACCEPTED = 1
    DUPLICATE = 2
    LATE = 3
    WRONG_HOLDER = 4
    UNKNOWN = 5
    REFUSED = 6


class WaitKind(IntEnum):
    """The things that a WAITING run waits for, as far as the ledger knows them."""

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


class WaitReason(IntEnum):
    """The reasons why a run does not go on; of several the first counts."""

    APPROVAL = 1
    ANSWER = 2
    FRONT_END = 3
    TOKENS = 4
    AGENT = 5
    TURN = 6
    PLACE = 7
    WORKER = 8
    OPERATOR = 9
    STOPPING = 10
    AGENT_QUOTA = 11
    TIME = 12
    PAUSED = 13
    COMPLETION = 14
    PROVIDER = 15
