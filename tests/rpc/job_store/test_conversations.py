"""Conversations by key, in lists, by their words: on PostgreSQL, by several replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.chassis.clock import SystemClock
from pawl.chassis.database import Database
from pawl.errors import ConversationNotFound
from pawl.event.v1 import conversation_pb2, message_pb2, run_pb2
from pawl.job_store.adapters.retention import PostgresRetention
from pawl.job_store.adapters.search_index import PostgresSearchIndex
from pawl.job_store.app.sweeps import RetentionSweep
from pawl.job_store.rpc.messages import text_of
from tests.rpc.job_store.conftest import RETENTION, StartReplica
from tests.rpc.job_store.user import User


async def get(user: User, **fields: Any) -> conversation_pb2.Conversation:
    return (await user.ask("GetConversation", **fields)).conversation


async def listed(user: User, **fields: Any) -> list[str]:
    """The ids of all pages of two."""
    pages = await user.pages("ListConversations", "conversations", page_size=2, **fields)
    assert {len(page) for page in pages[:-1]} <= {2}
    return [conversation.conversation_id for page in pages for conversation in page]


async def update(user: User, conversation_id: str, **fields: Any) -> conversation_pb2.Conversation:
    return (await user.ask("UpdateConversation", conversation_id=conversation_id, **fields)).conversation


async def two(start: StartReplica) -> list[User]:
    """Give a user at each of two replicas, whose groups do not take turns: the queue of the store is far from full."""
    return [User((await start(store_queue_max=100_000)).stub) for _ in range(2)]


async def take_in(database: Database) -> int:
    """Do all that the loop does; returns how many rounds that took."""
    index, rounds = PostgresSearchIndex(database, text_of), 0
    while await index.take_in(conversations_max=20):
        rounds += 1
    return rounds


async def answered(user: User, question: str, answer: str, **fields: Any) -> str:
    """A conversation that has ended; its id."""
    owner = await user.start(question, **fields)
    await owner.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=answer)])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    return (await user.run(owner.run_id)).conversation_id


async def test_others_do_not_read_summaries_which_retell_calls_and_documents(user: User) -> None:
    owner = await user.start("what is my balance?")
    said = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="You are fine.")
    retold = "look_up(account=4711) gave 12 euros."
    await owner.commit(
        messages=[message_pb2.Message(role=message_pb2.ROLE_SUMMARY, text=retold, summarised_to_number=1), said]
    )
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    conversation_id = (await user.run(owner.run_id)).conversation_id
    await update(user, conversation_id, sharing=conversation_pb2.SHARING_READ)

    async def read_by(user_id: str) -> list[str]:
        return [
            message.text
            for message in (await user.ask("ListMessages", user_id=user_id, conversation_id=conversation_id)).messages
        ]

    assert await read_by(user.user_id) == ["what is my balance?", retold, "You are fine."]
    assert await read_by("bob") == ["what is my balance?", "", "You are fine."]


async def test_messages_with_one_new_key_at_two_replicas_meet_in_one_conversation(start: StartReplica) -> None:
    """I2: each of them has a run, and one of them begins the conversation."""
    users = await two(start)
    for key in ("ticket 42", "é" * 100):
        answers = await asyncio.gather(*(users[number % 2].submit(conversation_key=key) for number in range(5)))
        assert len({answer.run.run_id for answer in answers}) == 5
        (conversation_id,) = {answer.run.conversation_id for answer in answers}
        found = await get(users[0], conversation_key=key)
        assert found == await get(users[1], conversation_id=conversation_id)
        assert (found.conversation_id, found.queued_run_count) == (conversation_id, 4)
        assert found.active_run_id in {answer.run.run_id for answer in answers}


async def test_a_key_is_of_its_user_and_is_kept_as_a_hash(user: User, database: Database) -> None:
    """I13."""
    mine = (await user.submit(conversation_key="ticket 42")).run.conversation_id
    for other in (User(user.stub, user_id="bob"), User(user.stub, store_id="globex")):
        with pytest.raises(ConversationNotFound):
            await get(other, conversation_key="ticket 42")
        assert (await other.submit(conversation_key="ticket 42")).run.conversation_id != mine
    assert "ticket 42" not in str(await database.fetch("SELECT * FROM job_store.conversations"))


async def test_those_come_first_in_which_something_happened_last(user: User) -> None:
    """By pages; those of other users, and of runs that do a call, are left out."""
    await User(user.stub, user_id="bob").submit(conversation_id="bobs")
    for number in range(5):
        await user.submit(conversation_id=f"c{number}")
    await user.submit(conversation_id="c1")
    assert await listed(user) == ["c1", "c4", "c3", "c2", "c0"]
    await update(user, "c0", title="not now")
    assert await listed(user) == ["c1", "c4", "c3", "c2", "c0"]


async def test_the_archive_is_a_list_of_its_own(user: User) -> None:
    for number in range(4):
        await user.submit(conversation_id=f"c{number}")
    for conversation_id in ("c0", "c2"):
        assert (await update(user, conversation_id, archived=True)).archived
    assert await listed(user, archived=False) == ["c3", "c1"]
    assert await listed(user, archived=True) == ["c2", "c0"]
    assert await listed(user) == ["c3", "c2", "c1", "c0"]
    await user.submit(conversation_id="c0")
    assert await listed(user, archived=False) == ["c0", "c3", "c1"]
    await update(user, "c2", archived=False)
    assert await listed(user, archived=True) == []


async def test_conversations_are_found_by_words_of_a_message_or_the_title(user: User, database: Database) -> None:
    invoice = await answered(user, "Where is invoice INV-2024/17?", "It was paid in March.")
    lunch = await answered(user, "When is lunch with Kim?", "On Friday at noon, in the STRASSENCAFÉ.")
    bob = User(user.stub, user_id="bob")
    await answered(bob, "Where is my invoice?", "Nowhere.")
    await take_in(database)
    assert await listed(user, query="invoice") == [invoice]
    assert await listed(user, query="inv 2024 17") == [invoice]
    assert await listed(user, query="paid MARCH") == [invoice]
    assert await listed(user, query="straßencafé") == [lunch]
    assert await listed(user, query="noo") == [lunch]
    assert await listed(user, query="invoice march") == []  # In one message.
    assert await listed(user, query="kim invoice") == []
    assert await listed(user, query="is") == [lunch, invoice]
    assert await listed(User(user.stub, store_id="globex"), query="invoice") == []
    await update(user, lunch, title="Birthday", archived=True)
    assert await take_in(database) == 1
    assert await listed(user, query="birth") == [lunch]
    assert await listed(user, query="lunch") == [lunch]
    assert await listed(user, query="birth", archived=False) == []
    await update(user, lunch, title="Party")
    await take_in(database)
    assert await listed(user, query="birthday") == []
    assert await listed(user, query="party") == [lunch]


async def test_long_conversations_are_taken_in_by_parts(user: User, database: Database) -> None:
    owner = await user.start("begin", conversation_id="c1")
    for number in range(3):
        texts = [f"word{number}x{index} {'filler ' * 2000}" for index in range(30)]
        said = [message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text, reasoning="r" * 9000) for text in texts]
        await owner.commit(messages=said)
    assert await take_in(database) > 4
    for word in ("begin", "word0x0", "word1x15", "word2x29"):
        assert await listed(user, query=word) == ["c1"]
    assert await take_in(database) == 0


async def test_a_conversation_that_is_written_to_is_taken_in_later(user: User, database: Database) -> None:
    """Whoever writes comes first; nothing is lost."""
    await user.submit("secret plan", conversation_id="c1")
    async with database.transaction() as connection:
        await connection.fetch("SELECT FROM job_store.conversations FOR UPDATE")
        assert await take_in(database) == 0
    assert await take_in(database) == 1
    assert await listed(user, query="secret") == ["c1"]


async def test_words_and_keys_go_with_their_conversation(user: User, database: Database) -> None:
    old = await answered(user, "what was it", "nothing", conversation_key="k")
    await update(user, old, title="gone soon")
    await take_in(database)
    await database.execute("UPDATE job_store.conversations SET update_time = update_time - interval '31 days'")
    sweep = RetentionSweep(PostgresRetention(database), SystemClock(), RETENTION)
    await sweep.sweep()
    for table in ("conversations", "conversation_words", "messages"):
        assert await database.fetchval(f"SELECT count(*) FROM job_store.{table}") == 0  # noqa: S608
    assert (await user.submit(conversation_key="k")).run.conversation_id != old


async def test_the_key_of_conversations_that_are_being_removed_is_free(user: User, database: Database) -> None:
    """Also while a part of two of them is still there."""
    ids = []
    for _ in range(2):
        ids.append(await answered(user, "x", "y", conversation_key="k"))
        await database.execute("UPDATE job_store.conversations SET update_time = update_time - interval '31 days'")
        await PostgresRetention(database).remove_conversations(older_than_seconds=86_400, rows_max=1)
    assert await database.fetchval("SELECT count(*) FROM job_store.conversations") == 2
    ids.append((await user.submit(conversation_key="k")).run.conversation_id)
    assert len({*ids}) == 3
