"""Failures of model calls, classified by status and kind of problem, never by text."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.agent_loop.model import request as model
from pawl.agent_loop.model.request import Problem
from pawl.chassis.rpc.retry import asked_seconds

# How much of a body or an error text to read.
READ_BYTES_MAX: Final = 16 * 1024

_CHARACTERS_MAX: Final = 300
_DEPTH_MAX: Final = 5
_ITEMS_MAX: Final = 3
_KEYS: Final = ("error", "message", "detail", "msg", "title", "errors", "reason")
_CODES: Final = ("code", "status", "status_code", "type")
_MARKUP: Final = re.compile(r"<[^<>]*>")
_UNSEEN: Final = re.compile(r"<(script|style)\b[^<>]*>[^<]*</\1\s*>", re.IGNORECASE)

TOO_LONG: Final = "context_length_exceeded"
_STATUS_OF_CODE: Final = {
    "invalid_api_key": 401,
    "incorrect_api_key": 401,
    "authentication_error": 401,
    "unauthenticated": 401,
    "unauthorized": 401,
    "permission_error": 403,
    "permission_denied": 403,
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "insufficient_quota": 429,
    "invalid_request_error": 400,
    TOO_LONG: 400,
}


def of_json(value: Any, depth: int = _DEPTH_MAX) -> str:
    """Return an error's human-readable message, or an empty string.

    Accepts text, `{"error": {"message": text}}`, `{"error": text}`, `{"detail": text}`, `{"detail": [{"msg": text}]}`,
    `{"message": text}`, and any of these nested or in lists.
    """
    if isinstance(value, str):
        return value
    if depth == 0:
        return ""
    if isinstance(value, list):
        return "; ".join(filter(None, (of_json(item, depth - 1) for item in value[:_ITEMS_MAX])))
    if isinstance(value, dict):
        return next(filter(None, (of_json(value.get(key), depth - 1) for key in _KEYS)), "")
    return ""


def error_of(body: str) -> Any:
    """Return the error in a response body (JSON or text) without markup. For broken JSON, the result is empty."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        written = body[:READ_BYTES_MAX].replace("\ufffd", "").strip()
    if written.startswith(("{", "[")):
        return ""
    if written.startswith("<"):
        written = html.unescape(_MARKUP.sub(" ", _UNSEEN.sub(" ", written)))
    return written


def status_of(error: Any) -> int | None:
    """Return the HTTP status that corresponds to a reported error's code, or None. Ignore the error's text."""
    return next((status for code in codes(error) if (status := _status(code)) is not None), None)


def codes(error: Any) -> tuple[Any, ...]:
    """Return the codes in a reported error, innermost first."""
    inner = error.get("error") if isinstance(error, dict) else None
    return tuple(one.get(key) for one in (inner, error) if isinstance(one, dict) for key in _CODES)


def _status(code: Any) -> int | None:
    if isinstance(code, str):
        code = int(code) if re.fullmatch(r"[1-5]\d\d", code, re.ASCII) else _STATUS_OF_CODE.get(code.lower())
    return code if type(code) is int and 400 <= code < 600 else None  # noqa: PLR2004  # 4xx and 5xx


def on_one_line(texts: str) -> str:
    """Return ": " followed by the text as one short line without a final period. Empty text stays empty."""
    seen = texts[:READ_BYTES_MAX]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in seen).split())
    if len(line) > _CHARACTERS_MAX:
        line = line[:_CHARACTERS_MAX] + "..."
    return f": {line.rstrip('.')}" if line else ""


_AUTH: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
# Statuses after which the same request may succeed later.
_LATER: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT)
# Servers refuse images with these statuses; some answer 404 if a model accepts none.
_CONTENT: Final = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)

