"""Forks on PostgreSQL: their content, their continuation, and retention of the messages that they share."""

from __future__ import annotations

import asyncio
from typing import Any

from pawl.agent.v1 import agent_pb2
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.rpc.client import translating
from pawl.errors import (
    ConversationErased,
    ConversationExists,
    InvalidField,
    RequestIdReused,
    RunNotFound,
)
from pawl.event.v1 import call_pb2, conversation_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.ledger.store.upkeep import PostgresLedgerStats
from pawl.job_store.sweeps import sweep_retention
from pawl.server.db.database import Database
from tests.rpc.job_store.conftest import RETENTION, SLOTS, Replica, limits_of
from tests.rpc.job_store.test_conversations import get, index_all, listed
from tests.rpc.job_store.test_erasures import Log, erase, erasing, everything, sweep_all
from tests.rpc.job_store.user import Owner, User, result
from tests.rpc.refusals import raises


async def fork(user: User, conversation_id: str, number: int = 0, **fields: Any) -> Any:
    return (await user.ask("ForkConversation", conversation_id=conversation_id, number=number, **fields)).conversation


async def texts(user: User, conversation_id: str, page_size: int = 2) -> list[tuple[int, str]]:
    """Return the number and text of each message, read page by page."""
    pages = await user.pages("ListMessages", "messages", conversation_id=conversation_id, page_size=page_size)
    return [(message.number, message.text) for page in pages for message in page]


def model_message(
    text: str, *call_ids: str, role: Any = message_pb2.ROLE_ASSISTANT, **fields: Any
) -> message_pb2.Message:
    return message_pb2.Message(role=role, text=text, call_ids=call_ids, **fields)


def called(call_id: str, state: Any = call_pb2.CALL_STATE_PROPOSED, **fields: Any) -> call_pb2.Call:
    values: dict[str, Any] = {"round": 1} | fields
    return call_pb2.Call(call_id=call_id, tool_name="look", arguments_json=b"{}", state=state, **values)


async def ended_run(user: User, conversation_id: str, question: str, answer: str) -> str:
    return (await user.talk(question, answer, conversation_id=conversation_id)).run_id


async def searching_run(user: User, conversation_id: str) -> Owner:
    owner = await user.start("look", conversation_id=conversation_id)
    await owner.commit(messages=[model_message("", "call_1")], calls=[called("call_1")])
    await owner.commit(calls=[called("call_1", call_pb2.CALL_STATE_FAILED, result=result('"found"', is_error=True))])
    return owner


async def loaded(user: User, conversation_id: str) -> pb.LoadRunResponse:
    owner = await user.start("next", conversation_id=conversation_id)
    whole = await owner.load()
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    assert whole.messages[-1].text == "next"
    del whole.messages[-1]
    return whole


async def age(database: Database, *conversation_ids: str) -> None:
    """Make conversations look inactive for 31 days and run retention."""
    statement = """
        UPDATE job_store.conversations SET update_time = update_time - interval '31 days'
        WHERE conversation_id = ANY ($1)
    """
    await database.execute(statement, list(conversation_ids))
    await sweep(database)


async def sweep(database: Database) -> None:
    await sweep_retention(PostgresRetention(database), SystemClock(), RETENTION, limits_of)


async def count(database: Database, table: str) -> int:
    found: int = await database.fetchval(f"SELECT count(*) FROM job_store.{table}")  # noqa: S608
    return found


async def test_fork_shares_messages_and_leaves_past_runs_in_the_original(user: User, database: Database) -> None:
    owner = await searching_run(user, "c1")
    await owner.commit(messages=[model_message("done")])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    before = [await count(database, table) for table in ("messages", "calls", "runs", "events")]
    made = await fork(user, "c1")
    assert [await count(database, table) for table in ("messages", "calls", "runs", "events")] == before
    assert not (await user.ask("ListRuns", conversation_id=made.conversation_id)).runs
    assert (await user.run(owner.run_id)).conversation_id == "c1"
    given = await loaded(user, made.conversation_id)
    assert [(each.call_id, each.conversation_id) for each in given.calls] == [("call_1", "c1")]
    assert given.calls[0].result == result('"found"', is_error=True)
    assert [message.conversation_id for message in given.messages] == ["c1"] * 3


