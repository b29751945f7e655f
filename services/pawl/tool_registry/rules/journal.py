"""The journal of executions: what a written entry says about asking again.

An entry is written before the effect and completed after it. Who wrote it holds
a lease; an entry without an end whose writer has no lease any more is that of a
process that died in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pawl.chassis.ids import CallKey, RunId
from pawl.tool_registry.rules.execution import ExecutionResult
from pawl.values import EffectClass, Outcome, Question


class Step(StrEnum):
    """The next step for a call that is in the journal."""

    MISMATCH = "MISMATCH"
    """Refuse: it was begun with another tool or other arguments."""
    STORED = "STORED"
    """Answer with the stored result."""
    ELSEWHERE = "ELSEWHERE"
    """Wait: another process runs it."""
    RECONCILE = "RECONCILE"
    """Ask the tool whether it happened."""
    CONCLUDE_UNKNOWN = "CONCLUDE_UNKNOWN"
    """Write that nobody knows."""
    RUN = "RUN"
    """Run it: it is certain that it has not happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A call in the journal, read under a lock."""

    fingerprint: str
    """Digest of tool and arguments; empty if it was cancelled before it began."""
    effect: EffectClass
    unknowns: int
    """The number of times it was concluded that nobody knows."""
    is_own: bool
    """True if the process that asks wrote it."""
    is_unacted: bool
    """True if that process knows that nothing was run on the strength of it."""
    is_holder_alive: bool
    result: ExecutionResult | None


def next_step(entry: Entry, *, fingerprint: str, unknowns_resolved: int) -> Step:
    """Return what to do when a call is asked for that is in the journal already.

    `unknowns_resolved` of its unknown outcomes were found, by an operator, not to
    have happened. Asked by a process that does not run the call at the moment:
    an open entry of its own is one that it lost.
    """
    if entry.fingerprint and entry.fingerprint != fingerprint:
        return Step.MISMATCH
    if entry.result is not None:
        is_disowned = entry.result.outcome is Outcome.UNKNOWN and unknowns_resolved >= entry.unknowns
        return Step.RUN if is_disowned else Step.STORED
    if entry.is_unacted:
        return Step.RUN
    if entry.is_holder_alive and not entry.is_own:
        return Step.ELSEWHERE
    return Step.RECONCILE if entry.effect is EffectClass.RECONCILABLE else Step.CONCLUDE_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalCall:
    """A call that is about to have its effect."""

    key: CallKey
    run_id: RunId
    tool_name: str
    tool_version: int
    effect: EffectClass
    fingerprint: str
    unknowns_resolved: int
    token: str
    """Unique for this attempt."""
    is_askable: bool
    """True if the tool can be asked what became of an earlier execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The call may run now, in this process. `must_reconcile`: the tool is asked first."""

    must_reconcile: bool = False
    is_cancelled: bool = False
    """It was cancelled meanwhile: reconcile, but do not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldElsewhere:
    """Another process runs the call; ask again a little later.

    `question` is what its tool asks at the moment, after `position` others.
    """

    question: Question | None = None
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """An attempt to run a call, which may keep checkpoints as long as it is the newest one."""

    key: CallKey
    run_id: RunId
    attempt: int
    token: str
    """Unique for this attempt."""
