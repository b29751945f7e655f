"""Limits per minute and outages of model servers, which all agent-loop processes share (RES-3)."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from pawl.chassis.ids import StoreId
from pawl.chassis.process.clock import SystemClock
from pawl.event.v1 import run_pb2
from pawl.job.v1 import models_pb2 as pb
from pawl.job.v1.models_pb2_grpc import ModelServiceStub
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.ledger.ports import Limits
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.store_settings.rules import Layer, Settings
from pawl.job_store.store_settings.snapshot import SettingsSnapshot
from pawl.job_store.store_settings.store import PostgresSettings
from pawl.job_store.sweeps import sweep_retention
from tests.rpc.job_store.conftest import RETENTION, Replica, StartReplica, limits_of
from tests.rpc.job_store.test_settings import DEPLOYMENT
from tests.rpc.job_store.test_upkeep import DELTA
from tests.rpc.job_store.user import User

_numbers = itertools.count(1)


async def take(
    replica: Replica, store_id: str = "acme", model_call_id: str = "", **asked: Any
) -> pb.TakeModelCallResponse:
    model_call_id = model_call_id or f"call_{next(_numbers)}"
    request = pb.TakeModelCallRequest(store_id=store_id, model_server="eu", model_call_id=model_call_id, **asked)
    return await ModelServiceStub(replica.channel).TakeModelCall(request)


async def limit(replica: Replica, **limits: int) -> None:
    asked = Settings(layer=Layer.CEILING, store_id=StoreId("acme"), limits=limits)
    await replica.settings.update(DEPLOYMENT, asked, (), only_check=False)


async def test_concurrent_calls_never_exceed_the_limits_of_their_store_and_server(replica: Replica) -> None:
    """A call that one of the limits refuses counts against none of them."""
    await limit(replica, model_requests_per_minute=3)
    found = await asyncio.gather(*(take(replica, requests_per_minute=5) for _ in range(10)))
    refused = [each for each in found if each.wait_seconds]
    assert (len(refused), {each.of_server for each in refused}) == (7, {False})
    assert all(0 < each.wait_seconds <= 20 for each in refused)
    others = [await take(replica, "beta", requests_per_minute=5) for _ in range(3)]
    assert [bool(each.wait_seconds) for each in others] == [False, False, True]
    assert others[-1].of_server


async def test_a_call_of_any_size_gets_its_turn_and_later_calls_wait_for_all_its_tokens(replica: Replica) -> None:
    await limit(replica, model_tokens_per_minute=100)
    for tokens in (50, 150):
        assert not (await take(replica, tokens=tokens)).wait_seconds
    for tokens in (1, 150):
        assert 50 < (await take(replica, tokens=tokens)).wait_seconds <= 61
    assert not (await take(replica, tokens=1000, ended=True)).wait_seconds
    assert 650 < (await take(replica, tokens=1)).wait_seconds <= 661
    await asyncio.gather(*(take(replica, tokens=-200, ended=True) for _ in range(3)))
    assert 290 < (await take(replica, tokens=1)).wait_seconds <= 301
    assert not (await take(replica, "beta", tokens=1_000_000, tokens_per_minute=10)).wait_seconds
    assert 3500 < (await take(replica, "beta", tokens=10, tokens_per_minute=10)).wait_seconds <= 3600


async def test_the_tokens_of_an_ended_call_are_no_further_request(replica: Replica) -> None:
    await limit(replica, model_requests_per_minute=1)
    for _ in range(2):
        await take(replica, tokens=10, ended=True)
    assert not (await take(replica)).wait_seconds


async def test_a_repeated_request_counts_the_start_and_the_end_of_a_call_once(replica: Replica) -> None:
    await limit(replica, model_tokens_per_minute=100)
    for _ in range(3):
        assert not (await take(replica, model_call_id="c1", tokens=60)).wait_seconds
    for _ in range(3):
        await take(replica, model_call_id="c1", tokens=100, ended=True)
    assert 20 < (await take(replica, tokens=1)).wait_seconds <= 37
    await replica.database.execute("UPDATE job_store.model_calls SET expire_time = now() - interval '1 second'")
    await sweep_retention(PostgresRetention(replica.database), SystemClock(), RETENTION, limits_of)
    assert not await replica.database.fetchval("SELECT count(*) FROM job_store.model_calls")


async def test_calls_in_progress_reserve_their_tokens_in_all_budgets(replica: Replica) -> None:
    """Concurrent calls exceed a budget by at most one call, and the budget of another store or user is not affected."""
    await limit(replica, daily_tokens=100, monthly_tokens_per_user=50)

    async def reserve(user_id: str, **asked: Any) -> Any:
        values: dict[str, Any] = {"tokens": 10, "output_tokens": 15, "seconds_max": 60} | asked
        return await take(replica, user_id=user_id, **values)

    found = await asyncio.gather(*(reserve("ann", model_call_id=f"ann_{number % 8}") for number in range(16)))
    refused = [each.budget for each in found if each.HasField("budget")]
    assert {(each.kind, each.tokens_max, each.tokens_used) for each in refused} == {
        (run_pb2.WAIT_KIND_USER_MONTHLY_TOKENS, 50, 0)
    }
    open_calls = "SELECT count(*), sum(tokens) FROM job_store.model_calls WHERE NOT ended"
    assert tuple(await replica.database.fetchrow(open_calls) or ()) == (2, 50)
    samples = [each for family in replica.metrics.registry.collect() for each in family.samples]
    counted = {each.labels["limit"]: each.value for each in samples if each.name.endswith("limit_used_ratio_count")}
    assert counted.keys() == {"store_daily_tokens", "user_monthly_tokens"}, "alerts need both"
    for user_id, tokens, kind in (
        ("bob", 40, 0),
        ("eve", 40, 0),
        ("dan", 40, run_pb2.WAIT_KIND_STORE_DAILY_TOKENS),
    ):
        assert (await reserve(user_id, model_call_id=user_id, tokens=tokens, output_tokens=0)).budget.kind == kind
    assert not (await take(replica, "beta", user_id="ann", tokens=1000)).HasField("budget")
    # An ended call, a call whose process has died, and a raised limit that this replica does not know yet.
    await take(replica, model_call_id="eve", ended=True)
    assert not (await reserve("dan", tokens=40)).HasField("budget")
    assert (await reserve("ann")).HasField("budget")
    await replica.database.execute("UPDATE job_store.model_calls SET expire_time = now() WHERE user_id = 'ann'")
    assert not (await reserve("ann")).HasField("budget")
    limits = Limits(slots=SlotLimits(per_store=5, per_user=5))
    other = SettingsSnapshot(PostgresSettings(replica.database), SystemClock(), limits)
    await other.refresh()
    asked = Settings(layer=Layer.CEILING, store_id=StoreId("acme"), version=1, limits={"daily_tokens": 1000})
    await other.update(DEPLOYMENT, asked, (), only_check=False)
    assert not (await reserve("eve", tokens=100)).HasField("budget")


async def test_a_crash_of_the_database_ends_reservations_and_loses_no_counted_tokens(replica: Replica) -> None:
    await limit(replica, daily_tokens=100)
    owner = await User(replica.stub).start()
    await owner.commit(usage=run_pb2.Usage(input_tokens=60, model_calls=1), model="m")
    reserving: Any = {"user_id": "ann", "tokens": 40, "seconds_max": 3600}
    assert not (await take(replica, model_call_id="lost", **reserving)).HasField("budget")
    assert (await take(replica, **reserving)).HasField("budget")
    unlogged = "SELECT oid::regclass::text AS name FROM pg_class WHERE relkind = 'r' AND relpersistence = 'u'"
    emptied_by_recovery = [row["name"] for row in await replica.database.fetch(unlogged)]
    await replica.database.execute(f"TRUNCATE {', '.join(emptied_by_recovery)}")
    assert not (await take(replica, model_call_id="next", **reserving)).HasField("budget")
    await take(replica, model_call_id="lost", ended=True)
    refused = (await take(replica, **reserving)).budget
    assert (refused.kind, refused.tokens_used) == (run_pb2.WAIT_KIND_STORE_DAILY_TOKENS, 60)


async def test_a_store_above_its_rate_of_events_is_told_to_pause_by_all_replicas_and_loses_none(
    start: StartReplica,
) -> None:
    replicas = await start(), await start()
    await limit(replicas[0], events_per_second=1)
    await replicas[1].settings.refresh()
    owners = [await User(each.stub).start() for each in replicas]
    found = [
        (await owners[number % 2].commit(events=[DELTA] * count)).output_pause_seconds
        for number, count in enumerate((1, 30, 10, 200))
    ]
    assert (found[0], found[3]) == (0, 60)
    assert 20 < found[1] <= 30 < found[2] <= 40
    other = await User(replicas[0].stub, store_id="beta").start()
    assert not (await other.commit(events=[DELTA] * 100)).output_pause_seconds
    assert [(await each.commit()).last_seq for each in owners] == [14, 233]


async def test_a_clock_that_was_set_back_blocks_no_calls(replica: Replica) -> None:
    await limit(replica, model_requests_per_minute=1)
    assert not (await take(replica)).wait_seconds
    assert (await take(replica)).wait_seconds
    await replica.database.execute("UPDATE job_store.model_rates SET unused_time = unused_time + interval '2 hours'")
    assert not (await take(replica)).wait_seconds


async def test_one_process_makes_the_next_attempt_for_all_and_any_answer_ends_the_outage(replica: Replica) -> None:
    stub = ModelServiceStub(replica.channel)

    async def report(**asked: int) -> pb.ReportModelServerResponse:
        return await stub.ReportModelServer(pb.ReportModelServerRequest(model_server="eu", **asked))  # type: ignore[arg-type]

    assert (await report(attempts=True)).outages == 0
    await asyncio.gather(*(report(outages=1) for _ in range(10)))
    closed = await report(attempts=True)
    assert (closed.outages, closed.may_attempt, 0 < closed.closed_seconds <= 10) == (10, False, True)
    move = "UPDATE job_store.model_outages SET closed_until = closed_until + make_interval(secs => $1)"
    for seconds in (-60.0, 3600.0):  # Time has passed, or the clock was set back.
        await replica.database.execute(move, seconds)
        found = await asyncio.gather(*(report(attempts=True) for _ in range(5)))
        assert sorted(each.may_attempt for each in found) == [False] * 4 + [True]
        assert max(each.closed_seconds for each in found) <= 10, (
            "an attempt that never ends delays the next one by 10 s"
        )
    assert (await report(answered=True)).outages == 0
    assert (await report()).outages == 0
