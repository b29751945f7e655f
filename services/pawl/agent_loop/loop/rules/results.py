"""The words to the model about the results of one round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pawl.agent_loop.loop.rules import text
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.chassis.ids import CallId


def contents(calls: Sequence[Call], bytes_max: int) -> tuple[str, ...]:
    """Return the content of the tool message of each call, in order.

    A result is the JSON that the call returned; an error is an object with
    `error`; a note goes along as `note`. Together they have at most `bytes_max`
    bytes: the largest are cut, each with a remark that says so and how to read
    the rest.
    """
    whole = [_content(call.result) if call.result else b"null" for call in calls]
    return tuple(
        data.decode(errors="replace") if len(data) <= room else _cut(data, room, call.call_id)
        for call, data, room in zip(calls, whole, _rooms([len(data) for data in whole], bytes_max), strict=True)
    )


def _content(result: CallResult) -> bytes:
    if not result.is_error and not result.note:
        return result.content_json
    content = _parsed(result.content_json)
    value: dict[str, Any] = {"error": content} if result.is_error else {"result": content}
    if result.is_error:
        if isinstance(content, dict) and "error" in content:
            value = content
        value = {**value, "reason": result.error_reason or "TOOL_ERROR"}
    if result.note:
        value = {**value, "note": result.note}
    return msgspec.json.encode(value)


def _parsed(content_json: bytes) -> Any:
    try:
        return msgspec.json.decode(content_json)
    except msgspec.DecodeError:
        return content_json.decode(errors="replace")


def _rooms(sizes: Sequence[int], bytes_max: int) -> list[int]:
    """Return how many bytes each may have: small ones stay whole, large ones share the rest evenly."""
    rooms = [0] * len(sizes)
    left, ascending = bytes_max, sorted(range(len(sizes)), key=sizes.__getitem__)
    for done, position in enumerate(ascending):
        rooms[position] = min(sizes[position], left // (len(sizes) - done))
        left -= rooms[position]
    return rooms


def _cut(data: bytes, room: int, call_id: CallId) -> str:
    return (
        f"{text.cut_bytes(data, room)}\n"
        f"[This result was cut: the first {room} of {len(data)} bytes are shown. "
        f'To read the rest, call read_result with call_id "{call_id}" and offset {room}.]'
    )
