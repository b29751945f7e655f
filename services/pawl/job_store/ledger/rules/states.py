"""Enums on which the ledger's decisions depend. Enums of `pawl.event.v1` have the same numbers."""

from __future__ import annotations

from enum import IntEnum


class AttentionReason(IntEnum):
    UNKNOWN_OUTCOME = 1
    QUARANTINED = 2


class RunProgram(IntEnum):
    """The program that drives a run. DEFAULT stands for the model, a job's schedule or an undo."""

    DEFAULT = 0
    # Its worker needs only its open calls.
    WORKFLOW = 1
    # Its worker needs only the last round's calls.
    GOAL = 2


class OperatorAct(IntEnum):
    RESOLVED = 1
    REDRIVEN = 2
    ENDED = 3


class Sharing(IntEnum):
    PRIVATE = 1
    READ = 2
    WRITE = 3


class WaitReason(IntEnum):
    """The reason why a run is not making progress. If there are several reasons, the first in this list is reported."""

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
    EVENT = 16
    JOB = 17
    STORE_TOKENS = 18
    USER_TOKENS = 19
    RATE = 20
