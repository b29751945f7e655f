"""The decision about a requested call that already has an entry in the execution journal.

The registry writes an entry before the effect and completes it afterwards. The process that writes an entry holds a
lease. If that process no longer has a lease and the entry is still open, the process died during the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pawl.chassis.ids import CallKey, RunId
from pawl.tool_registry.rules.execution import ExecutionResult
from pawl.values import EffectClass, Outcome, Question


class Step(StrEnum):
    # Refuse: it was started with another tool or other arguments.
    MISMATCH = "MISMATCH"
    # Return the stored result.
    STORED = "STORED"
    # Wait: another process is running it.
    ELSEWHERE = "ELSEWHERE"
    # Ask the tool whether it took effect.
    RECONCILE = "RECONCILE"
    # Record that the outcome is unknown.
    CONCLUDE_UNKNOWN = "CONCLUDE_UNKNOWN"
    # Run it: it certainly has not taken effect.
    RUN = "RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A journal entry, read under a lock."""

    # Digest of tool and arguments. Empty if the call was cancelled before it started.
    fingerprint: str
    effect: EffectClass
    # The number of times that the outcome was found to be unknown.
    unknowns: int
    # True if this process wrote the entry.
    is_own: bool
    # True if this process knows that it wrote the entry but did not run the tool.
    is_unexecuted: bool
    is_holder_alive: bool
    result: ExecutionResult | None


def next_step(entry: Entry, *, fingerprint: str, unknowns_resolved: int) -> Step:
    """Return what to do for a call that has a journal entry.

    `unknowns_resolved` is the number of times that an operator has decided to run the call again after an unknown
    outcome. This process must not be running the call. If it wrote the open entry itself, it has therefore lost track
    of the call.
    """
    if entry.fingerprint and entry.fingerprint != fingerprint:
        return Step.MISMATCH
    if entry.result is not None:
        is_disowned = entry.result.outcome is Outcome.UNKNOWN and unknowns_resolved >= entry.unknowns
        return Step.RUN if is_disowned else Step.STORED
    if entry.is_unexecuted:
        return Step.RUN
    if entry.is_holder_alive and not entry.is_own:
        return Step.ELSEWHERE
    return Step.RECONCILE if entry.effect is EffectClass.RECONCILABLE else Step.CONCLUDE_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalCall:
    key: CallKey
    run_id: RunId
    tool_name: str
    tool_version: int
    effect: EffectClass
    fingerprint: str
    unknowns_resolved: int
    # Unique per attempt.
    token: str
    # True if the tool can report whether an earlier execution took effect.
    is_askable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The call may now run in this process.

    With `must_reconcile`, first ask the tool whether an earlier attempt took effect.
    """

    must_reconcile: bool = False
    # True if the call has been cancelled since: it must be reconciled, but must not run.
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldElsewhere:
    """Another process is running the call. Try again shortly.

    `question` is the question that the call's tool is asking, after `position` earlier questions.
    """

    question: Question | None = None
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """An attempt to run a call. Only the newest attempt may write checkpoints."""

    key: CallKey
    run_id: RunId
    attempt: int
    # Unique per attempt.
    token: str
