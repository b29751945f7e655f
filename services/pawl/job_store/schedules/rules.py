"""Schedules, and the rules for firing them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from enum import IntEnum
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from pawl.chassis.ids import ConversationId, RequestId, RunId, StoreId
from pawl.errors import InvalidField, ScheduleExists, ScheduleNotFound, TooLarge
from pawl.job_store.ledger.rules.approval import Actor
from pawl.job_store.schedules import timing
from pawl.job_store.schedules.timing import Timing
from pawl.values import Overlap, RunState

# Maximum number of schedules per user.
SCHEDULES_MAX: Final = 100
# Number of firings kept per schedule.
FIRES_MAX: Final = 20
NEXT_TIMES: Final = 10
# A schedule or trigger pauses automatically after this many failures (see `StarterRow`).
FAILURES_MAX: Final = 10
NOTE_BYTES_MAX: Final = 1000
CLAIM_SECONDS: Final = 10.0
# How often a firing waiting for the previous run is checked.
POLL_SECONDS: Final = 1.0

# Tab, line feed and carriage return are allowed.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_FAILED: Final = frozenset({RunState.FAILED, RunState.EXPIRED})


class ScheduleKey(msgspec.Struct, frozen=True, order=True, gc=False):
    store_id: StoreId
    schedule_id: str


class FireOutcome(IntEnum):
    STARTED = 1
    WAITING = 2
    SKIPPED = 3
    MISSED = 4
    REFUSED = 5


class Definition(Timing, frozen=True, kw_only=True):
    name: str
    text: str
    agent: str = ""
    labels: Mapping[str, str] = {}
    conversation_key: str = ""
    overlap: Overlap = Overlap.SKIP
    workflow: str = ""
    input_json: bytes = b""


class Owner(Actor, frozen=True, kw_only=True):
    store_id: StoreId
    user_roles: tuple[str, ...] = ()


class FireRow(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a firing at a scheduled time, for an event, or for a user's request (`request_id`)."""

    due_time: datetime
    fire_time: datetime
    outcome: FireOutcome
    reason: str = ""
    run_id: RunId = RunId("")
    conversation_id: ConversationId = ConversationId("")
    triggered: bool = False
    request_id: RequestId = RequestId("")
    event_id: str = ""


class StarterRow(Owner, frozen=True, kw_only=True):
    """A schedule or a trigger.

    `failures` counts refused firings (except manual firings) and runs that failed or expired, since a run last
    completed or the row was last resumed. `last_run_counted` means that the run `last_run_id` has ended and its end was
    counted. `fires` are newest first. `credential_ended` means that the API key for its runs was revoked, has expired
    or was removed. It is set only on rows that are loaded for firing.
    """

    name: str
    generation: int = 1
    create_time: datetime
    pause_time: datetime | None = None
    pause_note: str = ""
    self_paused: bool = False
    failures: int = 0
    last_run_id: RunId = RunId("")
    last_run_counted: bool = True
    fires: tuple[FireRow, ...] = ()
    credential_ended: bool = False


StarterT = TypeVar("StarterT", bound=StarterRow)


class ScheduleRow(StarterRow, frozen=True, kw_only=True):
    """A schedule.

    Each change and each firing increments `generation`.

    `waiting_time` is the scheduled time of the firing that is waiting for the previous run to end.
    """

    schedule_id: str
    definition: Definition
    due_time: datetime | None = None
    claim_at: datetime | None = None
    waiting_time: datetime | None = None

    @property
    def key(self) -> ScheduleKey:
        return ScheduleKey(self.store_id, self.schedule_id)

    def next_times(self, now: datetime) -> tuple[datetime, ...]:
        after = now if self.pause_time is not None or self.due_time is None else self.due_time - timedelta.resolution
        return tuple(islice(timing.due_times(self.definition, self.schedule_id, after), NEXT_TIMES))


