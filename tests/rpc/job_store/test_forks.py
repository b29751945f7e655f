"""Forks on PostgreSQL: what they show, how they go on, and how long their past is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.chassis.clock import SystemClock
from pawl.chassis.database import Database
from pawl.chassis.rpc_client import translating
from pawl.errors import ConversationNotFound, ForkPointOpen, RequestIdReused, RunNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.retention import PostgresRetention
from pawl.job_store.app.sweeps import RetentionSweep
from tests.rpc.job_store.conftest import RETENTION, Replica
from tests.rpc.job_store.test_conversations import answered, get, listed, take_in, update
from tests.rpc.job_store.user import Owner, User, result


async def fork(user: User, conversation_id: str, number: int = 0, **fields: Any) -> conversation_pb2.Conversation:
    request = pb.ForkConversationRequest(
        store_id=user.store_id, user_id=user.user_id, conversation_id=conversation_id, number=number, **fields
    )
    with translating():
        return (await user.stub.ForkConversation(request)).conversation


async def texts(user: User, conversation_id: str, page_size: int = 2) -> list[tuple[int, str]]:
    """Number and text of all messages, page by page."""
    request = pb.ListMessagesRequest(
        store_id=user.store_id, user_id=user.user_id, conversation_id=conversation_id, page_size=page_size
    )
    found: list[tuple[int, str]] = []
    while True:
        with translating():
            page = await user.stub.ListMessages(request)
        found += [(message.number, message.text) for message in page.messages]
        request.page_token = page.next_page_token
        if not request.page_token:
            return found


def said(text: str, *call_ids: str, role: Any = message_pb2.ROLE_ASSISTANT, **fields: Any) -> message_pb2.Message:
    return message_pb2.Message(role=role, text=text, call_ids=call_ids, **fields)


def called(call_id: str, state: Any = call_pb2.CALL_STATE_PROPOSED, **fields: Any) -> call_pb2.Call:
    values: dict[str, Any] = {"round": 1} | fields
    return call_pb2.Call(call_id=call_id, tool_name="look", arguments_json=b"{}", state=state, **values)


async def told(user: User, conversation_id: str, question: str, answer: str) -> str:
    """One more run that has ended; its id."""
    owner = await user.start(question, conversation_id=conversation_id)
    await owner.commit(messages=[said(answer)])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    return owner.run_id


async def looked(user: User, conversation_id: str) -> Owner:
    """A run that has looked something up, and goes on."""
    owner = await user.start("look", conversation_id=conversation_id)
    await owner.commit(messages=[said("", "call_1")], calls=[called("call_1")])
    failed = called("call_1", call_pb2.CALL_STATE_FAILED, result=result('"found"', is_error=True))
    await owner.commit(calls=[failed])
    return owner


async def loaded(user: User, conversation_id: str) -> pb.LoadRunResponse:
    """What the next run of a conversation is given, its own message left out."""
    owner = await user.start("next", conversation_id=conversation_id)
    whole = await owner.load()
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    assert whole.messages[-1].text == "next"
    del whole.messages[-1]
    return whole


async def age(database: Database, *conversation_ids: str) -> None:
    """Let nothing have happened in some conversations for 31 days, and do what retention does."""
    statement = """
        UPDATE job_store.conversations SET update_time = update_time - interval '31 days'
        WHERE conversation_id = ANY ($1)
    """
    await database.execute(statement, list(conversation_ids))
    await sweep(database)


async def sweep(database: Database) -> None:
    await RetentionSweep(PostgresRetention(database), SystemClock(), RETENTION).sweep()


async def count(database: Database, table: str) -> int:
    found: int = await database.fetchval(f"SELECT count(*) FROM job_store.{table}")  # noqa: S608
    return found


async def test_a_fork_shows_its_past_and_goes_on_by_itself(user: User) -> None:
    for number in range(3):
        await told(user, "c1", f"q{number}", f"a{number}")
    made = await fork(user, "c1", 4)
    assert (made.forked_conversation_id, made.forked_number, made.last_message_number) == ("c1", 4, 4)
    assert made.title == "q0"
    await told(user, made.conversation_id, "other", "way")
    whole = [(1, "q0"), (2, "a0"), (3, "q1"), (4, "a1"), (5, "q2"), (6, "a2")]
    assert await texts(user, "c1") == whole
    assert await texts(user, made.conversation_id) == [*whole[:4], (5, "other"), (6, "way")]
    assert await texts(user, made.conversation_id, page_size=50) == await texts(user, made.conversation_id)
    given = await loaded(user, made.conversation_id)
    assert [(each.number, each.text) for each in given.messages] == (await texts(user, made.conversation_id))[:-1]


async def test_nothing_is_copied_and_the_past_stays_where_it_happened(user: User, database: Database) -> None:
    owner = await looked(user, "c1")
    await owner.commit(messages=[said("done")])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    before = [await count(database, table) for table in ("messages", "calls", "runs", "events")]
    made = await fork(user, "c1")
    assert [await count(database, table) for table in ("messages", "calls", "runs", "events")] == before
    runs = pb.ListRunsRequest(store_id="acme", user_id="ann", conversation_id=made.conversation_id)
    assert not (await user.stub.ListRuns(runs)).runs
    assert (await user.run(owner.run_id)).conversation_id == "c1"
    given = await loaded(user, made.conversation_id)
    assert [(each.call_id, each.conversation_id) for each in given.calls] == [("call_1", "c1")]
    assert given.calls[0].result == result('"found"', is_error=True)
    assert [message.conversation_id for message in given.messages] == ["c1"] * 3


async def test_a_fork_of_a_fork_has_a_flat_path(user: User, database: Database) -> None:
    await told(user, "c1", "q0", "a0")
    one = await fork(user, "c1")
    await told(user, one.conversation_id, "q1", "a1")
    two = await fork(user, one.conversation_id)
    await told(user, two.conversation_id, "q2", "a2")
    early = await fork(user, two.conversation_id, 2)
    late = await fork(user, two.conversation_id)
    assert await texts(user, early.conversation_id) == [(1, "q0"), (2, "a0")]
    assert [text for _, text in await texts(user, late.conversation_id)] == ["q0", "a0", "q1", "a1", "q2", "a2"]
    rows = await database.fetch(
        "SELECT source_conversation_id FROM job_store.conversation_segments WHERE conversation_id = $1"
        " ORDER BY first_number",
        late.conversation_id,
    )
    assert [row[0] for row in rows] == ["c1", one.conversation_id, two.conversation_id]
    assert len(await database.fetch("SELECT FROM job_store.conversation_segments")) == 1 + 2 + 1 + 3


async def test_a_running_conversation_is_forked_before_what_is_open(user: User) -> None:
    await told(user, "c1", "q0", "a0")
    owner = await looked(user, "c1")
    await owner.commit(messages=[said("and", "call_2")], calls=[called("call_2", round=2)])
    assert (await fork(user, "c1")).forked_number == 4
    for number, nearest in ((5, {"before": "4"}), (3, {"before": "2", "after": "4"}), (1, {"after": "2"}), (99, {})):
        with pytest.raises(ForkPointOpen) as refused:
            await fork(user, "c1", number)
        assert refused.value.metadata == (nearest or {"before": "4"})
    assert (await fork(user, "c1", 2)).forked_number == 2
    assert (await user.run(owner.run_id)).state == run_pb2.RUN_STATE_RUNNING


async def test_a_conversation_without_an_answer_has_nothing_to_fork(user: User) -> None:
    await user.submit(conversation_id="c1")
    with pytest.raises(ForkPointOpen, match="no answer"):
        await fork(user, "c1")
    assert await listed(user) == ["c1"]


async def test_the_last_place_is_found_behind_many_messages(user: User) -> None:
    await told(user, "c1", "q", "a")
    owner = await user.start("on", conversation_id="c1")
    await owner.commit(messages=[said("steered", role=message_pb2.ROLE_USER) for _ in range(150)])
    assert (await fork(user, "c1")).forked_number == 2
    with pytest.raises(ForkPointOpen) as refused:
        await fork(user, "c1", 77)
    assert refused.value.metadata == {"before": "2"}


async def test_a_summary_counts_for_forks_behind_it(user: User) -> None:
    for number in range(2):
        await told(user, "c1", f"q{number}", f"a{number}")
    owner = await user.start("q2", conversation_id="c1")
    await owner.commit(messages=[said("short", role=message_pb2.ROLE_SUMMARY, summarised_to_number=3), said("a2")])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    before, behind = await fork(user, "c1", 4), await fork(user, "c1")
    assert [m.text for m in (await loaded(user, before.conversation_id)).messages] == ["q0", "a0", "q1", "a1"]
    assert [m.text for m in (await loaded(user, behind.conversation_id)).messages] == ["a1", "q2", "short", "a2"]


async def test_a_fork_is_known_by_its_request(user: User) -> None:
    """I2: also when it comes many times at once, and when the original has gone on."""
    await told(user, "c1", "q", "a")
    made = await asyncio.gather(*(fork(user, "c1", request_id="r1") for _ in range(4)))
    assert len({each.conversation_id for each in made}) == 1
    await told(user, "c1", "q", "a")
    assert (await fork(user, "c1", request_id="r1")) == made[0]
    for again in (fork(user, "c1", 2, request_id="r1"), update(user, "c1", request_id="r1", title="x")):
        with pytest.raises(RequestIdReused):
            await again
    assert len(await listed(user)) == 2


async def test_a_conversation_of_another_user_is_not_found(user: User) -> None:
    """I13."""
    await told(user, "c1", "q", "a")
    for other in (User(user.stub, user_id="bob"), User(user.stub, store_id="globex")):
        with pytest.raises(ConversationNotFound):
            await fork(other, "c1")
        assert await listed(other) == []


async def test_a_search_finds_the_forks_that_show_a_message(user: User, database: Database) -> None:
    await told(user, "c1", "where is the invoice", "in the cellar")
    await told(user, "c1", "and the lamp", "in the attic")
    early, late = (await fork(user, "c1", 2)).conversation_id, (await fork(user, "c1", 4)).conversation_id
    await take_in(database)
    assert {*await listed(user, query="cellar")} == {"c1", early, late}
    assert {*await listed(user, query="attic")} == {"c1", late}
    await told(user, early, "and the lawnmower", "in the shed")
    await take_in(database)
    assert await listed(user, query="shed") == [early]


async def test_an_original_is_kept_as_long_as_a_fork_shows_it(user: User, database: Database) -> None:
    run_id = await told(user, "c1", "q0", "a0")
    one = (await fork(user, "c1")).conversation_id
    await told(user, one, "q1", "a1")
    two = (await fork(user, one)).conversation_id
    await age(database, "c1", one)
    assert [text for _, text in await texts(user, two)] == ["q0", "a0", "q1", "a1"]
    assert (await user.run(run_id)).run_id == run_id
    await age(database, two)
    assert [await count(database, name) for name in ("conversations", "conversation_segments", "messages")] == [0] * 3
    with pytest.raises(RunNotFound):
        await user.run(run_id)


async def test_a_fork_that_shows_nothing_of_another_fork_does_not_keep_it(user: User, database: Database) -> None:
    await told(user, "c1", "q0", "a0")
    one = (await fork(user, "c1")).conversation_id
    await told(user, one, "q1", "a1")
    two = (await fork(user, one, 2)).conversation_id
    await age(database, "c1", one)
    assert {*await listed(user)} == {"c1", two}
    assert await texts(user, two) == [(1, "q0"), (2, "a0")]


async def test_what_a_summary_replaced_is_kept_for_forks_from_before_it(user: User, database: Database) -> None:
    await told(user, "c1", "q0", "a0")
    made = (await fork(user, "c1")).conversation_id
    owner = await user.start("q1", conversation_id="c1")
    await owner.commit(messages=[said("short", role=message_pb2.ROLE_SUMMARY, summarised_to_number=2), said("a1")])
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
    # What stands there is the answer to nothing that is left.
    assert [m.text for m in (await loaded(user, behind)).messages] == ["q1", "short", "a1"]


async def test_what_was_erased_is_gone_from_the_forks(user: User, database: Database) -> None:
    """The rule for whoever erases: empty the segments that name the conversation, then remove it."""
    await told(user, "c1", "q0", "a0")
    one = (await fork(user, "c1")).conversation_id
    await told(user, one, "q1", "a1")
    for statement in (
        "UPDATE job_store.conversation_segments SET source_conversation_id = '' WHERE source_conversation_id = 'c1'",
        "DELETE FROM job_store.messages WHERE conversation_id = 'c1'",
        "DELETE FROM job_store.conversations WHERE conversation_id = 'c1'",
    ):
        await database.execute(statement)
    assert await texts(user, one) == [(3, "q1"), (4, "a1")]
    two = await fork(user, one)
    assert (two.forked_number, await texts(user, two.conversation_id)) == (4, [(3, "q1"), (4, "a1")])
    assert [m.text for m in (await loaded(user, two.conversation_id)).messages] == ["q1", "a1"]


async def test_forks_that_are_made_while_their_original_is_removed_have_all_or_are_refused(
    user: User, database: Database
) -> None:
    for number in range(10):
        conversation_id = f"c{number}"
        await told(user, conversation_id, "q", "a")
        await database.execute(
            "UPDATE job_store.conversations SET update_time = update_time - interval '31 days'"
            " WHERE conversation_id = $1",
            conversation_id,
        )
        made, _ = await asyncio.gather(fork(user, conversation_id), sweep(database), return_exceptions=True)
        if isinstance(made, conversation_pb2.Conversation):
            assert await texts(user, made.conversation_id) == [(1, "q"), (2, "a")]
        else:
            assert isinstance(made, ConversationNotFound | ForkPointOpen)


async def test_a_fork_has_all_of_its_past_when_retention_comes_between(
    replica: Replica, user: User, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is read before the transaction that makes the fork."""
    await told(user, "c1", "q0", "a0")
    owner = await user.start("q1", conversation_id="c1")
    await owner.commit(messages=[said("short", role=message_pb2.ROLE_SUMMARY, summarised_to_number=2), said("a1")])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    for table in ("messages", "runs"):
        await database.execute(f"UPDATE job_store.{table} SET create_time = create_time - interval '31 days'")  # noqa: S608
    await database.execute("UPDATE job_store.runs SET end_time = end_time - interval '31 days'")
    commit = replica.ledger.group_commit.run

    async def swept_before(*arguments: Any, **named: Any) -> Any:
        await sweep(database)
        return await commit(*arguments, **named)

    monkeypatch.setattr(replica.ledger.group_commit, "run", swept_before)
    with pytest.raises(ForkPointOpen, match="removed"):
        await fork(user, "c1", 2)
    assert await listed(user) == ["c1"]


async def test_a_conversation_without_a_past_is_read_as_before(user: User) -> None:
    conversation_id = await answered(user, "q", "a")
    found = await get(user, conversation_id=conversation_id)
    assert (found.forked_conversation_id, found.forked_number) == ("", 0)


async def test_a_fork_has_the_images_of_its_past_for_workers_and_says_so_to_everybody_else(user: User) -> None:
    image = message_pb2.ImagePart(data=b"image", media_type="image/png", size_bytes=5)
    owner = await user.start("", parts=[message_pb2.Part(image=image)], conversation_id="c")
    await owner.commit(messages=[said("A dot.")])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    made = await fork(user, "c")
    first = (await loaded(user, made.conversation_id)).messages[0]
    assert (first.role, first.parts[0].image.data) == (message_pb2.ROLE_USER_EXTENDED, b"image")
    request = pb.ListMessagesRequest(store_id=user.store_id, user_id=user.user_id, conversation_id=made.conversation_id)
    shown = (await user.stub.ListMessages(request)).messages[0]
    assert (shown.role, shown.parts[0].image.data, shown.parts[0].image.size_bytes) == (message_pb2.ROLE_USER, b"", 5)
