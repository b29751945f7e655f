"""Computes when a schedule is due."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from pawl.errors import InvalidField, TooLarge

CRON_CHARACTERS_MAX: Final = 256
INTERVAL_SECONDS_MAX: Final = 366 * 86_400
JITTER_SECONDS_MAX: Final = 3600
CATCH_UP_SECONDS: Final = 3600
CATCH_UP_SECONDS_MAX: Final = 86_400
# Maximum number of missed scheduled times that fire later.
CAUGHT_UP_MAX: Final = 100

# How far ahead to search for scheduled times. This bounds the search for rare days.
HORIZON: Final = timedelta(days=30 * 366)

_PARTS: Final = ("minute", "hour", "day-of-month", "month", "day-of-week")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_MIN: Final = _EPOCH + timedelta(days=2)
_TIME_MAX: Final = datetime(9000, 1, 1, tzinfo=UTC)
# Time zone files that are not part of the IANA database, differ between machines, or count leap seconds.
_NO_ZONE: Final = re.compile(r"localtime|posixrules|(posix|right)/.*")


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The timing of a schedule: `cron`, or every `interval_seconds` since 1970, shifted by `offset_seconds`."""

    cron: str = ""
    time_zone: str = ""
    interval_seconds: int = 0
    offset_seconds: int = 0
    jitter_seconds: int = 0
    start_time: datetime | None = None
    end_time: datetime | None = None
    catch_up_seconds: int = 0


def check(timing: Timing) -> None:
    """Validate the timing.

    Raises:
        InvalidField: The timing is invalid. The metadata names the field. For a cron expression, the message names the
            invalid part.
    """
    if bool(timing.cron) == bool(timing.interval_seconds):
        raise InvalidField("set either `cron` or `interval_seconds`", field="definition.cron")
    if timing.cron:
        _check_cron(timing)
    elif timing.time_zone:
        raise InvalidField("time_zone requires `cron`", field="definition.time_zone")
    if timing.interval_seconds > INTERVAL_SECONDS_MAX:
        raise _too_much("interval_seconds", INTERVAL_SECONDS_MAX)
    if timing.offset_seconds and timing.offset_seconds >= timing.interval_seconds:
        raise InvalidField("offset_seconds must be less than interval_seconds", field="definition.offset_seconds")
    if timing.jitter_seconds > JITTER_SECONDS_MAX:
        raise _too_much("jitter_seconds", JITTER_SECONDS_MAX)
    if timing.catch_up_seconds > CATCH_UP_SECONDS_MAX:
        raise _too_much("catch_up_seconds", CATCH_UP_SECONDS_MAX)
    start, end = timing.start_time, timing.end_time
    if end is not None and start is not None and end <= start:
        raise InvalidField("end_time must be after start_time", field="definition.end_time")


class _Cron(CronSim):
    def __init__(self, cron: str, after: datetime, end: datetime) -> None:
        super().__init__(cron, after)
        self._end_date = end.date() + timedelta(days=2)

    def advance_month(self) -> None:
        if self.dt.date() > self._end_date:
            raise StopIteration
        super().advance_month()


def due_times(timing: Timing, schedule_id: str, after: datetime, until: datetime | None = None) -> Iterator[datetime]:
    """Yield the scheduled times after `after` and before `until`, in order and including jitter.

    By default, `until` is `HORIZON` later than `after`.
    """
    late = jitter(timing, schedule_id)
    begin = after - late
    if timing.start_time is not None and timing.start_time > begin:
        begin = timing.start_time - timedelta.resolution
    end = min(timing.end_time or _TIME_MAX, until or begin + HORIZON)
    if begin >= end:
        return
    plain = _cron_times(timing, begin, end) if timing.cron else _interval_times(timing, begin)
    for time in plain:
        if time + late >= end:
            return
        if time > begin:
            yield time + late


def same_times(one: Timing, other: Timing) -> bool:
    """Return whether two timings have the same scheduled times, whatever their catch-up periods."""
    fields = [name for name in Timing.__struct_fields__ if name != "catch_up_seconds"]
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def past_times(timing: Timing, schedule_id: str, begin: datetime, end: datetime) -> tuple[datetime, ...]:
    """Return the scheduled times from `begin` (inclusive) to `end` (exclusive).

    Raises:
        InvalidField: `end` is not after `begin`.
        TooLarge: There are too many scheduled times to fire at once.
    """
    if end <= begin:
        raise InvalidField("end_time must be after begin_time, and begin_time must be in the past", field="end_time")
    times = due_times(timing, schedule_id, max(begin, _TIME_MIN) - timedelta.resolution, end)
    found = tuple(islice(times, CAUGHT_UP_MAX + 1))
    if len(found) > CAUGHT_UP_MAX:
        raise TooLarge(f"the range has more than {CAUGHT_UP_MAX} scheduled times: use a shorter range")
    return found


def jitter(timing: Timing, schedule_id: str) -> timedelta:
    """Return the jitter to add to a schedule's times. It depends only on the id and `jitter_seconds`."""
    share = int.from_bytes(hashlib.sha256(schedule_id.encode()).digest()[:8]) / 2**64
    return timedelta(seconds=int(share * timing.jitter_seconds))


