"""Runs whose workers die, and what operators do about runs.

A crash is a lease that ended without having been given back, or a worker that
says that it can neither drive the run nor end it. Progress (see `commit`) sets the
count back; too many crashes without any quarantine the run, so that what kills
its workers does not kill them for ever (I20).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import RunKey
from pawl.errors import LeaseLost, RunEnded, RunNotFound
from pawl.job_store.ledger.rules import log, run_table, stop
from pawl.job_store.ledger.rules.events import RunChanged
from pawl.job_store.ledger.rules.rows import Attention, RunRow
from pawl.job_store.ledger.rules.states import AttentionReason
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.values import RunState, StopCause

CRASH_PAUSE: Final = timedelta(seconds=2)
"""So long a run rests whose worker said that it cannot drive it: what is wrong may pass."""

GRACE: Final = timedelta(seconds=5)
"""So long after its lease the last allowed worker of a run may still come back: it was perhaps only cut off."""

_PAUSE_SECONDS_MAX: Final = 2.5


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Since when runs have been found doomed at every look, by a clock that does not jump.

    A jump of the database's clock, or a database that was away, ends the leases of workers that are well. They renew
    them within seconds; so the end of a lease is believed after GRACE, and looking begins anew after a long pause.
    """

    since: Mapping[RunKey, float] = {}
    looked_at: float = -math.inf

    def after(self, doomed: Iterable[RunKey], now: float) -> Silence:
        """Return what is known after one more look."""
        since = self.since if now - self.looked_at <= _PAUSE_SECONDS_MAX else {}
        return Silence(since={key: since.get(key, now) for key in doomed}, looked_at=now)

    @property
    def believed(self) -> tuple[RunKey, ...]:
        """The runs whose last allowed worker has died."""
        return tuple(key for key, since in self.since.items() if self.looked_at - since >= GRACE.total_seconds())


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """Put those of `runs` under quarantine whose last allowed worker has died.

    Whether it has is judged again here, under the lock: another worker of the same
    run, or progress, may have come between.
    """

    runs: Sequence[RunKey]
    crashes_max: int
    lost: bytes = b""
    """The result of calls, opaque, that are open in a turn which ends so."""

    @property
    def row_keys(self) -> RowKeys:
        """The rows it needs."""
        return _rows(self.runs)

    def apply(self, unit: UnitOfWork) -> int:
        """Return how many were put there."""
        count = 0
        for key in self.runs:
            run = unit.runs.get(key)
            if run is None or run.worker_id is None or run.claim_at is None or run.claim_at > unit.now - GRACE:
                continue
            if run.crashes + 1 >= self.crashes_max:
                count += _crash(unit, run, self.crashes_max, self.lost).is_quarantined
        return count


class ReportCrash(msgspec.Struct, frozen=True, kw_only=True):
    """The worker with `epoch` can neither drive the run nor end it, and gives it back."""

    run: RunKey
    epoch: int
    crashes_max: int
    lost: bytes = b""
    """As in `Quarantine`."""

    @property
    def row_keys(self) -> RowKeys:
        """The rows it needs."""
        return _rows([self.run])

    def apply(self, unit: UnitOfWork) -> bool:
        """Count the crash; return whether the run is quarantined now.

        Raises:
            RunNotFound, RunEnded: there is nothing to give back.
            LeaseLost: another worker has it, or this one gave it back before.
        """
        run = unit.runs.get(self.run)
        if run is None:
            raise RunNotFound
        if run.state.is_terminal:
            raise RunEnded
        if run.epoch != self.epoch or run.worker_id is None:
            raise LeaseLost
        return _crash(unit, run, self.crashes_max, self.lost).is_quarantined


def redrive(unit: UnitOfWork, run: RunRow) -> RunRow:
    """Let a quarantined run go on from where it was, as if no worker of it had died; returns it.

    A run that was being stopped is being stopped again. Any other one is QUEUED, and
    its next worker finds out where it was.
    """
    state = RunState.QUEUED if run.stop_cause is None else RunState.CANCELLING
    run_table.check(run.state, state)
    free = replace(run, state=state, attention=None, crashes=0, claim_at=unit.now)
    unit.work_ready = True
    return log.write(unit, free, [RunChanged(from_state=run.state, run=free)])


def _rows(runs: Sequence[RunKey]) -> RowKeys:
    """Return the rows of runs that are put under quarantine: a turn that stands in the way of a message may end."""
    return RowKeys(runs=tuple(runs), ends=tuple(runs), calls_of=tuple(runs), commands_of=tuple(runs))


def _crash(unit: UnitOfWork, run: RunRow, crashes_max: int, lost: bytes) -> RunRow:
    """Take a run from its worker, of which nothing is to be expected any more."""
    free = replace(run, crashes=run.crashes + 1, worker_id=None, claim_at=unit.now + CRASH_PAUSE)
    if free.crashes < crashes_max:
        return unit.put_run(free)
    if run.is_turn and run.is_stopping:
        # Nobody has asked for it, so there is nothing that an operator could save.
        return stop.give_up(unit, free, lost)
    # The epoch rises, because the worker may only have been away for long: it must not write any more.
    attention = Attention(reason=AttentionReason.QUARANTINED, since_time=unit.now)
    state = RunState.NEEDS_ATTENTION
    held = replace(free, state=state, waits=(), attention=attention, epoch=run.epoch + 1, claim_at=None)
    if run.state is not state:
        run_table.check(run.state, state)
    held = log.write(unit, held, [RunChanged(from_state=run.state, run=held)])
    if held.is_turn and unit.conversation_of(held).queue:
        # Nobody has asked for it, and who waits for it to end does not wait for an operator.
        return stop.request(unit, held, StopCause.SUPERSEDED)
    return held