# Returns the changed schedule from the current one (if any), the number of schedules that its user has, and the time.
Change: TypeAlias = Callable[[ScheduleRow | None, int, datetime], ScheduleRow]


class ClaimedSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A due schedule that was claimed at `now`. `is_busy` means that its last run is still open."""

    row: ScheduleRow
    now: datetime
    is_busy: bool


def saved(row: ScheduleRow, requested: Definition, owner: Owner, now: datetime) -> ScheduleRow:
    """Return a schedule with a new definition or owner. If both are unchanged, return the same schedule.

    A firing that is waiting for the previous run is skipped.

    A scheduled time that has not fired yet stays due, unless the timing changes.
    """
    if requested == row.definition and owner == owner_of(row):
        return row
    changed = replace(row, **asdict(owner), definition=requested, generation=row.generation + 1)
    if timing.same_times(requested, row.definition):
        return due_next(_without_waiting(changed, now), row.due_time, now)
    return _due_anew(changed, now)


def paused(row: ScheduleRow, note: str, now: datetime, *, automatic: bool = False) -> ScheduleRow:
    return replace(
        marked_paused(_without_waiting(row, now), note, now, automatic=automatic), due_time=None, claim_at=None
    )


def marked_paused(row: StarterT, note: str, now: datetime, *, automatic: bool = False) -> StarterT:
    """Return a paused schedule or trigger. One that was already paused keeps its pause time but gets the new note."""
    return replace(
        row,
        generation=row.generation + 1,
        pause_time=row.pause_time or now,
        pause_note=note,
        self_paused=automatic,
    )


def resumed(row: ScheduleRow, owner: Owner, now: datetime) -> ScheduleRow:
    """Return a resumed schedule, which fires again from now on. If it was not paused, only its owner changes."""
    return saved(row, row.definition, owner, now) if row.pause_time is None else _due_anew(unpaused(row, owner), now)


def unpaused(row: StarterT, owner: Owner) -> StarterT:
    row = replace(row, **asdict(owner), generation=row.generation + 1, pause_time=None, pause_note="")
    return replace(row, self_paused=False, failures=0, last_run_counted=True)


def owner_of(row: StarterRow) -> Owner:
    return Owner(**{name: getattr(row, name) for name in Owner.__struct_fields__})


def put(
    row: ScheduleRow | None,
    requested: Definition,
    owner: Owner,
    now: datetime,
    *,
    new_id: str,
    count: int,
    must_exist: bool,
) -> ScheduleRow:
    """Return the schedule that results from saving `requested`. If `row` is None, create it with the id `new_id`.

    `count` is the number of schedules that the user has.

    Raises:
        ScheduleNotFound: The request updates a schedule that does not exist.
        ScheduleExists: The request creates a schedule, but a different one with this name exists.
        TooLarge: The user has too many schedules.
    """
    if row is not None:
        if not must_exist and requested != row.definition:
            raise ScheduleExists
        return saved(row, requested, owner, now) if must_exist else row
    if must_exist:
        raise ScheduleNotFound
    if count >= SCHEDULES_MAX:
        raise TooLarge(f"you already have {SCHEDULES_MAX} schedules, which is the maximum: delete one first")
    fields: dict[str, Any] = asdict(owner)
    made = ScheduleRow(**fields, schedule_id=new_id, name=requested.name, definition=requested, create_time=now)
    return _due_anew(made, now)


def check_note(note: str) -> str:
    """Return the note for a pause if it is valid.

    Raises:
        TooLarge: The note is longer than 1000 bytes.
        InvalidField: The note has control characters other than tabs and line breaks.
    """
    if len(note.encode()) > NOTE_BYTES_MAX:
        raise TooLarge(f"note must be at most {NOTE_BYTES_MAX} bytes", field="note")
    if _CONTROL.search(note):
        raise InvalidField("note must not contain control characters", field="note")
    return note


def judge(
    definition: Definition, due: datetime | None, now: datetime, *, is_busy: bool, has_waiting: bool
) -> tuple[FireOutcome, str]:
    """Return the outcome of a firing, and the reason for it. The run may still be refused.

    `due` is None for a manual firing, which is never late.

    `is_busy` means that the previous run is open. `has_waiting` means that another firing is waiting for it to end.
    """
    if due is not None and timing.is_missed(definition, due, now):
        return (
            FireOutcome.MISSED,
            f"missed by {int((now - due).total_seconds())} s; later scheduled times may have been missed too",
        )
    return judge_overlap(definition.overlap, is_busy=is_busy, has_waiting=has_waiting)


def judge_overlap(overlap: Overlap, *, is_busy: bool, has_waiting: bool) -> tuple[FireOutcome, str]:
    if not is_busy or overlap is Overlap.ALLOW:
        return FireOutcome.STARTED, ""
    if overlap is Overlap.SKIP:
        return FireOutcome.SKIPPED, "the previous run is still open"
    if has_waiting:
        return FireOutcome.SKIPPED, "the previous run is still open, and another run is already waiting for it to end"
    return (
        FireOutcome.WAITING,
        f"the previous run is {'being cancelled' if overlap is Overlap.CANCEL else 'still open'}",
    )


def with_fire(row: StarterT, fire: FireRow) -> StarterT:
    """Return a schedule or trigger with `fire` added. If the firing was waiting, `fire` replaces its earlier entry.

    The newest `FIRES_MAX` entries remain, and so does a waiting entry, even if it is older.
    """
    rest: list[FireRow] = []
    for old in row.fires:
        is_it = (old.outcome, old.due_time, old.event_id) == (FireOutcome.WAITING, fire.due_time, fire.event_id)
        if is_it and not fire.triggered:
            fire = replace(fire, triggered=old.triggered, request_id=old.request_id)
        else:
            rest.append(old)
    failures = row.failures + (fire.outcome is FireOutcome.REFUSED and not fire.triggered)
    waiting = [old for old in rest[FIRES_MAX - 1 :] if old.outcome is FireOutcome.WAITING][:1]
    fires = (fire, *rest[: FIRES_MAX - 1 - len(waiting)], *waiting)
    row = replace(row, fires=fires, failures=failures)
    if fire.outcome is FireOutcome.STARTED:
        return replace(row, last_run_id=fire.run_id, last_run_counted=False)
    return row


def with_ending(row: StarterT, state: RunState | None) -> StarterT:
    """Return a schedule or trigger after its last run has ended in `state` or, if `state` is None, has been removed."""
    if row.last_run_counted or (state is not None and not state.is_terminal):
        return row
    failures = row.failures
    if state in _FAILED:
        failures += 1
    elif state is RunState.COMPLETED:
        failures = 0
    return replace(row, failures=failures, last_run_counted=True)


def due_next(row: ScheduleRow, due: datetime | None, now: datetime) -> ScheduleRow:
    """Return a schedule with its next scheduled time. A waiting firing will be checked again within a second."""
    next_poll = now + timedelta(seconds=POLL_SECONDS) if row.waiting_time is not None else None
    times = [time for time in (due, next_poll) if time is not None]
    return replace(row, due_time=due, claim_at=min(times, default=None))


def _due_anew(row: ScheduleRow, now: datetime) -> ScheduleRow:
    row = _without_waiting(row, now)
    if row.pause_time is not None:
        return row
    return due_next(row, next(timing.due_times(row.definition, row.schedule_id, now), None), now)


def _without_waiting(row: ScheduleRow, now: datetime) -> ScheduleRow:
    fires = tuple(
        replace(fire, outcome=FireOutcome.SKIPPED, reason="the schedule was changed", fire_time=now)
        if fire.outcome is FireOutcome.WAITING
        else fire
        for fire in row.fires
    )
    return replace(row, fires=fires, waiting_time=None)
