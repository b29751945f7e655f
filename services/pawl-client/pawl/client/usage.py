"""Client methods for usage figures."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from typing import Final, Literal, TypeVar

from pawl.agent.v1 import usage_pb2 as pb
from pawl.client.target import Target
from pawl.errors import InvalidField

T = TypeVar("T")

_DIMENSIONS: Final = {
    "store": pb.USAGE_DIMENSION_STORE,
    "user": pb.USAGE_DIMENSION_USER,
    "agent": pb.USAGE_DIMENSION_AGENT,
    "tool": pb.USAGE_DIMENSION_TOOL,
    "model": pb.USAGE_DIMENSION_MODEL,
}
_PERIODS: Final = {"": pb.USAGE_PERIOD_UNSPECIFIED, "hour": pb.USAGE_PERIOD_HOUR, "day": pb.USAGE_PERIOD_DAY}


class UsageVerbs(Target):
    """Methods for usage figures."""

    async def usage(
        self,
        *,
        by: Sequence[Literal["store", "user", "agent", "tool", "model"]] = (),
        per: Literal["", "hour", "day"] = "",
        start: datetime | None = None,
        end: datetime | None = None,
        store: str = "",
        user: str = "",
        agent: str = "",
        tool: str = "",
        model: str = "",
    ) -> AsyncGenerator[pb.UsageRow, None]:
        """Yield figures about runs, calls and tokens, newest first.

        You see your own usage. Admins see their store, and a deployment key sees all stores. By default, the figures
        cover the last 30 days, or the last 24 hours with `per="hour"`. Periods are whole hours or days in UTC.
        """
        request = pb.GetUsageRequest(
            by=[_value_of(_DIMENSIONS, each, "by") for each in by],
            period=_value_of(_PERIODS, per, "per"),
            store_id=store,
            user_id=user,
            agent_name=agent,
            tool_name=tool,
            model=model,
        )
        for time, field in ((start, request.from_time), (end, request.to_time)):
            if time is not None:
                field.FromDatetime(time)
        async for page in self.pages(self.usage_register.GetUsage, request):
            for row in page.rows:
                yield row


def _value_of(values: Mapping[str, T], name: str, field: str) -> T:
    if name not in values:
        raise InvalidField(f"{field} must be one of {', '.join(filter(None, values))}, got {name!r}", field=field)
    return values[name]
