"""Servicer for pawl.agent.v1.UsageService, forwarded by agent-loop."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from asyncpg import Record
from msgspec.structs import replace

from pawl.agent.v1 import usage_pb2 as pb
from pawl.agent.v1.usage_pb2_grpc import UsageServiceServicer
from pawl.chassis.identity.auth import current_principal
from pawl.chassis.ids import check_agent_name, check_id
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidField, InvalidPageToken
from pawl.event.v1 import run_pb2
from pawl.job_store.ledger.pages import make_token, page_size, read_token
from pawl.job_store.ledger.rpc.fields import enum_member
from pawl.job_store.ledger.rpc.messages import optional_moment
from pawl.job_store.usage.rules import Period, Selection, check_kinds, dimensions, scope, times
from pawl.job_store.usage.store import COLUMN_OF, Position, PostgresUsage
from pawl.values import Usage

_NAME_CHARACTERS_MAX: Final = 256
_METHOD: Final = "GetUsage"
_COUNTS: Final = (
    *("runs", "runs_completed", "runs_failed", "runs_cancelled", "runs_expired", "rounds", "users"),
    *("calls_succeeded", "calls_failed", "calls_refused"),
)
_SECONDS_OF: Final = {Period.WHOLE: 0, Period.HOUR: 3600, Period.DAY: 86400}
_NO_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)


class _Position(msgspec.Struct, frozen=True, array_like=True):
    """The last row of a page, and the period of the first page.

    The period is stored because its start and end may depend on the time of the first request.
    """

    start: datetime
    end: datetime
    place: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
    names: tuple[Annotated[str, msgspec.Meta(max_length=_NAME_CHARACTERS_MAX, pattern="^[^\0]*$")], ...]


class UsageServicer(UsageServiceServicer):
    def __init__(self, usage: PostgresUsage, clock: Clock) -> None:
        self._usage = usage
        self._clock = clock

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        size = page_size(request.page_size)
        selection, after = self._selection(request)
        found = await self._usage.rows(selection, after=after, rows_max=size + 1)
        response = pb.GetUsageResponse(rows=(_row(each, selection) for each in found[:size]))
        if len(found) > size:
            last = found[size - 1]
            names = tuple(last[COLUMN_OF[each]] for each in selection.by)
            position = _Position(selection.start, selection.end, last["place"], names)
            response.next_page_token = make_token(_METHOD, _asked(selection, request), position)
        return response

    def _selection(self, request: pb.GetUsageRequest) -> tuple[Selection, Position | None]:
        store_id, user_id = scope(
            current_principal(),
            check_id(request.store_id, "store_id", optional=True),
            check_id(request.user_id, "user_id", optional=True),
        )
        period, now = enum_member(Period, request.period, "period"), datetime.fromtimestamp(self._clock.now(), UTC)
        start, end = optional_moment(request, "from_time"), optional_moment(request, "to_time")
        selection = Selection(
            store_id=store_id,
            user_id=user_id,
            agent_name=check_agent_name(request.agent_name, "agent_name", optional=True),
            tool_name=_name(request.tool_name, "tool_name"),
            model=_name(request.model, "model"),
            start=now,
            end=now,
            period=period,
            by=dimensions(request.by),
        )
        check_kinds(selection)
        position = read_token(request.page_token, _METHOD, _asked(selection, request), _Position)
        if position is None:
            start, end = times(start, end, period, now)
            return replace(selection, start=start, end=end), None
        if len(position.names) != len(selection.by) or position.end <= position.start:
            raise InvalidPageToken
        return replace(selection, start=position.start, end=position.end), (position.place, position.names)


def _asked(selection: Selection, request: pb.GetUsageRequest) -> tuple[object, ...]:
    times = (each.ToNanoseconds() for each in (request.from_time, request.to_time))
    return *times, *msgspec.structs.astuple(replace(selection, start=_NO_TIME, end=_NO_TIME))


def _name(value: str, field: str) -> str:
    if len(value) > _NAME_CHARACTERS_MAX:
        raise InvalidField(f"{field} must be at most {_NAME_CHARACTERS_MAX} characters, got {len(value)}", field=field)
    if "\0" in value:
        raise InvalidField(f"{field} must not contain NUL characters", field=field)
    return value


def _row(record: Record, selection: Selection) -> pb.UsageRow:
    figures = pb.UsageFigures(
        **{name: record[name] for name in _COUNTS},
        run_seconds=record["run_milliseconds"] / 1000,
        call_seconds=record["call_milliseconds"] / 1000,
        usage=run_pb2.Usage(**{name: record[name] for name in Usage.__struct_fields__}),
    )
    row = pb.UsageRow(figures=figures, **{COLUMN_OF[each]: record[COLUMN_OF[each]] for each in selection.by})
    if seconds := _SECONDS_OF[selection.period]:
        row.time.FromSeconds(-record["place"] * seconds)
    return row
