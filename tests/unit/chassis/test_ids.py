from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable

import pytest

from pawl.agent_loop.adapters.public_ledger import PublicLedgerClient
from pawl.agent_loop.app.public_values import ClientSession
from pawl.chassis.auth import Principal
from pawl.chassis.ids import (
    CallId,
    CallKey,
    ClientId,
    ConversationId,
    IdSource,
    RunId,
    RunKey,
    StoreId,
    check_id,
    is_id,
)
from pawl.errors import InvalidId
from pawl.tool_registry.domain.workers import WorkerKey
from tests.fakes.manual_clock import ManualClock

ReadsRun = Callable[[PublicLedgerClient, Principal, RunId], Awaitable[object]]


@pytest.mark.parametrize("value", ["a", "A-Z_09", "x" * 64])
def test_an_id_is_returned_as_it_is(value: str) -> None:
    assert check_id(value, "run_id") == value


@pytest.mark.parametrize("value", ["", "x" * 65, "a.b", "a b", "a\n", "é", "a/b", "*", ">", "a\0"])
def test_what_could_mean_something_in_a_subject_path_or_key_is_no_id(value: str) -> None:
    with pytest.raises(InvalidId) as caught:
        check_id(value, "run_id")
    assert caught.value.metadata == {"field": "run_id"}


def test_only_an_id_that_is_optional_may_be_empty() -> None:
    assert check_id("", "run_id", optional=True) == ""
    with pytest.raises(InvalidId):
        check_id("a.b", "run_id", optional=True)


def test_mypy_refuses_an_id_where_one_of_another_kind_is_expected() -> None:
    """It fails where a comment ignores nothing, so `make check` fails once it refuses one of these no more."""
    store = StoreId("store")
    conversation: ConversationId = RunId("run")  # type: ignore[assignment]
    by_mistake: RunKey = CallKey(store, CallId("call"))  # type: ignore[assignment]
    checked: CallId = check_id("run", "run_id")  # type: ignore[assignment]
    assert RunKey(store, CallId("call")).run_id == "call"  # type: ignore[arg-type]
    assert WorkerKey(store, "group", CallId("call")).worker_id == "call"  # type: ignore[arg-type]
    caller = Principal(store_id=store, user_id=store)  # type: ignore[arg-type]
    client = ClientSession(client_id=ClientId("tab"), session_id=ClientId("tab"))  # type: ignore[arg-type]
    reads_a_call: ReadsRun = PublicLedgerClient.get_call  # type: ignore[assignment]
    assert reads_a_call.__name__ == "get_call"
    assert (conversation, checked, caller.user_id, client.session_id) == ("run", "run", "store", "tab")
    assert by_mistake != RunKey(store, RunId("call")), "nor are keys of two kinds the same at run time"


def test_a_new_id_is_a_prefix_and_26_digits(ids: IdSource) -> None:
    new = ids.new("run")
    assert re.fullmatch(r"run_[0-9a-hjkmnp-tv-z]{26}", new)
    assert is_id(new)


async def test_ids_sort_in_the_order_they_were_made(ids: IdSource, clock: ManualClock) -> None:
    made = []
    for step in (0, 0, 0.0005, 0.001, 5, 0, -3, 0, 3600):
        if step > 0:
            await clock.advance(step)
        else:
            clock.step_back(-step)
        made.append(ids.new("evt"))
    assert made == sorted(set(made))


def test_the_same_clock_and_randomness_give_the_same_ids(clock: ManualClock) -> None:
    one, other = (IdSource(clock, random.Random(7).getrandbits) for _ in range(2))
    assert [one.new("a") for _ in range(5)] == [other.new("a") for _ in range(5)]


def test_two_sources_do_not_meet(clock: ManualClock) -> None:
    one, other = IdSource(clock), IdSource(clock)
    assert not {one.new("a") for _ in range(100)} & {other.new("a") for _ in range(100)}
