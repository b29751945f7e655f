"""Reads tool results as a model would: what came out, or why not. The text of results is free, so this is a guess."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_BAD = ("error", "failed", "rejected", "denied", "expired", "cancelled", "outcome_unknown")
_FAILURE = re.compile(
    r"\s*\W*(?:error\b|failed\b|rejected\b|denied\b|expired\b|cancelled\b|the user (?:rejected|denied)|unknown tool\b)",
    re.IGNORECASE,
)
_TELLING = ("result", "value", "answer", "text", "time", "iso", "message")
_TEXT_MAX = 2_000


def describe(content: str | None) -> str:
    """A result in a few words."""
    if content is None:
        return "nothing yet"
    value = _parse(content)
    for _ in range(2):
        if isinstance(value, dict):
            value = next((value[key] for key in _TELLING if value.get(key) is not None), value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:_TEXT_MAX]


def job_id(content: str | None) -> str:
    """Return the id of the job that goes on with the call, if the result says so; else an empty text."""
    value = _parse(content or "")
    for _ in range(2):
        if isinstance(value, dict) and isinstance(value.get("job_id"), str):
            return str(value["job_id"])
        value = value.get("result") if isinstance(value, dict) else None
    return ""


def told(notice: Mapping[str, Any]) -> str:
    """Return the words for a notice of a job."""
    job = f"The job {notice.get('job_id')} ({notice.get('tool')})"
    said = notice.get("error") or describe(json.dumps(notice["result"]) if "result" in notice else None)
    if "iteration" in notice:
        return f"{job}, iteration {notice['iteration']}: {said}."
    return f"{job} has ended, {str(notice.get('state')).lower()}: {said}."


def note(content: str | None) -> str:
    """Return what came along with the result, in brackets: that a reviewer edited the call, for example."""
    value = _parse(content or "")
    text = value.get("note") if isinstance(value, dict) else None
    return f" ({text[:_TEXT_MAX]})" if isinstance(text, str) and text else ""


def failure(content: str | None) -> str | None:
    """Return why the call failed, if the result says that it did."""
    value = _parse(content or "")
    if isinstance(value, str):
        return value[:_TEXT_MAX] if _FAILURE.match(value) else None
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    state = next((str(value[key]).lower() for key in ("status", "state", "outcome") if key in value), "")
    if not error and state not in _BAD and value.get("ok") is not False and value.get("is_error") is not True:
        return None
    if isinstance(error, dict):
        error = error.get("message", error)
    if not isinstance(error, str) or not error:
        error = str(value.get("message") or value.get("reason") or json.dumps(error or value, ensure_ascii=False))
    return error[:_TEXT_MAX]


def _parse(content: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content
