"""Access to usage figures, and the hours or days that a request covers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from enum import IntEnum
from typing import Final

import msgspec

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import InvalidField, PermissionDenied
from pawl.job_store.ledger.rules.usage import HOURS_DAYS_MAX
from pawl.job_store.store_settings.rules import governs_all

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_HOURS_DEFAULT: Final = 24
_DAYS_DEFAULT: Final = 30
_LAST: Final = datetime.max.replace(tzinfo=UTC) - 2 * _DAY


class Period(IntEnum):
    WHOLE = 0
    HOUR = 1
    DAY = 2


class Dimension(IntEnum):
    STORE = 1
    USER = 2
    AGENT = 3
    TOOL = 4
    MODEL = 5


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the figures to return. Empty values select all.

    `start` and `end` are rounded to full days, or to full hours for hourly figures.
    """

    store_id: StoreId
    user_id: UserId
    agent_name: str
    tool_name: str
    model: str
    start: datetime
    end: datetime
    period: Period
    by: tuple[Dimension, ...]

    @property
    def is_of_tools(self) -> bool:
        return bool(self.tool_name) or Dimension.TOOL in self.by

    @property
    def is_of_models(self) -> bool:
        return bool(self.model) or Dimension.MODEL in self.by


def scope(caller: Principal, store_id: StoreId, user_id: UserId) -> tuple[StoreId, UserId]:
    """Return the store and user whose figures the caller may see. Empty values mean all.

    Raises:
        PermissionDenied: The caller may not see the requested figures.
    """
    is_of_all = governs_all(caller)
    if store_id and store_id != caller.store_id and not is_of_all:
        raise PermissionDenied("another store's usage requires a deployment key")
    if is_of_all or Role.ADMIN in caller.roles:
        return store_id if is_of_all else caller.store_id, user_id
    if user_id and user_id != caller.user_id:
        raise PermissionDenied("another user's usage requires the admin role")
    return caller.store_id, caller.user_id


def times(start: datetime | None, end: datetime | None, period: Period, now: datetime) -> tuple[datetime, datetime]:
    """Return the requested start and end, extended to full hours or days.

    Raises:
        InvalidField: The end is not after the start, or the start is too old for hourly figures.
    """
    unit = _HOUR if period is Period.HOUR else _DAY
    default = _HOURS_DEFAULT * _HOUR if period is Period.HOUR else _DAYS_DEFAULT * _DAY
    start = _floor(now - default if start is None else start, unit)
    end = -(-(min(now if end is None else end, _LAST) - _EPOCH) // unit) * unit + _EPOCH
    if end <= start:
        raise InvalidField("to_time must be after from_time", field="to_time")
    first = _floor(now, _DAY) - (HOURS_DAYS_MAX - 1) * _DAY
    if period is Period.HOUR and start < first:
        raise InvalidField(f"from_time must be at least {first:%Y-%m-%d}: older usage has no hours", field="from_time")
    return start, end


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _floor(time: datetime, unit: timedelta) -> datetime:
    return (time - _EPOCH) // unit * unit + _EPOCH


def dimensions(numbers: Sequence[int]) -> tuple[Dimension, ...]:
    """Return the dimensions in the order in which the rows contain them.

    Raises:
        InvalidField: A dimension is unknown or repeated, or tools and models are combined.
    """
    known = {each.value for each in Dimension}
    if unknown := set(numbers) - known:
        raise InvalidField(f"by has the unknown value {min(unknown)}", field="by")
    if len(set(numbers)) != len(numbers):
        raise InvalidField("by must not repeat a dimension", field="by")
    return tuple(map(Dimension, sorted(numbers)))


def check_kinds(selection: Selection) -> None:
    """Check that figures exist for this combination of filters and dimensions.

    Raises:
        InvalidField: The selection combines tools and models.
    """
    if selection.is_of_tools and selection.is_of_models:
        raise InvalidField("tools and models cannot be combined, because no figure has both", field="by")


def days(selection: Selection) -> tuple[date, date]:
    """Return the first and last day with figures for the selection."""
    return selection.start.date(), (selection.end - _HOUR).date()
