"""Conversations by key, in lists and in searches, on PostgreSQL with several replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pawl.agent.v1 import conversation_pb2 as conversation_api
from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.chassis.process.clock import SystemClock
from pawl.errors import ConversationNotFound, RunNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.conversations.store.search_index import PostgresSearchIndex
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.ledger.store.segments import OTHERS_BYTES_MAX
from pawl.job_store.sweeps import sweep_retention
from pawl.server.db.database import Database
from pawl.tool_registry.ledger import LedgerReads
from tests.rpc.job_store.conftest import RETENTION, Replica, StartReplica, limits_of
from tests.rpc.job_store.user import Owner, User, result
from tests.rpc.refusals import raises


async def get(user: User, **fields: Any) -> Any:
    return (await user.ask("GetConversation", **fields)).conversation


async def listed(user: User, **fields: Any) -> list[str]:
    """Return the ids on all pages of two items each."""
    pages = await user.pages("ListConversations", "conversations", page_size=2, **fields)
    assert {len(page) for page in pages[:-1]} <= {2}
    return [conversation.conversation_id for page in pages for conversation in page]


async def update(user: User, conversation_id: str, **fields: Any) -> Any:
    return (await user.ask("UpdateConversation", conversation_id=conversation_id, **fields)).conversation


async def two(start: StartReplica) -> list[User]:
    """Return the same user as a client of two replicas, with a queue limit that no test reaches."""
    return [User((await start(store_queue_max=100_000)).stub) for _ in range(2)]


async def index_all(database: Database) -> int:
    """Index until nothing is left, and return the number of rounds."""
    index, rounds = PostgresSearchIndex(database), 0
    while await index.index_new(conversations_max=20):
        rounds += 1
    return rounds


async def answered(user: User, question: str, answer: str, **fields: Any) -> str:
    return (await user.talk(question, answer, **fields)).conversation_id


async def test_concurrent_messages_with_a_new_key_share_one_conversation(start: StartReplica) -> None:
    """I2: each message starts one run, and one of the messages creates the conversation."""
    users = await two(start)
    for key in ("ticket 42", "é" * 100):
        answers = await asyncio.gather(*(users[number % 2].submit(conversation_key=key) for number in range(5)))
        assert len({answer.run.run_id for answer in answers}) == 5
        (conversation_id,) = {answer.run.conversation_id for answer in answers}
        found = await get(users[0], conversation_key=key)
        assert found == await get(users[1], conversation_id=conversation_id)
        assert (found.conversation_id, found.queued_run_count) == (conversation_id, 4)
        assert found.active_run_id in {answer.run.run_id for answer in answers}


async def test_conversation_key_is_per_user_and_stored_as_a_hash(user: User, database: Database) -> None:
    """I13: other users and stores can use the same key."""
    mine = (await user.submit(conversation_key="ticket 42")).run.conversation_id
    for other in (User(user.stub, user_id="bob"), User(user.stub, store_id="globex")):
        assert (await other.submit(conversation_key="ticket 42")).run.conversation_id != mine
    assert "ticket 42" not in str(await database.fetch("SELECT * FROM job_store.conversations"))


async def test_archived_conversations_are_listed_separately(user: User) -> None:
    for number in range(4):
        await user.submit(conversation_id=f"c{number}")
    for conversation_id in ("c0", "c2"):
        assert (await update(user, conversation_id, archived=True)).archived
    assert (await listed(user, archived=False), await listed(user, archived=True)) == (["c3", "c1"], ["c2", "c0"])
    assert await listed(user) == ["c3", "c2", "c1", "c0"]
    await user.submit(conversation_id="c0")
    assert await listed(user, archived=False) == ["c0", "c3", "c1"]
    await update(user, "c2", archived=False)
    assert await listed(user, archived=True) == []


async def test_search_finds_conversations_by_message_words_or_title(user: User, database: Database) -> None:
    invoice = await answered(user, "Where is invoice INV-2024/17?", "It was paid in March.")
    lunch = await answered(user, "When is lunch with Kim?", "On Friday at noon, in the STRASSENCAFÉ.")
    await answered(User(user.stub, user_id="bob"), "Where is my invoice?", "Nowhere.")
    await index_all(database)

    assert await listed(User(user.stub, store_id="globex"), query="invoice") == []
    for query, expected in (
        ("invoice", [invoice]),
        ("inv 2024 17", [invoice]),
        ("paid MARCH", [invoice]),
        ("straßencafé", [lunch]),
        ("noo", [lunch]),
        ("invoice march", []),  # The words must be in one message
        ("kim invoice", []),
        ("is", [lunch, invoice]),
    ):
        assert await listed(user, query=query) == expected, query
    await update(user, lunch, title="Birthday", archived=True)
    assert (await index_all(database), await listed(user, query="birth")) == (1, [lunch])
    assert (await listed(user, query="lunch"), await listed(user, query="birth", archived=False)) == ([lunch], [])
    await update(user, lunch, title="Party")
    await index_all(database)
    assert (await listed(user, query="birthday"), await listed(user, query="party")) == ([], [lunch])


async def test_long_conversations_are_indexed_in_parts(user: User, database: Database) -> None:
    owner = await user.start("begin", conversation_id="c1")
    for number in range(3):
        texts = [f"word{number}x{index} {'filler ' * 2000}" for index in range(30)]
        shown_messages = [
            message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text, reasoning="r" * 9000) for text in texts
        ]
        await owner.commit(messages=shown_messages)
    assert await index_all(database) > 4
    for word in ("begin", "word0x0", "word1x15", "word2x29"):
        assert await listed(user, query=word) == ["c1"]
    assert await index_all(database) == 0


async def test_search_words_and_keys_are_deleted_with_their_conversation(user: User, database: Database) -> None:
    old = await answered(user, "what was it", "nothing", conversation_key="k")
    await update(user, old, title="gone soon")
    await index_all(database)
    await database.execute("UPDATE job_store.conversations SET update_time = update_time - interval '31 days'")
    await sweep_retention(PostgresRetention(database), SystemClock(), RETENTION, limits_of)
    for table in ("conversations", "conversation_words", "messages"):
        assert await database.fetchval(f"SELECT count(*) FROM job_store.{table}") == 0  # noqa: S608
    assert (await user.submit(conversation_key="k")).run.conversation_id != old


ASSISTANT, SUMMARY = message_pb2.ROLE_ASSISTANT, message_pb2.ROLE_SUMMARY


@dataclass(frozen=True, kw_only=True)
class Shared:
    ann: User
    bob: User
    conversation_id: str

    async def share(self, sharing: Any, **fields: Any) -> Any:
        return (
            await self.ann.ask("UpdateConversation", conversation_id=self.conversation_id, sharing=sharing, **fields)
        ).conversation

    async def begin(self, user: User, text: str = "hello") -> Owner:
        return await user.start(text, conversation_id=self.conversation_id, conversation_must_exist=True)

    async def send(self, user: User, text: str = "hello", **fields: Any) -> Any:
        answer = await user.submit(text, conversation_id=self.conversation_id, conversation_must_exist=True, **fields)
        return answer.run

    async def shown_messages(self, user: User) -> list[message_pb2.Message]:
        return list((await user.ask("ListMessages", conversation_id=self.conversation_id)).messages)


async def ends(owner: Owner, text: str = "Done.", **fields: Any) -> None:
    call_id = f"call_{owner.run_id}"
    calls = [message_pb2.Message(role=ASSISTANT, reasoning="hm", call_ids=[call_id])]
    await owner.commit(messages=calls, calls=[owner.call(call_id, call_pb2.CALL_STATE_RUNNING, attempt=1)])
    await owner.commit(calls=[owner.call(call_id, call_pb2.CALL_STATE_SUCCEEDED, attempt=1, result=result('"secret"'))])
    await owner.commit(messages=[message_pb2.Message(role=ASSISTANT, text=text, reasoning="hm", **fields)])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)


@pytest.fixture
async def shared(user: User) -> Shared:
    owner = await user.start("mine")
    await ends(owner)
    found = Shared(ann=user, bob=User(user.stub, user_id="bob"), conversation_id=owner.conversation_id)
    assert (await found.share(conversation_pb2.SHARING_WRITE)).sharing == conversation_pb2.SHARING_WRITE
    return found


async def export(user: User, conversation_id: str, page_size: int = 1) -> list[list[conversation_api.HistoryMessage]]:
    return await user.pages("ExportConversation", "messages", conversation_id=conversation_id, page_size=page_size)


async def test_export_has_pages_of_limited_size_and_only_calls_that_the_reader_may_see(shared: Shared) -> None:
    theirs, big = await shared.begin(shared.bob, "theirs"), result(f'"{"x" * 1_000_000}"')
    ids = [f"big_{number}" for number in range(5)]
    states = (call_pb2.CALL_STATE_RUNNING, call_pb2.CALL_STATE_SUCCEEDED)
    running, ended = ([theirs.call(each, state, attempt=1) for each in ids] for state in states)
    await theirs.commit(messages=[message_pb2.Message(role=ASSISTANT, call_ids=ids)], calls=running)
    for each in ended:
        each.result.CopyFrom(big)
        await theirs.commit(calls=[each])
    await theirs.commit(messages=[message_pb2.Message(role=ASSISTANT, text="Theirs.")])
    await theirs.commit(state=run_pb2.RUN_STATE_COMPLETED)
    own, text = await export(shared.bob, shared.conversation_id), big.content_json.decode()
    expected = [["mine"], [], ["Done."], ["theirs"], ["", *[text] * 3], ["Theirs."]]
    assert [[each.text for each in page] for page in own] == expected
    for reader, shows_arguments, secrets in ((shared.ann, False, 1), (shared.bob, True, 1), (shared.bob, False, 0)):
        await shared.share(conversation_pb2.SHARING_READ, shows_arguments=shows_arguments)
        shown = [each.text for page in await export(reader, shared.conversation_id, 200) for each in page]
        assert shown.count('"secret"') == secrets, (reader.user_id, shows_arguments)
    await shared.share(conversation_pb2.SHARING_PRIVATE)
    await raises(ConversationNotFound, export(shared.bob, shared.conversation_id))


async def test_a_writers_message_starts_a_run_that_only_the_writer_sees(shared: Shared) -> None:
    theirs = await shared.begin(shared.bob, "theirs")
    run = await shared.bob.run(theirs.run_id)
    assert (run.user_id, run.conversation_id) == ("bob", shared.conversation_id)
    await raises(RunNotFound, shared.ann.run(theirs.run_id))
    for user, is_there in ((shared.ann, False), (shared.bob, True)):
        listed = [each.run_id for each in (await user.ask("ListRuns", conversation_id=shared.conversation_id)).runs]
        assert (theirs.run_id in listed) is is_there
        assert len(listed) == 1
    await theirs.commit(
        messages=[message_pb2.Message(role=ASSISTANT, call_ids=["c1"])],
        calls=[theirs.call("c1", call_pb2.CALL_STATE_ASKED, context=call_pb2.EXECUTION_CONTEXT_HUMAN)],
    )
    await theirs.park(run_pb2.WAIT_KIND_ANSWER)
    for user, count in ((shared.ann, 0), (shared.bob, 1)):
        assert len((await user.ask("ListPendingCalls")).calls) == count
    assert (await shared.ann.cancel(theirs.run_id)).outcome == ledger_pb2.COMMAND_OUTCOME_UNKNOWN


async def test_messages_name_their_author_but_show_other_users_only_the_text(shared: Shared) -> None:
    await ends(await shared.begin(shared.bob, "theirs"), "Theirs.")
    for user in (shared.ann, shared.bob):
        shown_messages = await shared.shown_messages(user)
        assert [each.user_id for each in shown_messages] == ["ann"] * 3 + ["bob"] * 3
        assert [each.text for each in shown_messages] == ["mine", "", "Done.", "theirs", "", "Theirs."]
        assert {each.user_id for each in shown_messages if each.reasoning} == {user.user_id}
    run_id = (await shared.shown_messages(shared.bob))[3].run_id
    assert {event.message_added.message.user_id for event in await shared.bob.events(run_id)} == {"", "bob"}
    assert {each.user_id for each in await shared.shown_messages(User(shared.ann.stub, user_id="eve"))} == {
        "ann",
        "bob",
    }


async def test_a_run_sees_only_the_text_of_other_users_messages(shared: Shared) -> None:
    await shared.share(conversation_pb2.SHARING_WRITE, shows_arguments=True)
    text = message_pb2.Part(text="look")
    image = message_pb2.Part(image=message_pb2.ImagePart(data=b"pixels", media_type="image/png"))
    answer = await shared.bob.submit(
        "", parts=[text, image], conversation_id=shared.conversation_id, conversation_must_exist=True
    )
    theirs = await shared.bob.take(answer.run.run_id)
    await theirs.commit(state=run_pb2.RUN_STATE_RUNNING)
    loaded = await theirs.load()
    assert [each.text for each in loaded.messages] == ["mine", "", "Done.", "look"]
    assert [each.user_id for each in loaded.messages] == ["ann"] * 3 + ["bob"]
    assert not any(each.reasoning or each.call_ids or each.model for each in loaded.messages[:3])
    assert not loaded.calls
    assert loaded.messages[3].parts[1].image.data == b"pixels"
    await ends(theirs, "Theirs.")

    loaded = await (await shared.begin(shared.ann, "again")).load()
    assert [each.text for each in loaded.messages] == ["mine", "", "Done.", "look", "", "Theirs.", "again"]
    assert {call.run_id for call in loaded.calls} == {loaded.messages[0].run_id}
    assert [bool(each.reasoning or each.parts) for each in loaded.messages] == [False, True, True] + [False] * 4


async def test_a_summary_replaces_messages_only_for_runs_of_its_user(shared: Shared) -> None:
    theirs = await shared.begin(shared.bob, "theirs")
    await theirs.commit(messages=[message_pb2.Message(role=SUMMARY, text="bob's secret", summarised_to_number=4)])
    await ends(theirs, "Theirs.")
    mine = await shared.begin(shared.ann, "mine again")
    texts = [each.text for each in (await mine.load()).messages]
    assert texts == ["mine", "", "Done.", "theirs", "", "Theirs.", "mine again"]
    await ends(mine)
    assert [each.text for each in await shared.shown_messages(shared.ann)][4] == ""
    texts = [each.text for each in (await (await shared.begin(shared.bob, "theirs again")).load()).messages]
    assert texts == ["bob's secret", "", "Theirs.", "mine again", "", "Done.", "theirs again"]


@pytest.mark.parametrize("is_fork", [False, True])
async def test_a_run_sees_as_many_recent_complete_runs_of_other_users_as_fit(
    shared: Shared, database: Database, *, is_fork: bool
) -> None:
    image = message_pb2.Part(image=message_pb2.ImagePart(data=bytes(1_000_000), media_type="image/png"))
    pair = [
        message_pb2.Message(role=message_pb2.ROLE_USER, text="look", parts=[image]),
        message_pb2.Message(role=ASSISTANT, text="Seen."),
    ]
    await database.execute(
        """
        INSERT INTO job_store.messages
            (store_id, conversation_id, number, message_id, run_id, summarised_to, body, create_time)
        SELECT 'acme', $1, number, 'm' || number, 'r' || number / 2, 0, ($2::bytea[])[1 + number % 2], now()
        FROM generate_series(4, 43) AS number
        """,
        shared.conversation_id,
        [each.SerializeToString() for each in pair],
    )
    await database.execute("UPDATE job_store.conversations SET last_number = 43")
    if is_fork:
        made = (await shared.ann.ask("ForkConversation", conversation_id=shared.conversation_id)).conversation
        shared = replace(shared, conversation_id=made.conversation_id)
        await shared.share(conversation_pb2.SHARING_WRITE)
    theirs = await shared.begin(shared.bob, "theirs")
    loaded = await theirs.load()
    assert [each.text for each in loaded.messages] == [*(["look", "Seen."] * (OTHERS_BYTES_MAX // 1_000_000)), "theirs"]
    await ends(theirs)
    assert len((await (await shared.begin(shared.ann, "mine again")).load()).messages) == 3 + 40 + 3 + 1


async def test_only_writers_may_have_rules_in_a_shared_conversation(shared: Shared, replica: Replica) -> None:
    reads = LedgerReads(replica.channel)
    where = (StoreId("acme"), UserId("bob"), ConversationId(shared.conversation_id))
    assert await reads.has_conversation(*where)
    await shared.share(conversation_pb2.SHARING_READ)
    assert not await reads.has_conversation(*where)


async def test_writers_jobs_are_stopped_when_write_sharing_ends(shared: Shared) -> None:
    job = run_pb2.Job(tool_name="work", arguments_json=b"{}", iterations_max=1, timeout_seconds=60)
    for user, run_id in ((shared.bob, "run_begun"), (shared.bob, "run_waits"), (shared.ann, "run_mine")):
        message = ledger_pb2.SubmitMessageRequest(
            store_id="acme",
            user_id=user.user_id,
            conversation_id=shared.conversation_id,
            policy=ledger_pb2.MESSAGE_POLICY_QUEUE,
            text="work",
        )
        await user.ask("StartJob", message=message, run_id=run_id, job=job, asked_sha256=b"1")
        if run_id == "run_begun":
            await user.take(run_id)
    await shared.share(conversation_pb2.SHARING_PRIVATE)
    for user, run_id, state in (
        (shared.bob, "run_begun", run_pb2.RUN_STATE_CANCELLING),
        (shared.bob, "run_waits", run_pb2.RUN_STATE_CANCELLED),
        (shared.ann, "run_mine", run_pb2.RUN_STATE_QUEUED),
    ):
        assert (await user.run(run_id)).state == state
