"""Imported conversations on PostgreSQL: all of them or nothing, and nowhere counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.chassis.database import Database
from pawl.chassis.rpc_client import translating
from pawl.errors import ConversationExists, InvalidField, RequestIdReused
from pawl.event.v1 import call_pb2, conversation_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.upkeep import PostgresLedgerStats
from pawl.job_store.domain.places import PlaceLimits
from tests.rpc.job_store.test_conversations import get, listed, take_in
from tests.rpc.job_store.test_forks import count, fork, loaded, said, texts, told
from tests.rpc.job_store.user import User, result

ALL = ("conversations", "messages", "runs", "calls", "events", "outbox", "requests")


def history(user: User, prefix: str = "a", **fields: Any) -> pb.ImportConversationRequest:
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
        said("How warm is it?", role=message_pb2.ROLE_USER, imported=True),
        said("", asked.call_id, imported=True),
        said("12 degrees", imported=True),
    ]
    values: dict[str, Any] = {"messages": messages, "calls": [asked]} | fields
    return pb.ImportConversationRequest(store_id=user.store_id, user_id=user.user_id, **values)


async def imported(user: User, request: pb.ImportConversationRequest) -> conversation_pb2.Conversation:
    with translating():
        return (await user.stub.ImportConversation(request)).conversation


async def test_an_imported_conversation_goes_on_like_any_other(user: User, database: Database) -> None:
    made = await imported(user, history(user, title="Oslo", conversation_key="k"))
    assert (made.title, made.last_message_number, made.active_run_id) == ("Oslo", 3, "")
    assert await get(user, conversation_key="k") == made
    given = await loaded(user, made.conversation_id)
    assert [message.text for message in given.messages] == ["How warm is it?", "", "12 degrees"]
    assert all(message.imported for message in given.messages)
    (asked,) = given.calls
    assert (asked.proposed_arguments, asked.provider_call_id, asked.imported) == ("{ }", "theirs", True)
    assert asked.result == result("12")
    await told(user, made.conversation_id, "and now", "13")
    await take_in(database)
    assert await listed(user, query="degrees") == [made.conversation_id]
    forked = await fork(user, made.conversation_id, 2)
    assert len(await texts(user, forked.conversation_id)) == 2


async def test_nothing_of_it_happened_here(user: User, database: Database) -> None:
    """No list of runs has it, nothing waits, nothing is told; its calls are found under its messages' run."""
    made = await imported(user, history(user))
    (run_id,) = {
        message.run_id for message in (await user.ask("ListMessages", conversation_id=made.conversation_id)).messages
    }
    assert [call.call_id for call in (await user.ask("ListCalls", run_id=run_id)).calls] == ["a_1"]
    filters: tuple[dict[str, Any], ...] = (
        {},
        {"conversation_id": made.conversation_id},
        {"states": [run_pb2.RUN_STATE_COMPLETED]},
        {"oldest_first": True},
    )
    for wanted in filters:
        assert not (await user.ask("ListRuns", **wanted)).runs
    assert not (await user.ask("ListPendingCalls")).calls
    assert await user.claim() == []
    assert await user.events(run_id) == []
    assert (await user.run(run_id)).state == run_pb2.RUN_STATE_COMPLETED
    assert [await count(database, table) for table in ("events", "outbox", "commands")] == [0, 0, 0]
    counts = await PostgresLedgerStats(database, PlaceLimits(per_store=5, per_user=5)).count()
    assert not any(counts.values())


async def test_an_import_is_known_by_its_request(user: User, database: Database) -> None:
    """I2: whatever ids its calls have the second time."""
    made = await asyncio.gather(*(imported(user, history(user, f"x{number}", request_id="r1")) for number in range(4)))
    assert len({each.conversation_id for each in made}) == 1
    assert [await count(database, table) for table in ("conversations", "calls", "runs")] == [1, 1, 1]
    with pytest.raises(RequestIdReused):
        await imported(user, history(user, "y", request_id="r1", title="other"))


async def test_a_refused_import_leaves_nothing(user: User, database: Database) -> None:
    await user.submit(conversation_key="k")
    await imported(user, history(user))
    before = [await count(database, table) for table in ALL]
    open_call = call_pb2.Call(call_id="open", round=1, tool_name="x", state=call_pb2.CALL_STATE_RUNNABLE)
    refused: tuple[tuple[pb.ImportConversationRequest, Any], ...] = (
        (history(user, "b", conversation_key="k", request_id="r1"), ConversationExists),
        (history(user, request_id="r2"), InvalidField),
        (history(user, "c", calls=[open_call], request_id="r3"), InvalidField),
        (history(user, "d", messages=[], request_id="r4"), InvalidField),
    )
    for request, error in refused:
        with pytest.raises(error):
            await imported(user, request)
    assert [await count(database, table) for table in ALL] == before
