"""Stops runs on request, and ends runs."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CallKey, RunId, RunKey, UserId
from pawl.job_store.ledger.rules import calls, inbox, jobs, log, run_table, turn
from pawl.job_store.ledger.rules.events import RunChanged
from pawl.job_store.ledger.rules.rows import RunRow
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork
from pawl.values import CallState, RunState, StopCause


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    run_id: RunId
    state: RunState
    usage: bytes
    failure: bytes
    output: bytes
    job_ids: tuple[RunId, ...] = ()


read_ending: Final = msgspec.msgpack.Decoder(Ending).decode


def command(unit: UnitOfWork, run: RunRow, cause: StopCause, payload: bytes, *, user_id: UserId = UserId("")) -> None:
    """Call `request` for `run`, unless the run has ended or is CANCELLING.

    `payload` is the command for the run's owner.
    """
    if run.state.is_terminal or run.state is RunState.CANCELLING:
        return
    request(unit, _commanded(unit, run, payload, user_id), cause)


def jobs_below(unit: UnitOfWork, run: RunRow, payload: bytes) -> None:
    """Stop the open jobs that report to the delegated run `run`."""
    for job in jobs.opened_below(unit, run):
        if not job.is_stopping:
            _stopping(unit, _commanded(unit, job, payload), StopCause.PARENT)


def _commanded(unit: UnitOfWork, run: RunRow, payload: bytes, user_id: UserId = UserId("")) -> RunRow:
    incoming = inbox.arrived(unit, run, name=inbox.CANCEL, payload=payload, user_id=user_id)
    return inbox.accept(unit, run, incoming)


def request(unit: UnitOfWork, run: RunRow, cause: StopCause) -> RunRow:
    """Stop `run`, which must be open and not CANCELLING. Nothing new starts in it afterwards (I12).

    A run that no worker has claimed is CANCELLED immediately, unless messages have entered it. Only an owner can read
    these messages, and they must not be lost (I1). Any other run becomes CANCELLING, and its current or next owner
    settles its open calls. For this, a quarantined run becomes claimable again.
    """
    stopped, superseded = _stop(unit, run, cause)
    _supersede(unit, superseded)
    return stopped


def end(unit: UnitOfWork, run: RunRow, state: RunState, *, attempt: int = 0) -> RunRow:
    """Move `run` to a terminal state. Write its last event, close its inbox and activate the next queued run."""
    ended, superseded = _end(unit, run, state, attempt=attempt)
    _supersede(unit, superseded)
    return ended


def end_without_worker(unit: UnitOfWork, run: RunRow, result: bytes) -> RunRow:
    """End a `run` that is being stopped and has no worker. Its open calls get the opaque `result`."""
    settled = [(before, calls.lost(before, result, now=unit.now)) for before in unit.open_calls(run)]
    for _, call in settled:
        unit.put_call(call)
    return end(unit, log.write(unit, run, [calls.changed(*each) for each in settled]), RunState.CANCELLED)


def _supersede(unit: UnitOfWork, run: RunRow | None) -> None:
    """Stop `run`, which an interrupting message supersedes, and each superseded run that becomes active as a result."""
    while run is not None:
        _, run = _stop(unit, run, StopCause.SUPERSEDED)


def _stop(unit: UnitOfWork, run: RunRow, cause: StopCause) -> tuple[RunRow, RunRow | None]:
    if not jobs.has_started(run) and not _was_steered(unit, run):
        return _end(unit, replace(run, stop_cause=cause), RunState.CANCELLED)
    return _stopping(unit, run, cause), None


def _stopping(unit: UnitOfWork, run: RunRow, cause: StopCause) -> RunRow:
    run_table.check(run.state, RunState.CANCELLING)
    crashes = 0 if run.is_quarantined else run.crashes
    stopping = replace(run, state=RunState.CANCELLING, waits=(), stop_cause=cause, attention=None, crashes=crashes)
    stopping = log.write(unit, stopping, [RunChanged(from_state=run.state, run=stopping)])
    return turn.wake(unit, stopping)


def _was_steered(unit: UnitOfWork, run: RunRow) -> bool:
    has_turn = run.queued_message is None
    return has_turn and any(command.name == inbox.STEER for command in unit.inbox(run))


def _end(unit: UnitOfWork, run: RunRow, state: RunState, *, attempt: int = 0) -> tuple[RunRow, RunRow | None]:
    run_table.check(run.state, state)
    ended = replace(run, state=state, waits=(), attention=None, worker_id=None, claim_at=None, end_time=unit.now)
    ended = log.write(unit, ended, [RunChanged(from_state=run.state, run=ended)], attempt=attempt)
    for command in unit.inbox(ended):
        unit.put_command(replace(command, consumed=True))
    superseded = turn.leave(unit, ended)
    jobs.run_ended(unit, ended)
    if ended.reports_to:
        jobs.notify(unit, ended, 0)
    else:
        _report(unit, ended, jobs.agent_ended(unit, ended))
    return ended, superseded


def _report(unit: UnitOfWork, run: RunRow, job_ids: tuple[RunId, ...]) -> None:
    """Report to the parent that its child run has ended, and which of the child's jobs are still open.

    This happens in the same transaction. Only a cancellation can settle the call in the meantime. Has no effect if the
    call was cancelled or the parent no longer exists.
    """
    parent = unit.runs.get(RunKey(run.store_id, run.parent_run_id))
    call = unit.calls.get(CallKey(run.store_id, run.parent_call_id))
    if parent is None or call is None or call.state is not CallState.DELEGATED:
        return
    ending = Ending(
        run_id=run.run_id,
        state=run.state,
        usage=run.usage,
        failure=run.failure,
        output=run.output,
        job_ids=job_ids,
    )
    payload = msgspec.msgpack.encode(ending)
    incoming = inbox.arrived(unit, parent, name=inbox.AGENT_ENDED, payload=payload, call_id=call.call_id)
    unit.put_call(replace(call, reserved_by=incoming.command_id))
    parent = replace(parent, steered_by=tuple(sorted({*parent.steered_by, *run.steered_by})))
    turn.wake(unit, inbox.accept(unit, parent, incoming))
