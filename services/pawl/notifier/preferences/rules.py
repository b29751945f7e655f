"""Users' preferences: which notifications are delivered, and when."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import IntEnum
from typing import Final
from zoneinfo import ZoneInfo

from pawl.chassis.ids import ConversationId
from pawl.errors import InvalidField
from pawl.notifier.inbox.rules import NotificationKind, NotificationKinds

QUIET_HOURS_MAX: Final = 10
# Maximum number of muted conversations per user.
MUTES_MAX: Final = 1000
_ZONE_CHARACTERS_MAX: Final = 64
_DAY: Final = timedelta(days=1)
_MINUTE: Final = timedelta(minutes=1)
_QUIET_MAX: Final = timedelta(days=8)


class Weekday(IntEnum):
    """Days of the week as in ISO 8601. The values are stored."""

    MONDAY = 1
    TUESDAY = 2
    WEDNESDAY = 3
    THURSDAY = 4
    FRIDAY = 5
    SATURDAY = 6
    SUNDAY = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietHours:
    """Quiet hours. Nothing is delivered from `start` to the next `end` on the given `days` (every day if empty)."""

    start: str
    end: str
    days: tuple[Weekday, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietTimes:
    """All of a user's quiet hours, in a time zone. An empty time zone means UTC."""

    hours: tuple[QuietHours, ...] = ()
    time_zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mute:
    """A conversation that is muted until a certain time, or forever."""

    conversation_id: ConversationId
    until_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """A user's delivery preferences. If `kinds` is empty, all kinds are delivered."""

    kinds: tuple[NotificationKind, ...] = ()
    quiet: QuietTimes = QuietTimes()
    mutes: tuple[Mute, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencesChange:
    """A requested change to a user's preferences. None leaves a field unchanged."""

    kinds: NotificationKinds | None = None
    quiet: QuietTimes | None = None

    def check(self) -> None:
        """Raise InvalidField if a value is invalid."""
        if self.kinds is not None and len(set(self.kinds.kinds)) != len(self.kinds.kinds):
            raise InvalidField("kinds must not repeat", field="kinds")
        if self.quiet is not None:
            _check_quiet(self.quiet)


def _check_quiet(quiet: QuietTimes) -> None:
    if len(quiet.hours) > QUIET_HOURS_MAX:
        raise InvalidField(f"quiet.hours must have at most {QUIET_HOURS_MAX} entries", field="quiet.hours")
    for hours in quiet.hours:
        for text in (hours.start, hours.end):
            _check_time(text)
        if len(set(hours.days)) != len(hours.days):
            raise InvalidField("days must not repeat", field="quiet.hours")
    try:
        _zone(quiet.time_zone[:_ZONE_CHARACTERS_MAX])
    except (ValueError, OSError, KeyError):
        message = f"time_zone {quiet.time_zone[:_ZONE_CHARACTERS_MAX]!r} is not an IANA time zone such as Europe/Berlin"
        raise InvalidField(message, field="quiet.time_zone") from None


def quiet_until(quiet: QuietTimes, now: datetime) -> datetime | None:
    """Return when the current quiet hours end, or None if `now` is not within quiet hours."""
    if not quiet.hours:
        return None
    try:
        zone = _zone(quiet.time_zone)
    except (ValueError, OSError, KeyError):
        zone = _zone("")  # The machine that checked it knew the time zone, but this one does not.
    until = now
    while until - now < _QUIET_MAX:
        spans = _spans(quiet.hours, zone, until)
        later = max((end for start, end in spans if start <= until < end), default=until)
        if later == until:
            break
        until = later
    return until if until > now else None


def _spans(quiet_hours: Sequence[QuietHours], zone: ZoneInfo, now: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Yield the start and end of each quiet period that starts on the day of `now` or the day before."""
    today = now.astimezone(zone).date()
    for hours in quiet_hours:
        start, end = time.fromisoformat(hours.start), time.fromisoformat(hours.end)
        for day in (today - _DAY, today):
            if not hours.days or day.isoweekday() in hours.days:
                last_day = day if end > start else day + _DAY
                for fold in (0, 1):  # When clocks are set back, both occurrences are quiet.
                    yield _moment(day, start, zone, fold), _moment(last_day, end, zone, fold)


def _moment(day: date, at: time, zone: ZoneInfo, fold: int) -> datetime:
    """Return the moment at which local clocks show a time or skip it. `fold` selects one of two occurrences."""
    once, again = (datetime.combine(day, at, zone).replace(fold=each).astimezone(UTC) for each in (0, 1))
    if once <= again:
        return again if fold else once
    before, minutes = again.astimezone(zone).utcoffset(), range((once - again) // _MINUTE)
    jump = bisect_left(minutes, x=True, key=lambda n: (again + n * _MINUTE).astimezone(zone).utcoffset() != before)
    return again + jump * _MINUTE


def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name or "UTC")


def _check_time(text: str) -> None:
    try:
        is_time = time.fromisoformat(text).strftime("%H:%M") == text
    except ValueError:
        is_time = False
    if not is_time:
        raise InvalidField(f"{text[:16]!r} is not a time of day such as 22:00", field="quiet.hours")
