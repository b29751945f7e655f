"""Faults of the model server: each request of a phase fails once, and its retry succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx2

from tests.chaos.world import World

_PHASE_SECONDS = 4.0
_TEXT = "This is an answer of some length, of which perhaps only a part will arrive."
_SLOWLY = {"chunk_delay": 0.1}
_WRONG_CALLS = [
    {"name": "read_meter", "arguments": '{"tag": "cut off'},
    {"name": "press_button", "arguments": '{"tag": 7, "seconds": "soon"}'},
    {"name": "no_such_tool", "arguments": "{}"},
]


def _fault(kind: str, **fields: Any) -> dict[str, Any]:
    return {"times": 1, "reply": {"text": _TEXT, **_SLOWLY, "fault": {"type": kind, **fields}}}


STEPS: Mapping[str, dict[str, Any]] = {
    "429": _fault("status", status=429, retry_after=1),
    "500": _fault("status", status=500, body="<html>"),
    "hang before headers": _fault("hang", after_chunks=0),
    "hang": _fault("hang", after_chunks=3),
    "reset": _fault("reset", after_chunks=3),
    "drop": _fault("drop", after_chunks=2),
    "truncate": _fault("truncate", after_chunks=3),
    "garble": _fault("garble", after_chunks=2),
    "error in stream": _fault("error_object", after_chunks=2),
    "empty stream": _fault("empty_stream"),
    "wrong calls": {"when": {"round": 0}, "reply": {"tool_calls": _WRONG_CALLS, "finish_reason": "tool_calls"}},
}


def _play(step: dict[str, Any]) -> Callable[[World], Awaitable[None]]:
    async def play(world: World) -> None:
        await _tell(world, [step])
        await asyncio.sleep(_PHASE_SECONDS)
        await _tell(world, [])

    return play


async def _tell(world: World, steps: list[dict[str, Any]]) -> None:
    base_url = (world.suite.endpoints.model_base_url or "").removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=base_url, timeout=60.0) as http:
        (await http.post("/_pawl/script", json={"steps": steps})).raise_for_status()


FAULTS: Mapping[str, Callable[[World], Awaitable[None]]] = {name: _play(step) for name, step in STEPS.items()}
