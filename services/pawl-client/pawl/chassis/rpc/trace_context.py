"""W3C trace contexts. They are passed on whether or not this process records traces."""

from __future__ import annotations

import re
import sys
from contextvars import ContextVar
from typing import Final

# The header or metadata key.
TRACEPARENT_KEY: Final = "traceparent"

_FORM: Final = re.compile(
    "(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-[!-~]{0,200})?", re.ASCII
)
_current: ContextVar[str] = ContextVar("pawl_traceparent", default="")


def valid(header: str) -> str:
    """Return a `traceparent` in the format of version 00, or an empty string if it is invalid."""
    match = _FORM.fullmatch(header)
    if match is None or (match[1] == "00" and match[5]):
        return ""
    return f"00-{match[2]}-{match[3]}-{match[4]}"


def current_traceparent() -> str:
    """Return the `traceparent` of the request that this task serves, or an empty string if it has no valid one.

    In a program that uses OpenTelemetry, return the `traceparent` of the current span.
    """
    if found := _current.get():
        return found
    if (trace := sys.modules.get("opentelemetry.trace")) is None:
        return ""
    span = trace.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else ""


def set_traceparent(traceparent: str) -> None:
    """Set the `traceparent` for this task and for the tasks that it starts."""
    _current.set(traceparent)
