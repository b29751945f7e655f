"""Generated titles: one worker at a time claims a title, attempts are limited, and a user's title takes precedence."""

from __future__ import annotations

import asyncio
from datetime import UTC
from typing import Any

from pawl.agent.v1 import usage_pb2
from pawl.event.v1 import message_pb2, run_pb2
from pawl.job.v1 import agents_pb2
from pawl.job.v1 import titles_pb2 as pb
from pawl.job.v1.agents_pb2_grpc import AgentLedgerServiceStub
from pawl.job.v1.titles_pb2_grpc import TitleServiceStub
from pawl.job_store.store_settings.rules import Layer, Settings
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.test_agents import budget
from tests.rpc.job_store.test_conversations import get, index_all, listed, update
from tests.rpc.job_store.test_erasures import erase
from tests.rpc.job_store.test_settings import DEPLOYMENT
from tests.rpc.job_store.user import Owner, User


async def answered(user: User, question: str = "How warm is it?", **fields: Any) -> str:
    return await answer(user, await user.start(question, **fields))


async def answer(user: User, owner: Owner) -> str:
    await owner.commit(
        messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="12 degrees.", model="steady")]
    )
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED, asks_title=True)
    return (await user.run(owner.run_id)).conversation_id


async def claim(replica: Replica, titles_max: int = 4) -> list[pb.TitleTask]:
    return list(
        (await TitleServiceStub(replica.channel).ClaimTitles(pb.ClaimTitlesRequest(titles_max=titles_max))).tasks
    )


async def bring(replica: Replica, task: pb.TitleTask, text: str, **used: int) -> None:
    await TitleServiceStub(replica.channel).SetTitle(
        pb.SetTitleRequest(
            store_id=task.store_id,
            conversation_id=task.conversation_id,
            attempt=task.attempt,
            text=text,
            usage=run_pb2.Usage(**used),
            model=task.model,
        )
    )


async def pass_time(replica: Replica) -> None:
    await replica.database.execute("UPDATE job_store.conversations SET title_at = now() WHERE title_at IS NOT NULL")


async def test_title_is_generated_once_by_one_of_several_workers(start: StartReplica) -> None:
    one, two = await start(), await start()
    user = User(one.stub)
    conversation_id = await answered(user, agent={"name": "clerk", "version": 1})
    assert (await get(user, conversation_id=conversation_id)).title == "How warm is it?"
    given = await asyncio.gather(*(claim(replica) for replica in (one, two) * 3))
    (task,) = [task for tasks in given for task in tasks]
    assert (task.attempt, task.model, task.user_text, task.answer_text) == (
        1,
        "steady",
        "How warm is it?",
        "12 degrees.",
    )
    await bring(two, task, '"Warmth in Oslo"', input_tokens=30, output_tokens=4, model_calls=1)
    found = await get(user, conversation_id=conversation_id)
    assert (found.title, found.has_own_title) == ("Warmth in Oslo", False)
    (row,) = (await user.ask("GetUsage", by=[usage_pb2.USAGE_DIMENSION_MODEL])).rows
    used = (row.model, row.figures.usage.input_tokens, row.figures.usage.output_tokens)
    assert used == ("steady", 30, 4)
    await answered(user, "And tomorrow?", conversation_id=conversation_id)
    await pass_time(one)
    assert not await claim(one)


async def test_a_later_message_does_not_provide_the_title_of_an_answered_conversation(
    replica: Replica, user: User
) -> None:
    began = await user.start("Plan the trip to Oslo")
    conversation_id = (await user.run(began.run_id)).conversation_id
    await began.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await answered(user, "Thanks!", conversation_id=conversation_id)
    assert not await claim(replica)
    assert await replica.database.fetchval("SELECT title_at FROM job_store.conversations") is None


async def test_the_title_comes_from_the_next_run_if_the_first_run_failed(replica: Replica, user: User) -> None:
    failed = await user.start("Plan the trip to Oslo")
    conversation_id = (await user.run(failed.run_id)).conversation_id
    await failed.commit(
        state=run_pb2.RUN_STATE_FAILED,
        failure=run_pb2.RunFailure(failure_class=run_pb2.FAILURE_CLASS_PROVIDER, reason="PROVIDER_REFUSED"),
    )
    await answered(user, "Once more: the trip to Oslo", conversation_id=conversation_id)
    (task,) = await claim(replica)
    assert task.user_text == "Once more: the trip to Oslo"


