"""Limits per minute and outages of model servers, which all agent-loop processes share (RES-3)."""

from __future__ import annotations

import asyncio

from pawl.chassis.ids import StoreId
from pawl.job.v1 import models_pb2 as pb
from pawl.job.v1.models_pb2_grpc import ModelServiceStub
from pawl.job_store.store_settings.rules import Layer, Settings
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.test_settings import DEPLOYMENT


async def take(replica: Replica, store_id: str = "acme", **asked: int) -> pb.TakeModelCallResponse:
    request = pb.TakeModelCallRequest(store_id=store_id, model_server="eu", **asked)  # type: ignore[arg-type]
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