async def test_search_finds_forks_that_show_a_message(user: User, database: Database) -> None:
    await ended_run(user, "c1", "where is the invoice", "in the cellar")
    await ended_run(user, "c1", "and the lamp", "in the attic")
    early, late = (await fork(user, "c1", 2)).conversation_id, (await fork(user, "c1", 4)).conversation_id
    await index_all(database)
    assert {*await listed(user, query="cellar")} == {"c1", early, late}
    assert {*await listed(user, query="attic")} == {"c1", late}
    await ended_run(user, early, "and the lawnmower", "in the shed")
    await index_all(database)
    assert await listed(user, query="shed") == [early]


async def test_original_is_kept_while_a_fork_shows_it(user: User, database: Database) -> None:
    run_id = await ended_run(user, "c1", "q0", "a0")
    one = (await fork(user, "c1")).conversation_id
    await ended_run(user, one, "q1", "a1")
    two = (await fork(user, one)).conversation_id
    await age(database, "c1", one)
    assert [text for _, text in await texts(user, two)] == ["q0", "a0", "q1", "a1"]
    assert (await user.run(run_id)).run_id == run_id
    await age(database, two)
    assert [await count(database, name) for name in ("conversations", "conversation_segments", "messages")] == [0] * 3
    await raises(RunNotFound, user.run(run_id))


async def test_erased_messages_disappear_from_forks(replica: Replica, user: User) -> None:
    """I22: forks of forks lose the messages too. Messages written in a fork stay, and the model sees only those."""
    await ended_run(user, "c1", "zanzibar", "a0")
    one = (await fork(user, "c1")).conversation_id
    await ended_run(user, one, "q1", "a1")
    two = (await fork(user, one)).conversation_id
    await erase(replica, "c1")
    await sweep_all(erasing(replica, Log()))
    three = (await fork(user, two)).conversation_id
    for of in (one, two, three):
        assert await texts(user, of) == [(3, "q1"), (4, "a1")]
    assert "zanzibar" not in await everything(replica.database)
    await raises(ConversationErased, fork(user, "c1"))
    assert [m.text for m in (await loaded(user, three)).messages] == ["q1", "a1"]


async def test_summarised_messages_remain_available_to_earlier_forks(user: User, database: Database) -> None:
    await ended_run(user, "c1", "q0", "a0")
    made = (await fork(user, "c1")).conversation_id
    owner = await user.start("q1", conversation_id="c1")
    await owner.commit(
        messages=[model_message("short", role=message_pb2.ROLE_SUMMARY, summarised_to_number=2), model_message("a1")]
    )
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    behind = (await fork(user, "c1")).conversation_id
    for table in ("messages", "runs"):
        await database.execute(f"UPDATE job_store.{table} SET create_time = create_time - interval '31 days'")  # noqa: S608
    await database.execute("UPDATE job_store.runs SET end_time = end_time - interval '31 days'")
    await sweep(database)
    assert await texts(user, made) == [(1, "q0"), (2, "a0")]
    await age(database, made)
    await sweep(database)
    assert [number for number, _ in await texts(user, "c1")] == [3, 4, 5]
    assert [number for number, _ in await texts(user, behind)] == [3, 4, 5]
    assert (await fork(user, behind)).forked_number == 5
    for of in ("c1", behind):
        pages = await user.pages("ExportConversation", "messages", conversation_id=of, page_size=1)
        assert [message.text for page in pages for message in page] == [
            "Summary of the conversation so far:\n\nshort",
            "q1",
            "a1",
        ]
    # The remaining message answers a deleted message.
    assert [m.text for m in (await loaded(user, behind)).messages] == ["q1", "short", "a1"]


ALL = ("conversations", "messages", "runs", "calls", "events", "outbox", "requests")


