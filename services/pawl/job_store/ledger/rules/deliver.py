"""Fires a trigger with an event. Recording the event and creating the run are one operation."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from pawl.chassis.ids import RunKey
from pawl.errors import TriggerNotFound
from pawl.job_store.ledger.rules import log
from pawl.job_store.ledger.rules.fire import REASON_CHARACTERS_MAX, Start, outcome_of_cancel, started
from pawl.job_store.ledger.rules.submit import Submit
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.job_store.schedules import rules as schedules
from pawl.job_store.schedules.rules import FireOutcome, FireRow
from pawl.job_store.triggers import rules as triggers
from pawl.job_store.triggers.rules import (
    DEBOUNCES_MAX,
    EventKey,
    EventRow,
    LaneKey,
    LaneRow,
    MailPosition,
    TriggerKey,
    TriggerRow,
)
from pawl.values import Feature, Overlap

_POLL: Final = timedelta(seconds=schedules.POLL_SECONDS)


class Delivered(NamedTuple):
    """The outcome of firing a trigger with an event.

    `fire` is None if the trigger has changed since it was checked. `duplicate` means that the event has been received
    before.
    """

    fire: FireRow | None = None
    duplicate: bool = False


class Deliver(msgspec.Struct, frozen=True, kw_only=True):
    """Fire `generation` of `trigger` with an event. `claimed` means that the event had been waiting.

    `submit` creates the run. If it is None, the run is refused with `refusal` as the reason. Events without a `lane`
    never wait. `mail` is the position of an e-mail, which must be newer than the e-mails already delivered. `skipped`
    is the reason to skip the event, if any.
    """

    trigger: TriggerKey
    generation: int
    event_id: str
    lane: str | None
    data: bytes
    conversation_key: str
    submit: Submit | None
    refusal: str
    claimed: bool = False
    mail: MailPosition | None = None
    skipped: str = ""

    @property
    def row_keys(self) -> RowKeys:
        keys = self.submit.row_keys if self.submit is not None else RowKeys()
        lanes = () if self.lane is None else (self._lane_key,)
        return replace(keys, triggers=(self.trigger,), lanes=lanes, trigger_events=(self._key,))

    @property
    def _key(self) -> EventKey:
        return EventKey(self.trigger.store_id, self.trigger.trigger_id, self.event_id)

    @property
    def _lane_key(self) -> LaneKey:
        return LaneKey(self.trigger.store_id, self.trigger.trigger_id, self.lane or "")

    def apply(self, unit: UnitOfWork) -> Delivered:
        """Fire the trigger, unless this event has already fired it.

        Raises:
            TriggerNotFound: The trigger does not exist.
        """
        row = unit.triggers.get(self.trigger)
        if row is None:
            raise TriggerNotFound
        earlier = unit.trigger_events.get(self._key)
        waits = earlier is not None and earlier.outcome is FireOutcome.WAITING
        if earlier is not None and earlier.outcome is not FireOutcome.REFUSED and not (waits and self.claimed):
            return Delivered(earlier.fire, duplicate=True)
        if row.generation != self.generation or row.pause_time is not None or waits is not self.claimed:
            return Delivered()
        if self.mail is not None:
            if self.mail.uid_validity != row.uid_validity or self.mail.uid <= row.last_uid:
                return Delivered(duplicate=True)
            row = replace(row, last_uid=self.mail.uid)
        last = unit.runs.get(RunKey(row.store_id, row.last_run_id)) if row.last_run_id else None
        row = schedules.with_ending(row, None if last is None else last.state)
        event: EventRow | None = None
        if not self._has_failed_too_often(row):
            new = LaneRow(**asdict(self._lane_key), update_time=unit.now)
            lane = None if self.lane is None else unit.lanes.get(new.key) or new
            received = earlier.receive_time if earlier is not None and self.claimed else unit.now
            row, start = self._judged(unit, row, lane)
            event = self._event(start, received, unit.now)
            unit.trigger_events.put(event.key, event)
            row = schedules.with_fire(row, event.fire)
            log.write_fire(unit, row, event.fire)
        gives_up = self._has_failed_too_often(row)
        if gives_up:
            note = f"{row.failures} runs in a row were refused or failed"
            row = triggers.paused(row, note, unit.now, automatic=True)
            if event is None and self.mail is not None:
                # The message is read again once the trigger resumes.
                row = replace(row, last_uid=self.mail.uid - 1)
        unit.triggers.put(row.key, row)
        fired = row.fires[0] if row.fires and row.fires[0].event_id == self.event_id else None
        return Delivered(fired)

    def _has_failed_too_often(self, row: TriggerRow) -> bool:
        return row.failures >= schedules.FAILURES_MAX

    def _judged(self, unit: UnitOfWork, row: TriggerRow, lane: LaneRow | None) -> tuple[TriggerRow, Start]:
        if self.skipped:
            return row, Start(FireOutcome.SKIPPED, self.skipped)
        if lane is None:
            return row, started(unit, row, self.submit, self.refusal, Feature.TRIGGERS)
        if row.definition.debounce_seconds and not self.claimed:
            row = self._postponed(unit, row, lane)
            return row, Start(FireOutcome.WAITING, "another event may follow")
        before = unit.runs.get(RunKey(row.store_id, lane.last_run_id)) if lane.last_run_id else None
        overlap = row.definition.overlap
        has_waiting = bool(lane.event_id) and not self.claimed
        if has_waiting and overlap is Overlap.CANCEL:
            row, has_waiting = self._replaced(unit, row, lane), False
        is_open = before is not None and not before.state.is_terminal
        is_busy = is_open or (has_waiting and overlap is Overlap.QUEUE)
        outcome, reason = schedules.judge_overlap(overlap, is_busy=is_busy, has_waiting=has_waiting)
        if outcome is FireOutcome.WAITING and overlap is Overlap.CANCEL:
            outcome = outcome_of_cancel(unit, row, self.submit, before, Feature.TRIGGERS)
        start = Start(outcome, reason)
        if outcome is FireOutcome.STARTED:
            start = started(unit, row, self.submit, self.refusal, Feature.TRIGGERS)
        if outcome is FireOutcome.WAITING:
            lane = self._waiting(lane, lane.first_time or unit.now, unit.now + _POLL, awaits_run=True)
        elif self.claimed or overlap is Overlap.CANCEL:
            lane = replace(lane, event_id="", data=b"", conversation_key="", first_time=None, claim_at=None)
        unit.lanes.put(lane.key, replace(lane, last_run_id=start.run_id or lane.last_run_id, update_time=unit.now))
        return row, start

    def _postponed(self, unit: UnitOfWork, row: TriggerRow, lane: LaneRow) -> TriggerRow:
        row = self._replaced(unit, row, lane)
        debounce = timedelta(seconds=row.definition.debounce_seconds)
        first = lane.first_time or unit.now
        lane = self._waiting(lane, first, min(unit.now + debounce, first + DEBOUNCES_MAX * debounce))
        unit.lanes.put(lane.key, replace(lane, update_time=unit.now))
        return row

    def _replaced(self, unit: UnitOfWork, row: TriggerRow, lane: LaneRow) -> TriggerRow:
        replaced = unit.trigger_events.get(lane.waiting) if lane.event_id else None
        if replaced is None:
            return row
        replaced = replace(replaced, outcome=FireOutcome.SKIPPED, reason="another event followed", fire_time=unit.now)
        unit.trigger_events.put(replaced.key, replaced)
        row = schedules.with_fire(row, replaced.fire)
        log.write_fire(unit, row, replaced.fire)
        return row

    def _waiting(self, lane: LaneRow, first_time: datetime, claim_at: datetime, *, awaits_run: bool = False) -> LaneRow:
        return replace(
            lane,
            event_id=self.event_id,
            data=self.data,
            conversation_key=self.conversation_key,
            awaits_run=awaits_run,
            first_time=first_time,
            claim_at=claim_at,
        )

    def _event(self, start: Start, received: datetime, now: datetime) -> EventRow:
        return EventRow(
            store_id=self.trigger.store_id,
            trigger_id=self.trigger.trigger_id,
            event_id=self.event_id,
            receive_time=received,
            fire_time=now,
            outcome=start.outcome,
            reason=start.reason[:REASON_CHARACTERS_MAX],
            run_id=start.run_id,
            conversation_id=start.conversation_id,
        )
