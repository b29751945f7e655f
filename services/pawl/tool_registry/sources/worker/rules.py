"""The keys of remote workers, and the rules for calls whose worker is lost."""

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
    store_id: StoreId
    group_name: str
    worker_id: WorkerId


class Purpose(StrEnum):
    """The purpose of a call to a worker: to run the call, or to report whether it took effect."""

    RUN = "RUN"
    RECONCILE = "RECONCILE"


class CallState(StrEnum):
    WAITING = "WAITING"
    HELD = "HELD"
    DONE = "DONE"


class AfterLoss(StrEnum):
    RUN_ELSEWHERE = "RUN_ELSEWHERE"
    # Another worker in the group reports whether the call took effect.
    RECONCILE_ELSEWHERE = "RECONCILE_ELSEWHERE"
    UNKNOWN = "UNKNOWN"


def after_loss(effect: EffectClass, purpose: Purpose) -> AfterLoss:
    if purpose is Purpose.RECONCILE:
        return AfterLoss.RECONCILE_ELSEWHERE
    match effect:
        case EffectClass.READ_ONLY | EffectClass.IDEMPOTENT:
            return AfterLoss.RUN_ELSEWHERE
        case EffectClass.RECONCILABLE:
            return AfterLoss.RECONCILE_ELSEWHERE
        case EffectClass.AT_MOST_ONCE:
            return AfterLoss.UNKNOWN


def source_of(group_name: str) -> str:
    return f"{WORKER}:{group_name}"


def group_of(source: str) -> str:
    return source.partition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A worker's stream in this process. `tools` maps names to definition hashes."""

    key: WorkerKey
    attachment: str
    tools: Mapping[str, str]


class NewsKind(StrEnum):
    # A call is waiting for a worker; the name is its group.
    WAITING = "WAITING"
    # A call has progress or an answer.
    CALL = "CALL"
    # A call was cancelled.
    CANCEL = "CANCEL"


# Called with the kind, the store, and a group name or call id.
Listener = Callable[[NewsKind, StoreId, str], None]
