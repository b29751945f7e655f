"""Remote workers: what they are handed, what they answer, and what follows when one is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId, WorkerId
from pawl.tool_registry.rules.definition import ToolDefinition
from pawl.tool_registry.rules.execution import InverseCall
from pawl.values import EffectClass, Progress

TOOLS_MAX: Final = 200
CALLS_MAX: Final = 256
SOURCE_KIND: Final = "worker"


class WorkerKey(NamedTuple):
    """The key of a worker."""

    store_id: StoreId
    group_name: str
    worker_id: WorkerId


class Purpose(StrEnum):
    """The purpose for which a worker gets a call."""

    RUN = "RUN"
    RECONCILE = "RECONCILE"


class CallState(StrEnum):
    """The states of a call for a worker."""

    WAITING = "WAITING"
    HELD = "HELD"
    DONE = "DONE"


class AnswerKind(StrEnum):
    """The ways in which a worker says that a call has ended."""

    RETURNED = "RETURNED"
    FAILED = "FAILED"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    DID_NOT_HAPPEN = "DID_NOT_HAPPEN"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer: `content` is the JSON of what was returned, `message` the text of a failure.

    `is_too_large`: it is a failure because too much was returned.
    """

    kind: AnswerKind
    content: bytes = b""
    message: str = ""
    inverse: InverseCall | None = None
    is_too_large: bool = False


class CallDetails(msgspec.Struct, frozen=True, kw_only=True):
    """On whose behalf a call is made, and its canonical arguments."""

    user_id: UserId
    conversation_id: ConversationId
    run_id: RunId
    arguments: bytes


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The call as the audit has it."""

    user_id: UserId
    run_id: RunId
    tool_version: int
    arguments_sha256: str
    conversation_id: ConversationId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCall:
    """A call that some worker of a group is to run."""

    store_id: StoreId
    call_id: CallId
    group_name: str
    tool_name: str
    definition_hash: str
    purpose: Purpose
    details: CallDetails
    attempt: int
    seconds: float
    """Until its deadline."""
    token: str
    """Unique for the execution that asks."""
    origin: Origin | None
    """None for a question about an earlier execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The context of a worker. `held` are the calls that it has in hand, with their epochs."""

    group_name: str
    worker_id: WorkerId
    definitions: tuple[ToolDefinition, ...]
    calls_max: int
    held: Mapping[CallId, int]


class AfterLoss(StrEnum):
    """The consequence for a call whose worker is lost."""

    RUN_ELSEWHERE = "RUN_ELSEWHERE"
    ASK = "ASK"
    """Another worker of the group is asked whether it happened."""
    UNKNOWN = "UNKNOWN"


def after_loss(effect: EffectClass, purpose: Purpose) -> AfterLoss:
    """Return what follows for a call that was handed out, if its worker is lost before it answers."""
    if purpose is Purpose.RECONCILE:
        return AfterLoss.ASK
    match effect:
        case EffectClass.READ_ONLY | EffectClass.IDEMPOTENT:
            return AfterLoss.RUN_ELSEWHERE
        case EffectClass.RECONCILABLE:
            return AfterLoss.ASK
        case EffectClass.AT_MOST_ONCE:
            return AfterLoss.UNKNOWN


def source_of(group_name: str) -> str:
    """Return the source of the tools of a group."""
    return f"{SOURCE_KIND}:{group_name}"


def group_of(source: str) -> str:
    """Return the group whose tools have that source."""
    return source.partition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A worker's stream in this process; `tools` are its definitions' hashes by name."""

    key: WorkerKey
    attachment: str
    tools: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """A call as the execution that asked sees it."""

    state: CallState
    purpose: Purpose
    is_lost: bool
    """Its worker's lease is over, by the clock of the record, or it came back without the call."""
    is_given_up: bool
    """It came back without the call."""
    progress: Progress | None
    answer: Answer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCall:
    """A call that has ended without the result that a worker brought, as the audit names it."""

    tool_name: str
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The fate of a result; `late` if it is one that the audit does not have yet."""

    status: int
    """A value of pawl.tool.v1.ResultStatus."""
    late: LateCall | None = None


class NewsKind(StrEnum):
    """The kinds of news from another process."""

    WAITING = "WAITING"
    """A call waits; the name is that of its group."""
    CALL = "CALL"
    """Something came for the execution of a call."""
    CANCEL = "CANCEL"
    """The result of a call is not wanted any more."""


Listener = Callable[[NewsKind, StoreId, str], None]
"""Gets the kind, the store, and the name of a group or the id of a call."""
