"""Reads tool results as a model would: what came out, or why not. The text of results is free, so this is a guess."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_TELLING = ("result", "answer", "text", "time", "message")
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
    """Return the id of the job that continues the call, if the result says so; else an empty text."""
    value = _field(content, "result") or _parse(content or "")
    return str(value.get("job_id", "")) if isinstance(value, dict) else ""


def told(notice: Mapping[str, Any]) -> str:
    """Return the words for a notice of a job."""
    job = f"The job {notice.get('job_id')} ({notice.get('tool')})"
    said = notice.get("error") or describe(json.dumps(notice["result"]) if "result" in notice else None)
    if "iteration" in notice:
        return f"{job}, iteration {notice['iteration']}: {said}."
    return f"{job} has ended, {str(notice.get('state')).lower()}: {said}."


def note(content: str | None) -> str:
    """Return what came along with the result, in brackets: that a reviewer edited the call, for example."""
    text = _field(content, "note")
    return f" ({text})" if text else ""


def failure(content: str | None) -> str | None:
    """Return why the call failed, if the result says that it did."""
    error = _field(content, "error")
    if isinstance(error, dict):
        error = error.get("message", error)
    return None if error is None else str(error)[:_TEXT_MAX]


def _field(content: str | None, name: str) -> Any:
    value = _parse(content or "")
    return value.get(name) if isinstance(value, dict) else None


def _parse(content: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content
