"""Usage figures, from the ledger (RES-3)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from pawl.agent.v1 import usage_pb2 as pb
from pawl.errors import InvalidField, InvalidPageToken, PawlError, PermissionDenied
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job_store.erasure.store.retention import PostgresRetention
from tests.rpc.job_store.conftest import Replica
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
