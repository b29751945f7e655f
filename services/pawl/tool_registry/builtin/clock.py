"""The tool that returns the current time."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any

from pawl.chassis.process.clock import Clock
from pawl.tools.rules.schema import near_matches
from pawl.tools.sdk.context import ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass


def clock_tools(clock: Clock) -> list[Tool[..., Any]]:
    _zones()  # Read from disk now, not during a call.

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def get_current_time(
        timezone: Annotated[str, "IANA name of a time zone, for example Europe/Oslo"] = "UTC",
    ) -> dict[str, str]:
        """Get the current date and time in a time zone."""
        zone = _zone(timezone)
        now = datetime.fromtimestamp(clock.now(), UTC).astimezone(zone)
        return {
            "time": now.isoformat(timespec="seconds"),
            "weekday": _WEEKDAYS[now.weekday()],
            "timezone": zone.key,
            "abbreviation": now.tzname() or "",
        }

    return [get_current_time]


_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@cache
def _zones() -> dict[str, str]:
    names = sorted(zoneinfo.available_timezones())
    by_city = {name.rpartition("/")[2].replace("_", " ").casefold(): name for name in names}
    return by_city | {name.casefold(): name for name in names}


def _zone(name: str) -> zoneinfo.ZoneInfo:
    exact = _zones().get(name.strip().casefold())
    if exact is not None and ("/" in name or exact.casefold() == name.strip().casefold()):
        return zoneinfo.ZoneInfo(exact)
    # Suggest zones for a city, but do not assume one: there is more than one London.
    near = dict.fromkeys(_zones()[match] for match in near_matches(name.replace("_", " "), _zones()))
    hint = f"; did you mean {' or '.join(near)}?" if near else ", for example Europe/Oslo or UTC"
    raise ToolError(f"unknown time zone {name[:80]!r}: use an IANA name{hint}")