TRUNCATED: Final = Problem(reason="STREAM_TRUNCATED", message="The model server's answer ended early.")
EMPTY: Final = Problem(reason="EMPTY_STREAM", message="The model server's answer was empty.")
# The connection could not be opened, or was lost.
NETWORK: Final = Problem(reason=model.NETWORK, message="The model server cannot be reached.")
# Not retryable: the next answer would likely be too large as well.
TOO_LARGE: Final = Problem(
    reason="STREAM_TOO_LARGE", message="The model server's answer is too large.", retryable=False
)
ROUND_TIMEOUT: Final = Problem(
    reason=model.ROUND_TIMEOUT,
    failure_class=FailureClass.LIMIT,
    retryable=False,
    message="The round exceeded its time limit.",
)
CONTENT_FILTER: Final = Problem(
    reason=model.CONTENT_FILTER,
    failure_class=FailureClass.CONTENT_FILTER,
    retryable=False,
    message="The model server withheld the answer (content filter).",
)


def http_status(status: int, *, error: Any = "", retry_after_seconds: float | None = None) -> Problem:
    """Return the problem that an error response reports. `error` is its content in any form.

    408, 409, 429 and 5xx are retryable. A code that reports an invalid credential overrides a status below 500.
    """
    if status_of(error) == HTTPStatus.UNAUTHORIZED and status < HTTPStatus.INTERNAL_SERVER_ERROR:
        status = HTTPStatus.UNAUTHORIZED
    detail = on_one_line(of_json(error))
    group, retryable, message = FailureClass.PROVIDER, False, f"The model server refused the request (HTTP {status})"
    if status in _AUTH:
        group, message = FailureClass.AUTH, f"The model server refused the credential (HTTP {status})"
        # The message about an unknown credential may repeat the credential.
        detail = detail if status == HTTPStatus.FORBIDDEN else ""
    elif status == HTTPStatus.TOO_MANY_REQUESTS:
        group, retryable, message = FailureClass.RATE, True, "The model server is at its rate limit (HTTP 429)"
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        retryable, message = True, f"The model server failed (HTTP {status})"
    elif status in _LATER:
        retryable, message = True, f"The model server could not accept the request (HTTP {status})"
    return Problem(
        reason=f"HTTP_{int(status)}",
        failure_class=group,
        retryable=retryable,
        message=f"{message}{detail}.",
        retry_after_seconds=retry_after_seconds if retryable else None,
        refuses_content=status in _CONTENT and TOO_LONG not in codes(error),
    )


def reported(error: Any) -> Problem:
    """Return the problem that an error inside a stream reports.

    A code that is or corresponds to an HTTP status counts as that status. Other errors count as server failures.
    """
    status = status_of(error)
    if status is not None:
        return http_status(status, error=error)
    detail = on_one_line(of_json(error))
    return Problem(reason="STREAM_ERROR", message=f"The model server reported an error{detail}.")


def garbled(data: bytes = b"") -> Problem:
    """Return the problem for bytes that are not a chunk. If they contain an error message, quote it."""
    detail = on_one_line(of_json(error_of(data.decode(errors="replace"))))
    return Problem(reason="STREAM_GARBLED", message=f"The model server sent data that cannot be parsed{detail}.")


def headers_timeout(seconds: float) -> Problem:
    return Problem(reason=model.HEADERS_TIMEOUT, message=f"The model server did not answer within {seconds:g} s.")


def idle_timeout(seconds: float) -> Problem:
    return Problem(reason="IDLE_TIMEOUT", message=f"The model server was silent for {seconds:g} s.")


def retry_after_seconds(headers: Mapping[str, str], *, now: float) -> float | None:
    """Return the wait that a response requests in `retry-after-ms`, or in Retry-After in seconds or as a date.

    `now` is in seconds since 1970. Return None if neither header has a valid value (RFC 9110, 10.2.3).
    """
    milliseconds = asked_seconds(headers.get("retry-after-ms", ""))
    return asked_seconds(headers.get("retry-after", ""), now=now) if milliseconds is None else milliseconds / 1000
