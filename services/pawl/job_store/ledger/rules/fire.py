"""Fires a schedule. Creating the run and setting the next scheduled time are one operation."""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, RequestId, RunId, RunKey
from pawl.errors import FeatureOff, PawlError, PermissionDenied, RequestIdReused, ScheduleNotFound, StorageFull
from pawl.job_store.ledger.rules import inbox, log, stop
from pawl.job_store.ledger.rules.rows import RunRow
from pawl.job_store.ledger.rules.submit import Submit
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.job_store.schedules import rules as schedules
from pawl.job_store.schedules.rules import FireOutcome, FireRow, ScheduleKey, ScheduleRow, StarterRow
from pawl.values import Feature, Overlap, RunState, StopCause

REASON_CHARACTERS_MAX: Final = 300


class Fire(msgspec.Struct, frozen=True, kw_only=True):
    """Fire `generation` of `schedule`, which last started the run `last_run_id`.

    `expected_time` is the scheduled time. It is None for a manual firing, which can have a `request_id`. `next_time` is
    the scheduled time after it. A manual firing with a `backfill_time` makes up for the firing at that past time and
    ignores the overlap policy. `submit` creates the run. If it is None, the run is refused with `refusal` as the
    reason.
    """

    schedule: ScheduleKey
    generation: int
    last_run_id: RunId
    expected_time: datetime | None
    next_time: datetime | None
    submit: Submit | None
    refusal: str
    request_id: RequestId = RequestId("")
    backfill_time: datetime | None = None

    @property
    def row_keys(self) -> RowKeys:
        last = (RunKey(self.schedule.store_id, self.last_run_id),) if self.last_run_id else ()
        keys = self.submit.row_keys if self.submit is not None else RowKeys()
        # The last run may have to be stopped.
        return replace(keys, schedules=(self.schedule,), runs=last, ends=last, calls_of=last, commands_of=last)

    def apply(self, unit: UnitOfWork) -> FireRow | None:
        """Fire the schedule. Return None if it has changed since it was read, for example because it has fired.

        Raises:
            ScheduleNotFound: The schedule does not exist.
            RequestIdReused: The request id was used with a different payload.
        """
        row = unit.schedules.get(self.schedule)
        if row is None:
            raise ScheduleNotFound
        for fire in row.fires if self.request_id else ():
            if fire.request_id == self.request_id:
                return fire
        is_due = self.expected_time is None or self.expected_time in {row.due_time, row.waiting_time}
        if row.generation != self.generation or not is_due:
            return None
        last = unit.runs.get(RunKey(row.store_id, self.last_run_id)) if self.last_run_id else None
        row = schedules.with_ending(row, None if last is None else last.state)
        before = row
        start = self._start(unit, row, last)
        fire = FireRow(
            due_time=self.backfill_time or self.expected_time or unit.now,
            fire_time=unit.now,
            outcome=start.outcome,
            reason=start.reason[:REASON_CHARACTERS_MAX],
            run_id=start.run_id,
            conversation_id=start.conversation_id,
            triggered=self.expected_time is None,
            request_id=self.request_id,
        )
        row = schedules.with_fire(row, fire)
        row = replace(row, generation=row.generation + 1)
        if self.backfill_time is not None:
            row = replace(row, last_run_id=before.last_run_id, last_run_counted=before.last_run_counted)
        unit.schedules.put(row.key, self._advanced(row, unit.now))
        log.write_fire(unit, row, row.fires[0])
        return row.fires[0]

    def _advanced(self, row: ScheduleRow, now: datetime) -> ScheduleRow:
        if self._has_failed_too_often(row):
            return schedules.paused(row, f"{row.failures} runs in a row were refused or failed", now, automatic=True)
        due, waiting = row.due_time, row.waiting_time
        if self.expected_time is not None:
            due = self.next_time if self.expected_time == due else due
            waiting = None if self.expected_time == waiting else waiting
        if row.fires[0].outcome is FireOutcome.WAITING:
            waiting = row.fires[0].due_time
        return schedules.due_next(replace(row, waiting_time=waiting), due, now)

    def _has_failed_too_often(self, row: ScheduleRow) -> bool:
        return row.failures >= schedules.FAILURES_MAX and self.expected_time is not None

    def _start(self, unit: UnitOfWork, row: ScheduleRow, last: RunRow | None) -> Start:
        if self.backfill_time is not None:
            return started(unit, row, self.submit, self.refusal, Feature.SCHEDULES)
        if self._has_failed_too_often(row):
            return Start(FireOutcome.SKIPPED, "the previous runs of the schedule failed")
        is_busy = last is not None and not last.state.is_terminal
        # A firing that waited was on time when it started to wait.
        has_waited = row.waiting_time is not None and row.waiting_time == self.expected_time
        outcome, reason = schedules.judge(
            row.definition,
            None if has_waited else self.expected_time,
            unit.now,
            is_busy=is_busy,
            has_waiting=row.waiting_time is not None and not has_waited,
        )
        if outcome is FireOutcome.WAITING and row.definition.overlap is Overlap.CANCEL:
            outcome = outcome_of_cancel(unit, row, self.submit, last, Feature.SCHEDULES)
        if outcome is not FireOutcome.STARTED:
            return Start(outcome, reason)
        return started(unit, row, self.submit, self.refusal, Feature.SCHEDULES)


class Start(NamedTuple):
    """The outcome of a firing, and the run that it started (if any)."""

    outcome: FireOutcome
    reason: str = ""
    run_id: RunId = RunId("")
    conversation_id: ConversationId = ConversationId("")


def outcome_of_cancel(
    unit: UnitOfWork, row: StarterRow, submit: Submit | None, last: RunRow | None, feature: Feature
) -> FireOutcome:
    """Cancel the previous run to make way for a new one. Return WAITING until the previous run has ended.

    Return STARTED, without cancelling anything, if there is no previous run or the new one will be refused or skipped.
    """
    if submit is None or submit.is_refused(feature) or row.credential_ended or last is None:
        return FireOutcome.STARTED
    if last.state is not RunState.CANCELLING:
        last = inbox.accept(unit, last, inbox.arrived(unit, last, name=inbox.CANCEL, payload=submit.interrupt))
        last = stop.request(unit, last, StopCause.SUPERSEDED)
    return FireOutcome.STARTED if last.state.is_terminal else FireOutcome.WAITING


def started(unit: UnitOfWork, row: StarterRow, submit: Submit | None, refusal: str, feature: Feature) -> Start:
    """Create the run. Return SKIPPED if a feature that it needs is disabled or the store is full.

    Return REFUSED after other errors.

    Raises:
        RequestIdReused: The request id was used with a different payload. It does not count as a refusal.
    """
    if submit is None:
        return Start(FireOutcome.REFUSED, refusal)
    try:
        with unit.savepoint():
            if row.credential_ended:
                raise PermissionDenied("the API key that last saved or resumed it was revoked or has expired")
            submit.check_on(feature)
            run = submit.apply(unit).run
    except RequestIdReused:
        raise
    except (FeatureOff, StorageFull) as error:
        return Start(FireOutcome.SKIPPED, error.message)
    except PawlError as refused:
        return Start(FireOutcome.REFUSED, f"{refused.reason}: {refused.message}")
    return Start(FireOutcome.STARTED, "", run.run_id, run.conversation_id)