def past_of(user: User, prefix: str = "a", **fields: Any) -> pb.ImportConversationRequest:
    asked = call_pb2.Call(
        call_id=f"{prefix}_1",
        round=1,
        tool_name="gone_long_ago",
        state=call_pb2.CALL_STATE_SUCCEEDED,
        arguments_json=b"{}",
        proposed_arguments="{ }",
        provider_call_id="theirs",
        result=result("12"),
        imported=True,
    )
    messages = [
        model_message("How warm is it?", role=message_pb2.ROLE_USER, imported=True),
        model_message("", asked.call_id, imported=True),
        model_message("12 degrees", imported=True),
    ]
    values: dict[str, Any] = {"messages": messages, "calls": [asked]} | fields
    return pb.ImportConversationRequest(store_id=user.store_id, user_id=user.user_id, **values)


async def imported(user: User, request: pb.ImportConversationRequest) -> conversation_pb2.Conversation:
    with translating():
        return (await user.stub.ImportConversation(request)).conversation


async def test_imported_conversation_can_be_continued(user: User, database: Database) -> None:
    made = await imported(user, past_of(user, title="Oslo", conversation_key="k"))
    assert (made.title, made.last_message_number, made.active_run_id) == ("Oslo", 3, "")
    assert await get(user, conversation_key="k") == made
    given = await loaded(user, made.conversation_id)
    assert [message.text for message in given.messages] == ["How warm is it?", "", "12 degrees"]
    assert all(message.imported for message in given.messages)
    (asked,) = given.calls
    assert (asked.proposed_arguments, asked.provider_call_id, asked.imported) == ("{ }", "theirs", True)
    assert asked.result == result("12")
    await ended_run(user, made.conversation_id, "and now", "13")
    await index_all(database)
    assert await listed(user, query="degrees") == [made.conversation_id]
    assert len(await texts(user, (await fork(user, made.conversation_id, 2)).conversation_id)) == 2


async def test_imported_runs_are_not_listed_as_pending_or_announced(user: User, database: Database) -> None:
    made = await imported(user, past_of(user))
    (run_id,) = {
        message.run_id for message in (await user.ask("ListMessages", conversation_id=made.conversation_id)).messages
    }
    assert [call.call_id for call in (await user.ask("ListCalls", run_id=run_id)).calls] == ["a_1"]
    filters: tuple[dict[str, Any], ...] = (
        {},
        {"conversation_id": made.conversation_id},
        {"states": [run_pb2.RUN_STATE_COMPLETED]},
        {"order": agent_pb2.RUN_ORDER_OLDEST_FIRST},
    )
    for wanted in filters:
        assert not (await user.ask("ListRuns", **wanted)).runs
    assert not (await user.ask("ListPendingCalls")).calls
    assert (await user.claim(), await user.events(run_id)) == ([], [])
    assert (await user.run(run_id)).state == run_pb2.RUN_STATE_COMPLETED
    assert [await count(database, table) for table in ("events", "outbox", "commands")] == [0, 0, 0]
    assert not any((await PostgresLedgerStats(database, SLOTS).count()).values())


async def test_import_is_idempotent_by_its_request_id(user: User, database: Database) -> None:
    """I2: a repeated import has no effect, even if its calls have different ids."""
    made = await asyncio.gather(*(imported(user, past_of(user, f"x{number}", request_id="r1")) for number in range(4)))
    assert len({each.conversation_id for each in made}) == 1
    assert [await count(database, table) for table in ("conversations", "calls", "runs")] == [1, 1, 1]
    await raises(RequestIdReused, imported(user, past_of(user, "y", request_id="r1", title="other")))


async def test_rejected_import_leaves_nothing_behind(user: User, database: Database) -> None:
    await user.submit(conversation_key="k")
    await imported(user, past_of(user))
    before = [await count(database, table) for table in ALL]
    open_call = call_pb2.Call(call_id="open", round=1, tool_name="x", state=call_pb2.CALL_STATE_RUNNABLE)
    refused: tuple[tuple[pb.ImportConversationRequest, Any], ...] = (
        (past_of(user, "b", conversation_key="k", request_id="r1"), ConversationExists),
        (past_of(user, request_id="r2"), InvalidField),
        (past_of(user, "c", calls=[open_call], request_id="r3"), InvalidField),
        (past_of(user, "d", messages=[], request_id="r4"), InvalidField),
    )
    for request, error in refused:
        await raises(error, imported(user, request))
    assert [await count(database, table) for table in ALL] == before
