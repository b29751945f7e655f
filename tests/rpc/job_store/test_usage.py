"""What agents have used, counted in the transaction that writes it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

from pawl.chassis.ids import StoreId
from pawl.errors import InvalidField
from pawl.event.v1 import agent_pb2, run_pb2, waiting_pb2
from pawl.job.v1 import agents_pb2 as pb
from pawl.job.v1.agents_pb2_grpc import AgentLedgerServiceStub
from pawl.job_store.adapters.retention import PostgresRetention
from pawl.job_store.adapters.usage import PostgresUsage
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.user import User


def budget(tokens: int) -> pb.PutAgentRequest:
    return pb.PutAgentRequest(
        store_id="acme", user_id="root", definition=agent_pb2.AgentDefinition(name="clerk", daily_tokens_max=tokens)
    )


async def used(replica: Replica, name: str = "clerk", days: int = 30) -> list[agent_pb2.AgentUsage]:
    return list(
        (
            await AgentLedgerServiceStub(replica.channel).GetAgentUsage(
                pb.GetAgentUsageRequest(store_id="acme", name=name, days=days)
            )
        ).days
    )


async def test_runs_and_tokens_of_all_users_are_counted_by_agent(replica: Replica) -> None:
    ann, bob = User(replica.stub), User(replica.stub, user_id="bob")
    owners = [
        await ann.start(agent={"name": "clerk", "version": 1}),
        await bob.start(agent={"name": "clerk", "version": 1}),
        await ann.start(),
    ]
    for owner in owners:
        await owner.commit(usage=run_pb2.Usage(input_tokens=100, output_tokens=9, model_calls=1))
        # An answer that was estimated while it was written, and is counted now.
        step = await owner.commit(usage=run_pb2.Usage(input_tokens=80, output_tokens=5, model_calls=1))
        await owner.commit(usage=run_pb2.Usage(input_tokens=180, output_tokens=15, model_calls=2))
        assert step.last_seq >= 0
    (today,) = await used(replica)
    assert (today.runs, today.users) == (2, 2)
    assert today.usage == run_pb2.Usage(input_tokens=360, output_tokens=30, model_calls=4)
    (of_default,) = await used(replica, "default")
    assert (of_default.runs, of_default.usage.input_tokens) == (1, 180)
    assert not await used(replica, "other")
    assert not list(await PostgresUsage(replica.database).of_agent(StoreId("beta"), "clerk", days=30))


async def test_nothing_is_counted_twice_or_lost_between_replicas(start: StartReplica) -> None:
    one, two = await start(), await start()
    users = [User(replica.stub, user_id=f"u{number}") for number, replica in enumerate([one, two] * 8)]
    started = await asyncio.gather(*(user.submit(agent={"name": "clerk", "version": 1}) for user in users))
    claimed = {run.run_id: run.epoch for run in await users[0].claim(runs_max=16)}
    owners = [user.owner(each.run.run_id, claimed[each.run.run_id]) for user, each in zip(users, started, strict=True)]

    async def drive(index: int) -> None:
        for tokens in range(1, 21):
            await owners[index].commit(usage=run_pb2.Usage(input_tokens=tokens))

    await asyncio.gather(*map(drive, range(16)))
    (today,) = await used(one)
    assert (today.runs, today.users, today.usage.input_tokens) == (16, 16, 320)


async def test_figures_stay_for_400_days(replica: Replica) -> None:
    owner = await User(replica.stub).start(agent={"name": "clerk", "version": 1})
    await owner.commit(usage=run_pb2.Usage(input_tokens=7))
    retention = PostgresRetention(replica.database)
    move = "UPDATE job_store.usage_days SET day = (now() AT TIME ZONE 'UTC')::date - $1::integer"
    await replica.database.execute(move, 399)
    assert await retention.remove_usage(rows_max=10) == 0
    assert not await used(replica, days=399)
    (day,) = await used(replica, days=400)
    assert day.usage.input_tokens == 7
    await replica.database.execute(move, 400)
    assert await retention.remove_usage(rows_max=10) > 0
    assert not await replica.database.fetch("SELECT FROM job_store.usage_days")


async def test_what_is_used_of_a_budget_counts_from_the_beginning_of_the_day(replica: Replica) -> None:
    agents = AgentLedgerServiceStub(replica.channel)

    async def quota(name: str = "clerk") -> tuple[int, int]:
        found = await agents.GetAgentQuota(pb.GetAgentQuotaRequest(store_id="acme", name=name))
        assert 0 < found.day_end_time.ToDatetime(tzinfo=UTC).timestamp() - time.time() <= 86_400
        return found.tokens_max, found.tokens_used

    assert await quota() == (0, 0)
    await agents.PutAgent(budget(100))
    owner = await User(replica.stub).start(agent={"name": "clerk", "version": 1})
    await owner.commit(usage=run_pb2.Usage(input_tokens=90, cached_input_tokens=50, output_tokens=9))
    assert await quota() == (100, 99)
    assert await quota("other") == (0, 0)
    await replica.database.execute("UPDATE job_store.usage_days SET day = day - 1")
    assert await quota() == (100, 0)


async def test_runs_that_wait_for_a_budget_look_again_once_it_is_another_one(replica: Replica) -> None:
    agents, user = AgentLedgerServiceStub(replica.channel), User(replica.stub)
    await agents.PutAgent(budget(1))
    waiting = await user.start(agent={"name": "clerk", "version": 1})
    of_another = await user.start(agent={"name": "other", "version": 1})
    for owner in (waiting, of_another):
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        await owner.park(run_pb2.WAIT_KIND_AGENT_QUOTA, wake_time=tomorrow)
    assert (await user.run(waiting.run_id)).waiting.reason == waiting_pb2.WAIT_REASON_AGENT_QUOTA
    await agents.PutAgent(budget(1))
    assert not await user.claim(), "nothing is new"
    await agents.PutAgent(budget(2))
    assert [run.run_id for run in await user.claim(runs_max=2)] == [waiting.run_id]


@pytest.mark.parametrize("field", ["input_tokens", "cached_input_tokens", "reasoning_tokens", "estimated_tokens"])
async def test_more_than_can_be_counted_is_refused(replica: Replica, field: str) -> None:
    owner = await User(replica.stub).start()
    with pytest.raises(InvalidField):
        await owner.commit(usage=run_pb2.Usage(**{field: 2**53 + 1}))
