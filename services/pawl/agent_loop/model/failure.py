"""Failures of a model call, by status code and kind of fault, never by text."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.agent_loop.model import request as model
from pawl.agent_loop.model import words
from pawl.agent_loop.model.request import Problem
from pawl.chassis.rpc.retry import asked_seconds

_AUTH: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
# Those that say that the same request may be taken later.
_LATER: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT)
# Those with which servers refuse an image; some say 404 where a model takes none.
_CONTENT: Final = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)

TRUNCATED: Final = Problem(reason="STREAM_TRUNCATED", message="The model server's answer broke off.")
EMPTY: Final = Problem(reason="EMPTY_STREAM", message="The model server's answer was empty.")
NETWORK: Final = Problem(reason=model.NETWORK, message="The model server cannot be reached.")
"""The connection could not be made, or was lost."""
TOO_LARGE: Final = Problem(
    reason="STREAM_TOO_LARGE", message="The model server's answer is too large.", retryable=False
)
"""Asking again would give the like."""
ROUND_TIMEOUT: Final = Problem(
    reason=model.ROUND_TIMEOUT,
    failure_class=FailureClass.LIMIT,
    retryable=False,
    message="The round took longer than it may.",
)
CONTENT_FILTER: Final = Problem(
    reason=model.CONTENT_FILTER,
    failure_class=FailureClass.CONTENT_FILTER,
    retryable=False,
    message="The model server withheld the answer (content filter).",
)


def http_status(status: int, *, error: Any = "", retry_after_seconds: float | None = None) -> Problem:
    """Return the problem of a response that is not a success; `error` is what it says, in any form.

    408, 409, 429 and 5xx are worth another attempt. A code that says that the
    credential is wrong counts more than the status.
    """
    if words.status_of(error) == HTTPStatus.UNAUTHORIZED and status < HTTPStatus.INTERNAL_SERVER_ERROR:
        status = HTTPStatus.UNAUTHORIZED
    said = words.on_one_line(words.of_json(error))
    group, retryable, message = FailureClass.PROVIDER, False, f"The model server refused the request (HTTP {status})"
    if status in _AUTH:
        group, message = FailureClass.AUTH, f"The model server refused the credential (HTTP {status})"
        # What it says about a credential that it does not know may repeat it.
        said = said if status == HTTPStatus.FORBIDDEN else ""
    elif status == HTTPStatus.TOO_MANY_REQUESTS:
        group, retryable, message = FailureClass.RATE, True, "The model server is at its rate limit (HTTP 429)"
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        retryable, message = True, f"The model server failed (HTTP {status})"
    elif status in _LATER:
        retryable, message = True, f"The model server could not take the request now (HTTP {status})"
    return Problem(
        reason=f"HTTP_{int(status)}",
        failure_class=group,
        retryable=retryable,
        message=f"{message}{said}.",
        retry_after_seconds=retry_after_seconds if retryable else None,
        refuses_content=status in _CONTENT and words.TOO_LONG not in words.codes(error),
    )


def reported(error: Any) -> Problem:
    """Return the problem of an error that the server reports inside a stream.

    A code that is an HTTP status, or stands for one, counts like it; anything
    else is a failure of the server.
    """
    status = words.status_of(error)
    if status is not None:
        return http_status(status, error=error)
    said = words.on_one_line(words.of_json(error))
    return Problem(reason="STREAM_ERROR", message=f"The model server reported an error{said}.")


def garbled(data: bytes = b"") -> Problem:
    """Return the problem of bytes that are no chunk; plain text among them is what the server says."""
    said = words.on_one_line(words.of_json(words.error_of(data.decode(errors="replace"))))
    return Problem(reason="STREAM_GARBLED", message=f"The model server sent data that cannot be read{said}.")


def headers_timeout(seconds: float) -> Problem:
    """Return the problem of a server that does not begin to answer."""
    return Problem(reason=model.HEADERS_TIMEOUT, message=f"The model server did not answer within {seconds:g} s.")


def idle_timeout(seconds: float) -> Problem:
    """Return the problem of a stream that fell silent."""
    return Problem(reason="IDLE_TIMEOUT", message=f"The model server was silent for {seconds:g} s.")


def retry_after_seconds(headers: Mapping[str, str], *, now: float) -> float | None:
    """Return how long a response asks to wait: `retry-after-ms`, or Retry-After in seconds or as a date.

    `now` is the time of day in seconds since 1970. None where neither header is
    there (RFC 9110, 10.2.3), or says no such thing.
    """
    milliseconds = asked_seconds(headers.get("retry-after-ms", ""))
    return asked_seconds(headers.get("retry-after", ""), now=now) if milliseconds is None else milliseconds / 1000