async def test_no_title_is_requested_while_the_agent_budget_is_exhausted(replica: Replica, user: User) -> None:
    agents = AgentLedgerServiceStub(replica.channel)
    await agents.PutAgent(budget(100))
    owner = await user.start(agent={"name": "clerk", "version": 1})
    await owner.commit(usage=run_pb2.Usage(input_tokens=100))
    await answer(user, owner)
    assert not await claim(replica)
    title_at = await replica.database.fetchval("SELECT title_at FROM job_store.conversations")
    asked = agents_pb2.GetModelTermsRequest(store_id="acme", user_id="ann", name="clerk")
    (used_up,) = (await agents.GetModelTerms(asked)).budgets
    assert title_at == used_up.end_time.ToDatetime(tzinfo=UTC)
    await agents.PutAgent(budget(200))
    await pass_time(replica)
    (task,) = await claim(replica)
    assert task.attempt == 1


async def test_no_title_is_requested_from_a_model_that_the_store_may_no_longer_use(
    replica: Replica, user: User
) -> None:
    for version, allowed in enumerate((("small",), ("small", "steady"))):
        settings = Settings(layer=Layer.DEPLOYMENT, models=allowed, version=version)
        await replica.settings.update(DEPLOYMENT, settings, (), only_check=False)
        await answered(user)
        assert [task.model for task in await claim(replica)] == ["steady"] * version


async def test_user_title_is_kept(replica: Replica, user: User) -> None:
    conversation_id = await answered(user)
    (task,) = await claim(replica)
    await update(user, conversation_id, title="Mine")
    await bring(replica, task, "Warmth in Oslo")
    await index_all(replica.database)
    assert (await get(user, conversation_id=conversation_id)).title == "Mine"
    assert not await listed(user, query="warmth")
    await update(user, conversation_id, title="")
    await index_all(replica.database)
    assert (await get(user, conversation_id=conversation_id)).title == "Warmth in Oslo"
    assert await listed(user, query="warmth") == [conversation_id]
    named = await answered(user, conversation_id=(await named_conversation(user)))
    await pass_time(replica)
    assert not await claim(replica), f"{named} has a title of its user's"


async def named_conversation(user: User) -> str:
    owner = await user.start("Name me.")
    conversation_id = (await user.run(owner.run_id)).conversation_id
    await update(user, conversation_id, title="Named")
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    return conversation_id


async def test_title_generation_survives_a_dead_worker_and_stops_after_three_model_failures(
    replica: Replica, user: User
) -> None:
    conversation_id = await answered(user)
    (died,) = await claim(replica)
    assert not await claim(replica), "it is leased for two minutes"
    await pass_time(replica)
    (failed,) = await claim(replica)
    await bring(replica, died, "Too late")
    assert (await get(user, conversation_id=conversation_id)).title == "How warm is it?"
    await bring(replica, failed, "")
    assert not await claim(replica), "a minute later"
    await pass_time(replica)
    (last,) = await claim(replica)
    assert [died.attempt, failed.attempt, last.attempt] == [1, 2, 3]
    await pass_time(replica)
    for _ in range(2):
        assert not await claim(replica)
    assert await replica.database.fetchval("SELECT title_at FROM job_store.conversations") is None


async def test_an_erased_conversation_does_not_keep_its_title(replica: Replica, user: User) -> None:
    waiting, given = await answered(user), await answered(user)
    kept = await answered(user)
    tasks = {task.conversation_id: task for task in await claim(replica)}
    await bring(replica, tasks[kept], "Zanzibar")
    for conversation_id in (waiting, given, kept):
        await erase(replica, conversation_id)
    await bring(replica, tasks[given], "Zanzibar")
    await pass_time(replica)
    assert not await claim(replica)
    rows = await replica.database.fetch("SELECT model_title, title_at, title_run_id FROM job_store.conversations")
    assert {tuple(row) for row in rows} == {("", None, "")}


async def test_unreadable_message_does_not_delay_other_titles(replica: Replica, user: User) -> None:
    broken, good = await answered(user, "one"), await answered(user, "two")
    await replica.database.execute("UPDATE job_store.messages SET body = 'x' WHERE conversation_id = $1", broken)
    assert [task.conversation_id for task in await claim(replica)] == [good]
    await index_all(replica.database)
    assert await listed(user, query="two") == [good]