def following(timing: Timing, schedule_id: str, due: datetime, now: datetime) -> datetime | None:
    """Return the next scheduled time after `due`, or None if there is none.

    Missed times that are too old to be caught up on are skipped, as are all but the newest `CAUGHT_UP_MAX` of the rest.
    """
    first = max(due, caught_up_from(timing, now))
    most = CAUGHT_UP_MAX - (not is_missed(timing, due, now))
    # Only the latest missed times fire later, and they may be far in the past. Widen the search until enough are found.
    span = CAUGHT_UP_MAX * timedelta(seconds=timing.interval_seconds or 60)
    while True:
        begin = max(first, now - span)
        kept = deque(due_times(timing, schedule_id, begin, now + timedelta.resolution), maxlen=most)
        if len(kept) == most or begin == first:
            return kept[0] if kept else next(due_times(timing, schedule_id, now), None)
        span *= 2


def is_missed(timing: Timing, due: datetime, now: datetime) -> bool:
    return due <= caught_up_from(timing, now)


def caught_up_from(timing: Timing, now: datetime) -> datetime:
    return now - timedelta(seconds=timing.catch_up_seconds or CATCH_UP_SECONDS)


def _check_cron(timing: Timing) -> None:
    cron, parts = timing.cron, timing.cron.split()
    if len(cron) > CRON_CHARACTERS_MAX:
        message = f"cron must be at most {CRON_CHARACTERS_MAX} characters, got {len(cron)}"
        raise InvalidField(message, field="definition.cron")
    if len(parts) != len(_PARTS):
        message = f"cron must have five parts ({' '.join(_PARTS)}), but {cron!r} has {len(parts)}"
        raise InvalidField(message, field="definition.cron")
    for number, (name, part) in enumerate(zip(_PARTS, parts, strict=True)):
        try:
            CronSim(" ".join(part if other == number else "*" for other in range(len(_PARTS))), _EPOCH)
        except (CronSimError, ValueError, AssertionError, TypeError):
            message = f"cron {cron!r}: part {number + 1} ({name}) is invalid: {part!r}"
            raise InvalidField(message, field="definition.cron") from None
    zone(timing.time_zone)
    try:
        next(_Cron(cron, _EPOCH, _EPOCH + HORIZON))
    except (CronSimError, StopIteration):
        raise InvalidField(f"cron {cron!r} never matches a day", field="definition.cron") from None


def cron_text(cron: str) -> str:
    """Describe a valid cron expression in words.

    If it restricts both the day of the month and the day of the week, a day needs to match only one of them.
    """
    text = CronSim(cron, _EPOCH).explain()
    _, _, day, _, weekday = cron.split()
    return text if "*" in {day[0], weekday[0]} else text.replace(" and on ", " or on ")


def zone(name: str) -> ZoneInfo:
    """Return a time zone. An empty name means UTC.

    Raises:
        InvalidField: There is no such time zone.
    """
    try:
        if not _NO_ZONE.fullmatch(name):
            return ZoneInfo(name or "UTC")
    except (ValueError, OSError, KeyError):
        pass
    message = f"time_zone {name[:64]!r} is not in the IANA database: use a name such as Europe/Berlin"
    raise InvalidField(message, field="definition.time_zone")


def _cron_times(timing: Timing, after: datetime, end: datetime) -> Iterator[datetime]:
    last, begin = after, after.astimezone(zone(timing.time_zone))
    cron = _by_the_clock(timing.cron)
    times = _Cron(cron, begin, end)
    minute, hour, rest = cron.split(maxsplit=2)
    only = None
    if hour == "*" and len(times.minutes) == 1 and _shifts_unevenly(timing.time_zone, begin.year):
        # Here, cronsim steps by whole hours and misses times after a half-hour shift, unless the expression has another
        # minute.
        (only,) = times.minutes
        times = _Cron(f"{minute},{59 - only} {hour} {rest}", begin, end)
    for time in times:
        found = time.astimezone(UTC)
        # All times of day skipped by a clock change map to the same moment, which counts once.
        if found > last and only in {None, time.minute}:
            last = found
            yield found


@lru_cache(maxsize=1024)
def _shifts_unevenly(name: str, year: int) -> bool:
    """Return whether a time zone's clocks shift by a fraction of an hour in `year` or in the year after it."""
    first = [datetime(when, month, 1, tzinfo=zone(name)) for when in (year, year + 1) for month in range(1, 13)]
    return len({(time.utcoffset() or timedelta()) % timedelta(hours=1) for time in first}) > 1


def _by_the_clock(cron: str) -> str:
    """Return an equivalent expression that cronsim treats as times of day, unless it runs every hour.

    cronsim treats an expression as an interval if its minute or hour starts with a star.
    """
    minute, hour, *days = cron.split()
    if hour != "*":
        minute, hour = (re.sub(r"^\*", whole, part) for whole, part in (("0-59", minute), ("0-23", hour)))
    return " ".join((minute, hour, *days))


def _interval_times(timing: Timing, after: datetime) -> Iterator[datetime]:
    interval, offset = timedelta(seconds=timing.interval_seconds), timedelta(seconds=timing.offset_seconds)
    time = _EPOCH + offset + ((after - _EPOCH - offset) // interval + 1) * interval
    while True:
        yield time
        time += interval


def _too_much(name: str, most: int) -> InvalidField:
    return InvalidField(f"{name} must be at most {most} seconds", field=f"definition.{name}")
