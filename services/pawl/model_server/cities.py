"""The IANA time zones of cities, from the names in the time zone database."""

from __future__ import annotations

import functools
import zoneinfo

_REGIONS = {"Europe", "America", "Asia", "Africa", "Australia", "Pacific", "Atlantic", "Indian", "Antarctica", "Arctic"}
_ALSO = {
    "bangalore": "Asia/Kolkata",
    "barcelona": "Europe/Madrid",
    "beijing": "Asia/Shanghai",
    "bergen": "Europe/Oslo",
    "boston": "America/New_York",
    "cologne": "Europe/Berlin",
    "delhi": "Asia/Kolkata",
    "edinburgh": "Europe/London",
    "frankfurt": "Europe/Berlin",
    "geneva": "Europe/Zurich",
    "gmt": "Etc/GMT",
    "hamburg": "Europe/Berlin",
    "kyoto": "Asia/Tokyo",
    "milan": "Europe/Rome",
    "mumbai": "Asia/Kolkata",
    "munich": "Europe/Berlin",
    "new delhi": "Asia/Kolkata",
    "nyc": "America/New_York",
    "osaka": "Asia/Tokyo",
    "rio de janeiro": "America/Sao_Paulo",
    "san francisco": "America/Los_Angeles",
    "seattle": "America/Los_Angeles",
    "utc": "UTC",
    "washington": "America/New_York",
}


def zone_of(place: str) -> str | None:
    """The IANA zone of a city or zone name ("Oslo", "new york", "Europe/Oslo"); None if it is not known."""
    return _zones().get(" ".join(place.lower().replace("_", " ").split()))


@functools.cache
def _zones() -> dict[str, str]:
    """City and zone names in lower case."""
    zones: dict[str, str] = {}
    for zone in sorted(zoneinfo.available_timezones()):
        spoken = zone.lower().replace("_", " ")
        zones.setdefault(spoken, zone)
        if "/" in zone and zone.split("/")[0] in _REGIONS:
            zones.setdefault(spoken.rsplit("/", 1)[-1], zone)
    return zones | _ALSO
