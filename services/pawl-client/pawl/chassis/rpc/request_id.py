"""The id of the request being served. Clients import this module without the server."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

# Metadata with the request id in all services and logs; generated if absent.
REQUEST_ID_KEY: Final = "pawl-request-id"

_request_id: ContextVar[str] = ContextVar("pawl_request_id", default="")


def current_request_id() -> str:
    """Return the id of the request that this task serves, or an empty string."""
    return _request_id.get()


def set_request_id(request_id: str) -> None:
    """Set the request id for this task and for the tasks that it starts."""
    _request_id.set(request_id)
