"""Generated titles: one worker at a time claims a title, attempts are limited, and a user's title takes precedence."""

from __future__ import annotations

import asyncio
from datetime import UTC
from typing import Any

from pawl.agent.v1 import usage_pb2
from pawl.event.v1 import message_pb2, run_pb2
from pawl.job.v1 import agents_pb2, titles_pb2
from pawl.job.v1.agents_pb2_grpc import AgentLedgerServiceStub
from pawl.job.v1.titles_pb2_grpc import TitleServiceStub
from pawl.job_store.store_settings.rules import Layer, Settings
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.test_agents import budget
from tests.rpc.job_store.test_conversations import get, index_all, listed, update
from tests.rpc.job_store.test_erasures import erase
from tests.rpc.job_store.test_settings import DEPLOYMENT
from tests.rpc.job_store.user import Owner, User


async def titled(user: User, question: str = "How warm is it?", **fields: Any) -> str:
    return await answer_run(user, await user.start(question, **fields))


async def answer_run(user: User, owner: Owner) -> str:
    await owner.commit(
        messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="12 degrees.", model="steady")]
    )
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED, asks_title=True)
    return owner.conversation_id


async def claim_titles(replica: Replica, titles_max: int = 4) -> list[titles_pb2.TitleTask]:
    return list(
        (
            await TitleServiceStub(replica.channel).ClaimTitles(titles_pb2.ClaimTitlesRequest(titles_max=titles_max))
        ).tasks
    )


