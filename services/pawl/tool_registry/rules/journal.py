"""Rules of the execution journal: what to do when a call is requested that already has an entry.

An entry is written before the effect and completed after it. Its writer holds a lease. An open entry whose writer has
no lease belongs to a process that died during the call.
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
    # Wait: another process runs it.
    ELSEWHERE = "ELSEWHERE"
    # Ask the tool whether the effect happened.
    RECONCILE = "RECONCILE"
    # Record that the outcome is unknown.
    CONCLUDE_UNKNOWN = "CONCLUDE_UNKNOWN"
    # Run it: the effect certainly has not happened.
    RUN = "RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A journal entry, read under a lock."""

    # Digest of tool and arguments. Empty if the call was cancelled before it started.
    fingerprint: str
    effect: EffectClass
    # How often the outcome was concluded to be unknown.
    unknowns: int
    # This process wrote it.
    is_own: bool
    # This process knows that it ran nothing after writing the entry.
    is_unexecuted: bool
    is_holder_alive: bool
    result: ExecutionResult | None


def next_step(entry: Entry, *, fingerprint: str, unknowns_resolved: int) -> Step:
    """Return what to do for a call that has a journal entry.

    An operator found that `unknowns_resolved` of its unknown outcomes did not happen. The caller must not be running
    the call: an open entry of its own process is then one it lost track of.
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
    # The tool can report whether an earlier execution took effect.
    is_askable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The call may run now, in this process. With `must_reconcile`, ask the tool first."""

    must_reconcile: bool = False
    # The call was cancelled since: reconcile it, but do not run it.
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldElsewhere:
    """Another process runs the call; try again shortly.

    `question` is what its tool is asking, after `position` earlier questions.
    """

    question: Question | None = None
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """An attempt to run a call. It may write checkpoints while it is the newest attempt."""

    key: CallKey
    run_id: RunId
    attempt: int
    # Unique per attempt.
    token: str
