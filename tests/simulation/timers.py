"""Users with schedules in some seeds, and the checkers of their firings.

Schedules use intervals or cron expressions, some with jitter, a start or an end. They are paused once the simulation
calms down.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import schedule_pb2 as pb
from pawl.chassis.ids import RequestId, StoreId
from pawl.event.v1 import schedule_pb2
from pawl.job_store.schedules.rules import Definition, FireOutcome, FireRow, ScheduleKey, ScheduleRow
from pawl.values import Overlap
from tests.simulation.record import Record, broken
from tests.simulation.store import ScheduleChange
from tests.simulation.world import Member, World

_CATCH_UP_SECONDS = 86_400
_MOST = 100
_SETTLING_SECONDS = 40.0
# A claim of a dead process ends after ten seconds; the rest is for catching up.
_SLACK = timedelta(seconds=25)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Cron expressions and their intervals, which are the same in every time zone with an even offset in minutes.
_CRONS = {"* * * * *": timedelta(minutes=1), "*/2 * * * *": timedelta(minutes=2)}


class Timer(Member):
    def __init__(self, world: World, store_id: StoreId) -> None:
        super().__init__(world, store_id, "timer")
        self._timings = world.chance.stream("timings")
        self._definitions: dict[str, schedule_pb2.ScheduleDefinition] = {}
        self._count = 0

    async def live(self) -> None:
        for number in range(self._draw.randrange(1, 4)):
            await self._save(f"s{number}", must_exist=False)
        while not self._world.chance.calm:
            await asyncio.sleep(3.0 * self._draw.random())
            name = self._draw.choice(list(self._definitions))
            await self._draw.choice([self._update, self._trigger, self._pause, self._resume, self._resume])(name)
        for name in self._definitions:
            await self._resume(name)
        await asyncio.sleep(_SETTLING_SECONDS)
        for name in self._definitions:
            await self._pause(name)

    def _times(self) -> dict[str, Any]:
        """Return the times of a schedule. Half of the schedules have plain intervals."""
        times: dict[str, Any] = {"interval_seconds": self._draw.choice([4, 7, 30])}
        draw, now = self._timings, asyncio.get_running_loop().time()
        if draw.random() < 0.5:
            return times
        if draw.random() < 0.4:
            times = {"cron": draw.choice(list(_CRONS)), "time_zone": draw.choice(["", "Europe/Berlin", "Asia/Kolkata"])}
        else:
            times["offset_seconds"] = draw.choice([0, 1, 3])
        times["jitter_seconds"] = draw.choice([0, 2, 3])
        if draw.random() < 0.4:
            times["start_time"] = _timestamp(now + 10.0 * draw.random())
        if draw.random() < 0.4:
            times["end_time"] = _timestamp(now + 15.0 + 20.0 * draw.random())
        return times

    async def _save(self, name: str, *, must_exist: bool, same_times: bool = False) -> None:
        self._count += 1
        before = self._definitions.get(name)
        drawn = self._times() if before is None or not same_times else {}
        definition = schedule_pb2.ScheduleDefinition(
            name=name,
            text=f"plan-tick{self._count} please",
            overlap=schedule_pb2.ScheduleOverlap.ValueType(self._draw.randrange(1, 5)),
            conversation_key=self._draw.choice(["", name]),
            labels={"schedule": name},
            catch_up_seconds=_CATCH_UP_SECONDS,
            **drawn,
        )
        if before is not None and same_times:
            for field in ("cron", "time_zone", "interval_seconds", "offset_seconds", "jitter_seconds"):
                setattr(definition, field, getattr(before, field))
            if before.HasField("start_time"):
                definition.start_time.CopyFrom(before.start_time)
            if before.HasField("end_time"):
                definition.end_time.CopyFrom(before.end_time)
        self._definitions[name] = definition
        request = pb.UpdateScheduleRequest if must_exist else pb.CreateScheduleRequest
        await self._forward("save", request(definition=definition))

    async def _update(self, name: str) -> None:
        await self._save(name, must_exist=True, same_times=self._draw.random() < 0.7)

    async def _pause(self, name: str) -> None:
        await self._forward("pause", pb.PauseScheduleRequest(name=name, note="why not"))

    async def _resume(self, name: str) -> None:
        await self._forward("resume", pb.ResumeScheduleRequest(name=name))

    async def _trigger(self, name: str) -> None:
        self._count += 1
        request_id = RequestId(f"req_timer_{self._count}")
        await self._ask("trigger", lambda agent: agent.schedules.trigger(self._caller, name, request_id))

    async def _forward(self, what: str, request: Message) -> None:
        method = f"/pawl.agent.v1.ScheduleService/{type(request).__name__.removesuffix('Request')}"
        raw = request.SerializeToString()
        await self._ask(what, lambda agent: agent.forward_of_schedules(self._caller, method, raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fired:
    """A firing, the schedule before it, and how often the due times had been reset before it."""

    before: ScheduleRow
    fire: FireRow
    is_busy: bool
    era: int


def _fired(record: Record) -> dict[ScheduleKey, list[_Fired]]:
    found: dict[ScheduleKey, list[_Fired]] = defaultdict(list)
    eras: Counter[ScheduleKey] = Counter()
    for change in record.tables.schedule_changes:
        key = change.after.key
        eras[key] += _is_due_anew(change)
        if change.is_fire and change.before is not None:
            fire = change.after.fires[0]
            found[key].append(_Fired(before=change.before, fire=fire, is_busy=change.is_busy, era=eras[key]))
    return found


def _is_due_anew(change: ScheduleChange) -> bool:
    """Return whether a change resets the due time: creation, other times, or a resume."""
    before, after = change.before, change.after
    if change.is_fire or after.pause_time is not None:
        return False
    if before is None or before.pause_time is not None:
        return True
    names = ("cron", "time_zone", "interval_seconds", "offset_seconds", "jitter_seconds", "start_time", "end_time")
    return any(getattr(before.definition, name) != getattr(after.definition, name) for name in names)


def each_due_time_fires_once(record: Record) -> Iterator[str]:
    """Each due time fires once, perhaps after waiting, and each request starts at most one run.

    After a reset, a due time may repeat if the database clock was set back.
    """
    for key, fired in _fired(record).items():
        times = Counter((one.fire.outcome is FireOutcome.WAITING, one.era, one.fire.due_time) for one in fired)
        requests: dict[str, set[str]] = defaultdict(set)
        for one in (one for one in fired if one.fire.request_id and one.fire.run_id):
            requests[one.fire.request_id].add(one.fire.run_id)
        yield from broken(
            *(
                (count > 1, f"due time {time} of schedule {key.schedule_id} fired {count} times")
                for (_, _, time), count in times.items()
            ),
            *(
                (len(run_ids) > 1, f"trigger {request_id} of schedule {key.schedule_id} made {sorted(run_ids)}")
                for request_id, run_ids in requests.items()
            ),
        )


def each_fire_has_its_run(record: Record) -> Iterator[str]:
    """The runs with a schedule label are exactly the runs that firings name."""
    named = {one.fire.run_id for fired in _fired(record).values() for one in fired if one.fire.run_id}
    made = {row.run_id for row in record.tables.runs.values() if "schedule" in row.labels}
    if named != made:
        yield f"runs without a fire: {sorted(made - named)}; fires without their run: {sorted(named - made)}"


def fires_do_not_overlap(record: Record) -> Iterator[str]:
    """With SKIP and QUEUE, no run starts while the previous run of the schedule is open."""
    return (
        f"schedule {key.schedule_id} started {one.fire.run_id} alongside {one.before.last_run_id}"
        for key, fired in _fired(record).items()
        for one in fired
        if one.before.definition.overlap in {Overlap.SKIP, Overlap.QUEUE}
        and (one.is_busy, one.fire.outcome) == (True, FireOutcome.STARTED)
    )


def no_due_time_is_lost(record: Record) -> Iterator[str]:
    """Due times fire without gaps, except during a pause. After a long delay, only the last hundred fire."""
    coming: dict[ScheduleKey, datetime | None] = {}
    changes = record.tables.schedule_changes
    # Schedules are paused once the simulation is calm, when nothing delays a firing.
    last = {change.after.key: number for number, change in enumerate(changes)}
    for number, change in enumerate(changes):
        before, after, key = change.before, change.after, change.after.key
        step, expected = _step(after.definition), coming.get(key)
        if not change.is_fire:
            if after.pause_time is not None:
                is_last = number == last[key]
                if expected is not None and expected < change.now - _SLACK and is_last:
                    yield f"schedule {key.schedule_id} is paused at {change.now}, and {expected} has not fired"
                coming[key] = None
            elif _is_due_anew(change):
                coming[key] = _first(after, change.now)
            continue
        fire = after.fires[0]
        has_waited = before is not None and before.waiting_time == fire.due_time
        if fire.triggered or has_waited:
            pass
        elif expected is None or not expected <= fire.due_time <= _latest(expected, step, change, fire.due_time):
            yield f"schedule {key.schedule_id} fired for {fire.due_time}, but was due at {expected}"
        else:
            coming[key] = _before_end(after.definition, fire.due_time + step)
        if after.pause_time is not None and before is not None and before.pause_time is None:
            coming[key] = None


def _latest(expected: datetime, step: timedelta, change: ScheduleChange, due: datetime) -> datetime:
    """Return the latest due time that may fire next: only the last hundred are caught up."""
    late = (due - _EPOCH) % step
    return max(expected, _grid(change.latest or change.now, step) + late - (_MOST - 2) * step)


def _step(definition: Definition) -> timedelta:
    return _CRONS.get(definition.cron) or timedelta(seconds=definition.interval_seconds)


def _late(row: ScheduleRow) -> timedelta:
    """Return the jitter of a schedule, computed from its row."""
    offset = timedelta(seconds=row.definition.offset_seconds)
    return timedelta() if row.due_time is None else (row.due_time - _EPOCH - offset) % _step(row.definition)


def _first(row: ScheduleRow, now: datetime) -> datetime | None:
    definition, step = row.definition, _step(row.definition)
    offset = timedelta(seconds=definition.offset_seconds)
    plain = _grid(now - _late(row) - offset, step) + offset + step
    if definition.start_time is not None and plain < definition.start_time:
        plain = _grid(definition.start_time - offset - timedelta.resolution, step) + offset + step
    return _before_end(definition, plain + _late(row))


def _before_end(definition: Definition, due: datetime) -> datetime | None:
    return due if definition.end_time is None or due < definition.end_time else None


def jitter_is_bounded_and_constant(record: Record) -> Iterator[str]:
    """The jitter of a schedule does not change and is within its limit."""
    known: dict[tuple[ScheduleKey, int], timedelta] = {}
    changes = (change.after for change in record.tables.schedule_changes)
    for row in (row for row in changes if row.due_time is not None):
        late, most = _late(row), row.definition.jitter_seconds
        first = known.setdefault((row.key, most), late)
        if late != first or late > timedelta(seconds=most):
            yield f"schedule {row.key.schedule_id} has jitter {late}, had {first}, and may have {most} s"


def _timestamp(time: float) -> Timestamp:
    return Timestamp(seconds=int(time), nanos=int(time % 1 * 1000) * 1_000_000)


def _grid(time: datetime, step: timedelta) -> datetime:
    return _EPOCH + (time - _EPOCH) // step * step


CHECKERS = (
    each_due_time_fires_once,
    each_fire_has_its_run,
    fires_do_not_overlap,
    no_due_time_is_lost,
    jitter_is_bounded_and_constant,
)
