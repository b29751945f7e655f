"""The preferences of users: what is sent of their notifications, and when."""

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
MUTES_MAX: Final = 1000
"""Muted conversations of one user."""
_ZONE_CHARACTERS_MAX: Final = 64
_DAY: Final = timedelta(days=1)
_MINUTE: Final = timedelta(minutes=1)
_QUIET_MAX: Final = timedelta(days=8)


class Weekday(IntEnum):
    """The days of the week, as in ISO 8601. The values are stored."""

    MONDAY = 1
    TUESDAY = 2
    WEDNESDAY = 3
    THURSDAY = 4
    FRIDAY = 5
    SATURDAY = 6
    SUNDAY = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietHours:
    """Hours in which nothing is sent, from `start` to the next `end`. Without `days` they begin on each."""

    start: str
    end: str
    days: tuple[Weekday, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietTimes:
    """All quiet hours of a user, by the clock of a time zone; UTC if that is empty."""

    hours: tuple[QuietHours, ...] = ()
    time_zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mute:
    """A conversation of which nothing is sent, until a time or for good."""

    conversation_id: ConversationId
    until_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """The wishes of a user about what is sent. Without `kinds` that is everything."""

    kinds: tuple[NotificationKind, ...] = ()
    quiet: QuietTimes = QuietTimes()
    mutes: tuple[Mute, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencesChange:
    """A change that a user asks for; what is None stays."""

    kinds: NotificationKinds | None = None
    quiet: QuietTimes | None = None

    def check(self) -> None:
        """Refuse what has no meaning.

        Raises:
            InvalidField: it has none.
        """
        if self.kinds is not None and len(set(self.kinds.kinds)) != len(self.kinds.kinds):
            raise InvalidField("kinds must differ from each other", field="kinds")
        if self.quiet is not None:
            _check_quiet(self.quiet)


def _check_quiet(quiet: QuietTimes) -> None:
    if len(quiet.hours) > QUIET_HOURS_MAX:
        raise InvalidField(f"there may be at most {QUIET_HOURS_MAX} quiet hours", field="quiet.hours")
    for hours in quiet.hours:
        for text in (hours.start, hours.end):
            _check_time(text)
        if len(set(hours.days)) != len(hours.days):
            raise InvalidField("days must differ from each other", field="quiet.hours")
    try:
        _zone(quiet.time_zone[:_ZONE_CHARACTERS_MAX])
    except (ValueError, OSError, KeyError):
        message = f"time_zone {quiet.time_zone[:_ZONE_CHARACTERS_MAX]!r} is none of IANA, such as Europe/Berlin"
        raise InvalidField(message, field="quiet.time_zone") from None


def quiet_until(quiet: QuietTimes, now: datetime) -> datetime | None:
    """Return when the quiet hours end in which `now` is; None if it is in none."""
    if not quiet.hours:
        return None
    try:
        zone = _zone(quiet.time_zone)
    except (ValueError, OSError, KeyError):
        zone = _zone("")  # The time zones of this machine lack one that another had.
    until = now
    while until - now < _QUIET_MAX:
        spans = _spans(quiet.hours, zone, until)
        later = max((end for start, end in spans if start <= until < end), default=until)
        if later == until:
            break
        until = later
    return until if until > now else None


def _spans(quiet_hours: Sequence[QuietHours], zone: ZoneInfo, now: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Yield from when to when it is quiet, of all that begin within a day of `now`."""
    today = now.astimezone(zone).date()
    for hours in quiet_hours:
        start, end = time.fromisoformat(hours.start), time.fromisoformat(hours.end)
        for day in (today - _DAY, today):
            if not hours.days or day.isoweekday() in hours.days:
                last_day = day if end > start else day + _DAY
                for fold in (0, 1):  # Where clocks go back it is quiet both times.
                    yield _moment(day, start, zone, fold), _moment(last_day, end, zone, fold)


def _moment(day: date, at: time, zone: ZoneInfo, fold: int) -> datetime:
    """Return when clocks show a time, the `fold` of two; for one that they leave out the moment of their jump."""
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
        raise InvalidField(f"{text[:16]!r} is no time of day, such as 22:00", field="quiet.hours")
