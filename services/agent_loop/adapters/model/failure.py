"""What went wrong with a model call, by status code and kind of fault, never by text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final

from services.agent_loop.domain import model
from services.agent_loop.domain.failure import FailureClass
from services.agent_loop.domain.model import ModelError

_DETAIL_CHARACTERS_MAX: Final = 300
_AUTH: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def http_status(status: int, *, detail: str, retry_after_seconds: float | None) -> ModelError:
    """Return the error for a response that is not a success.

    Only 429 and 5xx are worth another attempt. `detail`, the server's own words,
    goes into the message only where it is about the request.
    """
    reason = f"HTTP_{status}"
    if status in _AUTH:
        return ModelError(
            reason=reason,
            failure_class=FailureClass.AUTH,
            retryable=False,
            message=f"The model server refused the credential (HTTP {status}).",
        )
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return ModelError(
            reason=reason,
            failure_class=FailureClass.RATE,
            retryable=True,
            message="The model server is at its rate limit (HTTP 429).",
            retry_after_seconds=retry_after_seconds,
        )
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ModelError(
            reason=reason,
            failure_class=FailureClass.PROVIDER,
            retryable=True,
            message=f"The model server failed (HTTP {status}).",
            retry_after_seconds=retry_after_seconds,
        )
    return ModelError(
        reason=reason,
        failure_class=FailureClass.PROVIDER,
        retryable=False,
        message=f"The model server refused the request (HTTP {status}){_with(detail)}.",
    )


def reported(error: Any) -> ModelError:
    """Return the error for one that the server reports inside a stream.

    A numeric `code` counts like the HTTP status it is; anything else is a
    failure of the server.
    """
    body = error if isinstance(error, dict) else {"message": error}
    code = body.get("code")
    if type(code) is int and HTTPStatus.BAD_REQUEST <= code < 600:  # noqa: PLR2004  # the end of the 5xx
        return http_status(code, detail=_text(body.get("message")), retry_after_seconds=None)
    return _provider(model.STREAM_ERROR, f"The model server reported an error{_with(_text(body.get('message')))}.")


def garbled() -> ModelError:
    """Return the error for bytes that are no chunk."""
    return _provider(model.STREAM_GARBLED, "The model server sent data that cannot be read.")


def truncated() -> ModelError:
    """Return the error for a stream without its end."""
    return _provider(model.STREAM_TRUNCATED, "The model server's answer broke off.")


def empty() -> ModelError:
    """Return the error for a stream with nothing in it."""
    return _provider(model.EMPTY_STREAM, "The model server's answer was empty.")


def network() -> ModelError:
    """Return the error for a connection that could not be made, or was lost."""
    return _provider(model.NETWORK, "The model server cannot be reached.")


def too_large() -> ModelError:
    """Return the error for an answer that does not fit; asking again would give the like."""
    return ModelError(
        reason=model.STREAM_TOO_LARGE,
        failure_class=FailureClass.PROVIDER,
        retryable=False,
        message="The model server's answer is too large.",
    )


def headers_timeout(seconds: float) -> ModelError:
    """Return the error for a server that does not begin to answer."""
    return _provider(model.HEADERS_TIMEOUT, f"The model server did not answer within {seconds:g} s.")


def idle_timeout(seconds: float) -> ModelError:
    """Return the error for a stream that fell silent."""
    return _provider(model.IDLE_TIMEOUT, f"The model server was silent for {seconds:g} s.")


def round_timeout() -> ModelError:
    """Return the error for an answer that took all that the round had left."""
    return ModelError(
        reason=model.ROUND_TIMEOUT,
        failure_class=FailureClass.LIMIT,
        retryable=False,
        message="The round took longer than it may.",
    )


def content_filter() -> ModelError:
    """Return the error for an answer that the server withheld."""
    return ModelError(
        reason=model.CONTENT_FILTER,
        failure_class=FailureClass.CONTENT_FILTER,
        retryable=False,
        message="The model server withheld the answer (content filter).",
    )


def retry_after_seconds(headers: Mapping[str, str], *, now: float) -> float | None:
    """Return how long a response asks to wait: Retry-After in seconds or as a date (RFC 9110, 10.2.3).

    `now` is the time of day in seconds since 1970. None where the header is
    absent or no such thing.
    """
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except ValueError:
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _provider(reason: str, message: str) -> ModelError:
    return ModelError(reason=reason, failure_class=FailureClass.PROVIDER, retryable=True, message=message)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _with(detail: str) -> str:
    """Return ": detail" on one line, cut to what a person reads; the caller ends the sentence."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in detail).split())
    if len(line) > _DETAIL_CHARACTERS_MAX:
        line = line[:_DETAIL_CHARACTERS_MAX] + "..."
    return f": {line.rstrip('.')}" if line else ""
