"""Runs whose workers crash, and operators' actions on them.

A crash means that a lease expired without being released, or that a worker reported that it can neither run nor end the
run. Progress (see `commit`) resets the count. Too many crashes without progress quarantine the run, so that a bad run
does not kill workers forever (I20).
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

# Pause of a run after a crash, because the problem may be temporary.
CRASH_PAUSE: Final = timedelta(seconds=2)

# How long a worker can still return after its lease has expired, in case it was only disconnected.
GRACE: Final = timedelta(seconds=5)

_PAUSE_SECONDS_MAX: Final = 2.5


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Doomed runs, each with the start of the latest unbroken series of polls that found it doomed.

    A run is doomed if its lease has expired and one more crash would quarantine it.

    If the database's clock jumps or the database fails, healthy workers also lose their leases, but renew them within
    seconds. An expired lease therefore counts only after GRACE, and a long pause between polls resets the times. Times
    are monotonic.
    """

    since: Mapping[RunKey, float] = {}
    polled_at: float = -math.inf

    def after(self, doomed: Iterable[RunKey], now: float) -> Silence:
        since = self.since if now - self.polled_at <= _PAUSE_SECONDS_MAX else {}
        return Silence(since={key: since.get(key, now) for key in doomed}, polled_at=now)

    @property
    def confirmed(self) -> tuple[RunKey, ...]:
        """Runs that have been doomed for at least GRACE."""
        return tuple(key for key, since in self.since.items() if self.polled_at - since >= GRACE.total_seconds())


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """Quarantine each of `runs` whose lease expired at least GRACE ago and whose next crash would reach `crashes_max`.

    The condition is checked again under the lock, because the run may have been claimed by another worker or have made
    progress. A turn that is being stopped is not quarantined but ends, with `lost` as the opaque result of its open
    calls.
    """

    runs: Sequence[RunKey]
    crashes_max: int
    lost: bytes = b""

    @property
    def row_keys(self) -> RowKeys:
        return _rows(self.runs)

    def apply(self, unit: UnitOfWork) -> int:
        count = 0
        for key in self.runs:
            run = unit.runs.get(key)
            if run is None or run.worker_id is None or run.claim_at is None or run.claim_at > unit.now - GRACE:
                continue
            if run.crashes + 1 >= self.crashes_max:
                count += _crash(unit, run, self.crashes_max, self.lost).is_quarantined
        return count


class ReportCrash(msgspec.Struct, frozen=True, kw_only=True):
    """Release a run that the worker with `epoch` can neither run nor end. For `lost`, see `Quarantine`."""

    run: RunKey
    epoch: int
    crashes_max: int
    lost: bytes = b""

    @property
    def row_keys(self) -> RowKeys:
        return _rows([self.run])

    def apply(self, unit: UnitOfWork) -> bool:
        """Count the crash. Return whether the run is now quarantined.

        Raises:
            RunNotFound, RunEnded: The run does not exist or has ended.
            LeaseLost: Another worker holds the run, or the reporting worker has already released it.
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
    """Resume a quarantined run where it stopped, and reset its crash count.

    A run that was being stopped becomes CANCELLING again. Any other run becomes QUEUED, and its next worker determines
    where it stopped.
    """
    state = RunState.QUEUED if run.stop_cause is None else RunState.CANCELLING
    run_table.check(run.state, state)
    free = replace(run, state=state, attention=None, crashes=0, claim_at=unit.now)
    unit.work_ready = True
    return log.write(unit, free, [RunChanged(from_state=run.state, run=free)])


def _rows(runs: Sequence[RunKey]) -> RowKeys:
    return RowKeys(runs=tuple(runs), ends=tuple(runs), calls_of=tuple(runs), commands_of=tuple(runs))


def _crash(unit: UnitOfWork, run: RunRow, crashes_max: int, lost: bytes) -> RunRow:
    free = replace(run, crashes=run.crashes + 1, worker_id=None, claim_at=unit.now + CRASH_PAUSE)
    if free.crashes < crashes_max:
        return unit.put_run(free)
    if run.is_turn and run.is_stopping:
        # No user requested the turn, so an operator has nothing to recover.
        return stop.end_without_worker(unit, free, lost)
    # The epoch is increased because the worker may only have been disconnected: it must no longer write.
    attention = Attention(reason=AttentionReason.QUARANTINED, since_time=unit.now)
    state = RunState.NEEDS_ATTENTION
    held = replace(free, state=state, waits=(), attention=attention, epoch=run.epoch + 1, claim_at=None)
    if run.state is not state:
        run_table.check(run.state, state)
    held = log.write(unit, held, [RunChanged(from_state=run.state, run=held)])
    if held.is_turn and unit.conversation_of(held).queue:
        # No user requested the turn, and the runs waiting for it must not wait for an operator.
        return stop.request(unit, held, StopCause.SUPERSEDED)
    return held
