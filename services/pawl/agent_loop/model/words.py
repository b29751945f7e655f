"""A model server's own words about what went wrong, in whatever shape it says them."""

from __future__ import annotations

import html
import re
from typing import Any, Final

import msgspec

READ_BYTES_MAX: Final = 16 * 1024
"""Bytes of a body, and characters of what it says, that are looked at."""

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
    """Return what an error says to people; empty if nothing is found.

    Understood are text, `{"error": {"message": text}}`, `{"error": text}`, `{"detail": text}`,
    `{"detail": [{"msg": text}]}`, `{"message": text}`, and these inside each other and in lists.
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
    """Return the error that the body of a response holds: its JSON, or what HTML or plain text says to people."""
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
    """Return the HTTP status that a reported error stands for, by its code and never by its text; None if none."""
    return next((status for code in codes(error) if (status := _status(code)) is not None), None)


def codes(error: Any) -> tuple[Any, ...]:
    """Return the codes of a reported error, the innermost first."""
    inner = error.get("error") if isinstance(error, dict) else None
    return tuple(one.get(key) for one in (inner, error) if isinstance(one, dict) for key in _CODES)


def _status(code: Any) -> int | None:
    if isinstance(code, str):
        code = int(code) if re.fullmatch(r"[1-5]\d\d", code, re.ASCII) else _STATUS_OF_CODE.get(code.lower())
    return code if type(code) is int and 400 <= code < 600 else None  # noqa: PLR2004  # 4xx and 5xx


def on_one_line(words: str) -> str:
    """Return ": words" as one line of what a person reads; the caller ends the sentence. Nothing of nothing."""
    seen = words[:READ_BYTES_MAX]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in seen).split())
    if len(line) > _CHARACTERS_MAX:
        line = line[:_CHARACTERS_MAX] + "..."
    return f": {line.rstrip('.')}" if line else ""
