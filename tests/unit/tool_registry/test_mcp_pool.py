"""Connections to MCP servers: how many a user and a store may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pawl.chassis.ids import StoreId, UserId
from pawl.tool_registry.adapters.mcp.pool import SESSIONS_MAX, SESSIONS_OF_USER_MAX, crowd

A = StoreId("a")


@dataclass(eq=False)
class Connection:
    owner: str | None = None
    is_open: bool = True


def fill(sessions: list[tuple[StoreId, Any]], store_id: StoreId) -> int:
    """Open as many connections of a store as may be; returns how many."""
    opened = 0
    while crowd(sessions, store_id, None) is None:
        sessions.append((store_id, Connection()))
        opened += 1
    return opened


def test_each_store_has_half_of_what_the_others_leave() -> None:
    sessions: list[tuple[StoreId, Any]] = []
    assert [fill(sessions, StoreId(store)) for store in "abcdefgh"] == [100, 50, 25, 12, 6, 3, 2, 1]
    full = crowd(sessions, A, None)
    assert full is not None
    ending, limit = full
    assert set(ending) == {one for store, one in sessions if store == "a"}, "room for a store is made by the store"
    assert "of this store are in use" in limit


def test_no_more_are_open_than_a_replica_can_have() -> None:
    sessions: list[tuple[StoreId, Any]] = [(A, Connection(is_open=False))] * SESSIONS_MAX  # They take no room.
    taken = [fill(sessions, StoreId(f"store-{number}")) for number in range(SESSIONS_MAX + 10)]
    assert sum(taken) == SESSIONS_MAX
    full = crowd(sessions, StoreId("new"), None)
    assert full is not None
    assert len(full[0]) == SESSIONS_MAX, "any that is idle makes room"


def test_a_user_has_fewer_connections_than_the_store() -> None:
    mine: Sequence[Any] = [Connection(owner="ann") for _ in range(SESSIONS_OF_USER_MAX)]
    sessions = [(A, one) for one in mine]
    assert crowd(sessions, A, UserId("ann")) == (
        mine,
        f"{SESSIONS_OF_USER_MAX} connections of this user are in use here, which is the limit",
    )
    assert crowd(sessions, A, UserId("bob")) is None
    assert crowd(sessions, StoreId("b"), UserId("ann")) is None