async def bring_title(replica: Replica, task: titles_pb2.TitleTask, text: str, **used: int) -> None:
    await TitleServiceStub(replica.channel).SetTitle(
        titles_pb2.SetTitleRequest(
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
    conversation_id = await titled(user, agent={"name": "clerk", "version": 1})
    assert (await get(user, conversation_id=conversation_id)).title == "How warm is it?"
    given = await asyncio.gather(*(claim_titles(replica) for replica in (one, two) * 3))
    (task,) = [task for tasks in given for task in tasks]
    assert (task.attempt, task.model, task.user_text, task.answer_text) == (
        1,
        "steady",
        "How warm is it?",
        "12 degrees.",
    )
    await bring_title(two, task, '"Warmth in Oslo"', input_tokens=30, output_tokens=4, model_calls=1)
    found = await get(user, conversation_id=conversation_id)
    assert (found.title, found.has_own_title) == ("Warmth in Oslo", False)
    (row,) = (await user.ask("GetUsage", by=[usage_pb2.USAGE_DIMENSION_MODEL])).rows
    assert (row.model, row.figures.usage.input_tokens, row.figures.usage.output_tokens) == ("steady", 30, 4)
    await titled(user, "And tomorrow?", conversation_id=conversation_id)
    await pass_time(one)
    assert not await claim_titles(one)


async def test_a_later_message_does_not_provide_the_title_of_an_answered_conversation(
    replica: Replica, user: User
) -> None:
    began = await user.start("Plan the trip to Oslo")
    await began.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await titled(user, "Thanks!", conversation_id=began.conversation_id)
    assert not await claim_titles(replica)
    assert await replica.database.fetchval("SELECT title_at FROM job_store.conversations") is None


async def test_the_title_comes_from_the_next_run_if_the_first_run_failed(replica: Replica, user: User) -> None:
    failed = await user.start("Plan the trip to Oslo")
    await failed.commit(
        state=run_pb2.RUN_STATE_FAILED,
        failure=run_pb2.RunFailure(failure_class=run_pb2.FAILURE_CLASS_PROVIDER, reason="PROVIDER_REFUSED"),
    )
    await titled(user, "Once more: the trip to Oslo", conversation_id=failed.conversation_id)
    (task,) = await claim_titles(replica)
    assert task.user_text == "Once more: the trip to Oslo"


async def test_no_title_is_requested_while_the_agent_budget_is_exhausted(replica: Replica, user: User) -> None:
    agents = AgentLedgerServiceStub(replica.channel)
    await agents.PutAgent(budget(100))
    owner = await user.start(agent={"name": "clerk", "version": 1})
    await owner.commit(usage=run_pb2.Usage(input_tokens=100))
    await answer_run(user, owner)
    assert not await claim_titles(replica)
    title_at = await replica.database.fetchval("SELECT title_at FROM job_store.conversations")
    asked = agents_pb2.GetModelTermsRequest(store_id="acme", user_id="ann", name="clerk")
    (used_up,) = (await agents.GetModelTerms(asked)).budgets
    assert title_at == used_up.end_time.ToDatetime(tzinfo=UTC)
    await agents.PutAgent(budget(200))
    await pass_time(replica)
    (task,) = await claim_titles(replica)
    assert task.attempt == 1


async def test_no_title_is_requested_from_a_model_that_the_store_may_no_longer_use(
    replica: Replica, user: User
) -> None:
    for version, allowed in enumerate((("small",), ("small", "steady"))):
        settings = Settings(layer=Layer.DEPLOYMENT, models=allowed, version=version)
        await replica.settings.update(DEPLOYMENT, settings, (), only_check=False)
        await titled(user)
        assert [task.model for task in await claim_titles(replica)] == ["steady"] * version


async def test_user_title_is_kept(replica: Replica, user: User) -> None:
    conversation_id = await titled(user)
    (task,) = await claim_titles(replica)
    await update(user, conversation_id, title="Mine")
    await bring_title(replica, task, "Warmth in Oslo")
    await index_all(replica.database)
    assert (await get(user, conversation_id=conversation_id)).title == "Mine"
    assert not await listed(user, query="warmth")
    await update(user, conversation_id, title="")
    await index_all(replica.database)
    assert (await get(user, conversation_id=conversation_id)).title == "Warmth in Oslo"
    assert await listed(user, query="warmth") == [conversation_id]
    named = await titled(user, conversation_id=(await named_conversation(user)))
    await pass_time(replica)
    assert not await claim_titles(replica), f"{named} has a title of its user's"


async def named_conversation(user: User) -> str:
    owner = await user.talk("Name me.")
    await update(user, owner.conversation_id, title="Named")
    return owner.conversation_id


async def test_title_generation_survives_a_dead_worker_and_stops_after_three_model_failures(
    replica: Replica, user: User
) -> None:
    conversation_id = await titled(user)
    (died,) = await claim_titles(replica)
    assert not await claim_titles(replica), "it is leased for two minutes"
    await pass_time(replica)
    (failed,) = await claim_titles(replica)
    await bring_title(replica, died, "Too late")
    assert (await get(user, conversation_id=conversation_id)).title == "How warm is it?"
    await bring_title(replica, failed, "")
    assert not await claim_titles(replica), "a minute later"
    await pass_time(replica)
    (last,) = await claim_titles(replica)
    assert [died.attempt, failed.attempt, last.attempt] == [1, 2, 3]
    await pass_time(replica)
    for _ in range(2):
        assert not await claim_titles(replica)
    assert await replica.database.fetchval("SELECT title_at FROM job_store.conversations") is None


async def test_an_erased_conversation_does_not_keep_its_title(replica: Replica, user: User) -> None:
    waiting, given = await titled(user), await titled(user)
    kept = await titled(user)
    tasks = {task.conversation_id: task for task in await claim_titles(replica)}
    await bring_title(replica, tasks[kept], "Zanzibar")
    for conversation_id in (waiting, given, kept):
        await erase(replica, conversation_id)
    await bring_title(replica, tasks[given], "Zanzibar")
    await pass_time(replica)
    assert not await claim_titles(replica)
    rows = await replica.database.fetch("SELECT model_title, title_at, title_run_id FROM job_store.conversations")
    assert {tuple(row) for row in rows} == {("", None, "")}


async def test_unreadable_message_does_not_delay_other_titles(replica: Replica, user: User) -> None:
    broken, good = await titled(user, "one"), await titled(user, "two")
    await replica.database.execute("UPDATE job_store.messages SET body = 'x' WHERE conversation_id = $1", broken)
    assert [task.conversation_id for task in await claim_titles(replica)] == [good]
    await index_all(replica.database)
    assert await listed(user, query="two") == [good]
