"""Remote workers: who they are, and what follows when one is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from pawl.chassis.ids import StoreId, WorkerId
from pawl.tool_registry.rules.registering import WORKER
from pawl.values import EffectClass

TOOLS_MAX: Final = 200
CALLS_MAX: Final = 256


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
    return f"{WORKER}:{group_name}"


def group_of(source: str) -> str:
    """Return the group whose tools have that source."""
    return source.partition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A worker's stream in this process; `tools` are its definitions' hashes by name."""

    key: WorkerKey
    attachment: str
    tools: Mapping[str, str]


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
