"""Usage figures, and the limits and outages of model servers that all agent-loop processes share (RES-3)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from pawl.agent.v1 import usage_pb2 as pb
from pawl.chassis.ids import StoreId
from pawl.errors import InvalidField, InvalidPageToken, PawlError, PermissionDenied
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import models_pb2
from pawl.job.v1.models_pb2_grpc import ModelServiceStub
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.store_settings.rules import Layer, Settings
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.test_settings import DEPLOYMENT
from tests.rpc.job_store.user import Owner, User, result
from tests.rpc.refusals import raises

STORE, USER, AGENT, TOOL, MODEL = pb.UsageDimension.values()[1:]
CLERK = {"name": "clerk", "version": 1}
ENDED = call_pb2.CALL_STATE_SUCCEEDED, call_pb2.CALL_STATE_FAILED, call_pb2.CALL_STATE_CANCELLED


async def work(user: User, **fields: Any) -> Owner:
    """Start a run that uses two models, delegates, and ends calls; every step is sent twice."""
    owner = await user.start(**fields)

    async def step(commit_id: str, **more: Any) -> None:
        for _ in range(2):
            await owner.commit(commit_id, **more)

    delegated = run_pb2.Usage(input_tokens=1000)
    await step("step_1", usage=run_pb2.Usage(input_tokens=100, output_tokens=9, model_calls=1), model="large")
    # The estimate was too high.
    await step("step_2", usage=run_pb2.Usage(input_tokens=80, output_tokens=5, model_calls=1), model="large")
    calls = [owner.call(f"{owner.run_id}_{each}", call_pb2.CALL_STATE_RUNNING) for each in ENDED]
    usage = run_pb2.Usage(input_tokens=1110, output_tokens=9, model_calls=2)
    await step("step_3", usage=usage, delegated_usage=delegated, model="small", calls=calls)
    ended = [
        owner.call(call.call_id, state, result=result(is_error=state != ENDED[0]))
        for call, state in zip(calls, ENDED, strict=True)
    ]
    await step("step_4", calls=ended, round=2, state=run_pb2.RUN_STATE_COMPLETED)
    return owner


async def get(user: User, **fields: Any) -> list[pb.UsageRow]:
    """Return all rows, from pages of two."""
    return [row for page in await user.pages("GetUsage", "rows", page_size=2, **fields) for row in page]


async def test_each_start_end_call_and_token_counts_once(replica: Replica) -> None:
    """OPS-2: whoever asks, figures add up, and those of child runs count for them."""
    ann, bob, other = User(replica.stub), User(replica.stub, user_id="bob"), User(replica.stub, store_id="other")
    await work(ann, agent=CLERK)
    await work(ann)
    await work(bob, agent=CLERK)
    await work(other)
    await ann.submit()
    admin, deployment = ann.with_roles("admin"), ann.with_roles("deployment")

    (row,) = await get(admin)
    figures = row.figures
    assert (figures.runs, figures.runs_completed, figures.runs_failed, figures.rounds, figures.users) == (4, 3, 0, 6, 2)
    assert (figures.calls_succeeded, figures.calls_failed, figures.calls_refused) == (3, 3, 3)
    assert figures.usage == run_pb2.Usage(input_tokens=330, output_tokens=27, model_calls=6)
    assert figures.run_seconds > figures.call_seconds / 3 > 0
    (own,) = await get(ann)
    assert (own.figures.runs, own.figures.users) == (3, 1)
    assert [(row.store_id, row.figures.runs) for row in await get(deployment, by=[STORE])] == [
        ("acme", 4),
        ("other", 1),
    ]
    assert [(row.figures.runs, row.store_id) for row in await get(deployment, store_id="other")] == [(1, "")]
    grouped = await get(admin, by=[AGENT, USER], period=pb.USAGE_PERIOD_DAY)
    day = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert [(row.user_id, row.agent_name, row.figures.runs) for row in grouped] == [
        ("ann", "clerk", 1),
        ("ann", "default", 2),
        ("bob", "clerk", 1),
    ]
    assert {row.time.ToDatetime(UTC) for row in grouped} <= {day, day + timedelta(days=1)}
    by_model = await get(admin, by=[MODEL], agent_name="clerk", period=pb.USAGE_PERIOD_HOUR)
    used = [(row.model, row.figures.usage.input_tokens, row.figures.usage.model_calls) for row in by_model]
    assert used == [("large", 160, 2), ("small", 60, 2)]
    (by_tool,) = await get(admin, by=[TOOL], user_id="bob")
    assert (by_tool.tool_name, by_tool.figures.calls_failed, by_tool.figures.runs) == ("tool", 1, 0)
    assert await get(admin, tool_name="other") == []


async def test_requests_for_usage_that_cannot_be_answered_are_refused(replica: Replica) -> None:
    ann = User(replica.stub)
    await work(ann)
    token = (await ann.ask("GetUsage", by=[MODEL], page_size=1)).next_page_token
    rows: list[tuple[dict[str, Any], type[PawlError]]] = [
        ({"by": [TOOL, MODEL]}, InvalidField),
        ({"by": [TOOL], "model": "m"}, InvalidField),
        ({"by": [9]}, InvalidField),
        ({"period": 9}, InvalidField),
        ({"tool_name": "a\0"}, InvalidField),
        ({"to_time": datetime(2020, 1, 1, tzinfo=UTC)}, InvalidField),
        ({"page_size": 201}, InvalidField),
        ({"by": [TOOL], "page_token": token}, InvalidPageToken),
        ({"page_token": "x"}, InvalidPageToken),
        ({"store_id": "other"}, PermissionDenied),
    ]
    for fields, error in rows:
        await raises(error, ann.ask("GetUsage", **fields))


async def test_old_hours_become_days_which_are_kept_for_400_days(replica: Replica) -> None:
    ann = User(replica.stub)
    await work(ann)
    retention, database = PostgresRetention(replica.database), replica.database
    before = await get(ann, by=[MODEL])
    copy = (
        "INSERT INTO job_store.usage_hours SELECT (jsonb_populate_record(u, $1::jsonb)).* FROM job_store.usage_hours u"
    )
    await database.execute(copy, f'{{"hour": {(datetime.now(UTC).hour + 1) % 24}, "slot": 7}}')
    move = "UPDATE job_store.usage_hours SET day = (now() AT TIME ZONE 'UTC')::date - $1::integer"
    since = datetime.now(UTC) - timedelta(days=400)

    async def tokens() -> list[tuple[str, int]]:
        found = await get(ann, by=[MODEL], from_time=since, period=pb.USAGE_PERIOD_DAY)
        return [(row.model, row.figures.usage.input_tokens) for row in found]

    doubled = [(row.model, 2 * row.figures.usage.input_tokens) for row in before]
    await database.execute(move, 34)
    assert (await retention.remove_usage(rows_max=3), await tokens()) == (0, doubled)
    await database.execute(move, 35)
    while await retention.remove_usage(rows_max=3):
        assert await tokens() == doubled
    rows = await database.fetch("SELECT hour, slot FROM job_store.usage_hours GROUP BY model, tool_name, hour, slot")
    assert {tuple(row) for row in rows} == {(-1, 0)}
    await database.execute(move, 400)
    assert (await retention.remove_usage(rows_max=100), await tokens()) == (len(rows), [])


async def take(replica: Replica, store_id: str = "acme", **asked: int) -> models_pb2.TakeModelCallResponse:
    request = models_pb2.TakeModelCallRequest(store_id=store_id, model_server="eu", **asked)  # type: ignore[arg-type]
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

    async def report(**asked: int) -> models_pb2.ReportModelServerResponse:
        return await stub.ReportModelServer(models_pb2.ReportModelServerRequest(model_server="eu", **asked))  # type: ignore[arg-type]

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
    assert ((await report(answered=True)).outages, (await report()).outages) == (0, 0)
