"""Connections to MCP servers: how many a store may have, and when the next one may be opened after a crash."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pawl.chassis.ids import StoreId
from pawl.errors import SourceUnreachable
from pawl.tool_registry.adapters.mcp.connections import SESSIONS_MAX, Connections, Line
from tests.fakes.manual_clock import ManualClock


def a_session(problem: str = "", **more: Any) -> Any:
    return SimpleNamespace(is_open=True, is_busy=True, used_at=0.0, began_at=0.0, problem=problem, **more)


def connections() -> Connections:
    nothing: Any = None
    return Connections(secrets=nothing, clock=ManualClock(), http=nothing, programs=nothing, idle_seconds=300.0)


def fill(made: Connections, store_id: StoreId) -> int:
    """Open as many connections of a store as may be; returns how many."""
    line = made.lines.setdefault((store_id, "source"), Line(made_of=(b"", ()), clock=ManualClock()))
    for opened in range(SESSIONS_MAX + 1):
        try:
            made.make_room(store_id)
        except SourceUnreachable:
            return opened
        line.sessions[f"user-{opened}"] = a_session()  # type: ignore[index]
    raise AssertionError("there is no limit")


def test_each_store_has_half_of_what_the_others_leave() -> None:
    made = connections()
    assert [fill(made, StoreId(store)) for store in "abcdefgh"] == [100, 50, 25, 12, 6, 3, 2, 1]
    assert sum(fill(made, StoreId(f"store-{number}")) for number in range(SESSIONS_MAX)) == 1
    assert len(list(made.all())) == SESSIONS_MAX


def test_a_source_that_crashes_is_tried_less_and_less_often() -> None:
    clock = ManualClock()
    line = Line(made_of=(b"", ()), clock=clock)
    pauses = []
    for _ in range(9):
        line.ended(None, a_session("it died"))
        pauses.append(line.not_before - clock.monotonic())
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    line.recover()
    assert line.not_before == 0.0
