"""Forks on PostgreSQL: what they show, how they go on, and how long their past is kept."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.domain import history
from pawl.agent_loop.domain.state import State
from pawl.chassis.clock import SystemClock
from pawl.chassis.database import Database
from pawl.chassis.rpc_client import translating
from pawl.errors import (
    ConversationErased,
    ConversationExists,
    ConversationNotFound,
    ForkPointOpen,
    InvalidField,
    RequestIdReused,
    RunNotFound,
)
from pawl.event.v1 import call_pb2, conversation_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.retention import PostgresRetention
from pawl.job_store.adapters.upkeep import PostgresLedgerStats
from pawl.job_store.app.sweeps import RetentionSweep
from pawl.job_store.domain.places import PlaceLimits
from tests.fakes.provider import check_history
from tests.rpc.job_store.conftest import RETENTION, Replica
from tests.rpc.job_store.test_conversations import get, listed, take_in
from tests.rpc.job_store.test_erasures import Log, erase, erasing, everything, swept
from tests.rpc.job_store.user import Owner, User, result


async def fork(user: User, conversation_id: str, number: int = 0, **fields: Any) -> Any:
    return (await user.ask("ForkConversation", conversation_id=conversation_id, number=number, **fields)).conversation


async def texts(user: User, conversation_id: str, page_size: int = 2) -> list[tuple[int, str]]:
    """Number and text of all messages, page by page."""
    pages = await user.pages("ListMessages", "messages", conversation_id=conversation_id, page_size=page_size)
    return [(message.number, message.text) for page in pages for message in page]


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


async def test_nothing_is_copied_and_the_past_stays_where_it_happened(user: User, database: Database) -> None:
    owner = await looked(user, "c1")
    await owner.commit(messages=[said("done")])
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


async def test_a_summary_counts_for_forks_behind_it(user: User) -> None:
    for number in range(2):
        await told(user, "c1", f"q{number}", f"a{number}")
    owner = await user.start("q2", conversation_id="c1")
    await owner.commit(messages=[said("short", role=message_pb2.ROLE_SUMMARY, summarised_to_number=3), said("a2")])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    before, behind = await fork(user, "c1", 4), await fork(user, "c1")
    assert [m.text for m in (await loaded(user, before.conversation_id)).messages] == ["q0", "a0", "q1", "a1"]
    assert [m.text for m in (await loaded(user, behind.conversation_id)).messages] == ["a1", "q2", "short", "a2"]


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


async def test_a_fork_has_the_images_of_its_past_for_workers_and_says_so_to_everybody_else(user: User) -> None:
    image = message_pb2.ImagePart(data=b"image", media_type="image/png", size_bytes=5)
    owner = await user.start("", parts=[message_pb2.Part(image=image)], conversation_id="c")
    await owner.commit(messages=[said("A dot.")])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    made = await fork(user, "c")
    first = (await loaded(user, made.conversation_id)).messages[0]
    assert (first.role, first.parts[0].image.data) == (message_pb2.ROLE_USER, b"image")
    shown = (await user.ask("ListMessages", conversation_id=made.conversation_id)).messages[0]
    assert (shown.role, shown.parts[0].image.data, shown.parts[0].image.size_bytes) == (message_pb2.ROLE_USER, b"", 5)


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
    made = await imported(user, past_of(user, title="Oslo", conversation_key="k"))
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
    made = await imported(user, past_of(user))
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
    made = await asyncio.gather(*(imported(user, past_of(user, f"x{number}", request_id="r1")) for number in range(4)))
    assert len({each.conversation_id for each in made}) == 1
    assert [await count(database, table) for table in ("conversations", "calls", "runs")] == [1, 1, 1]
    with pytest.raises(RequestIdReused):
        await imported(user, past_of(user, "y", request_id="r1", title="other"))


async def test_a_refused_import_leaves_nothing(user: User, database: Database) -> None:
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
        with pytest.raises(error):
            await imported(user, request)
    assert [await count(database, table) for table in ALL] == before


_WALKS = 3
_STEPS = 24


@dataclass
class Entry:
    """A message, the conversation that it was written in, and whether it is an answer."""

    number: int
    text: str
    written_in: str
    is_answer: bool


@dataclass
class Talk:
    """A conversation as one expects it."""

    conversation_id: str
    last_number: int = 0
    entries: list[Entry] = field(default_factory=list)

    def add(self, text: str, *, is_answer: bool) -> None:
        self.last_number += 1
        self.entries.append(Entry(self.last_number, text, self.conversation_id, is_answer))

    @property
    def told(self) -> list[tuple[int, str]]:
        return [(entry.number, entry.text) for entry in self.entries]


class Player:
    """Does one thing after the other, and keeps in mind what must be there."""

    def __init__(self, replica: Replica, user: User, seed: int) -> None:
        self.talks: list[Talk] = []
        self.erased: list[str] = []
        self._erased_count = 0
        self._replica = replica
        self._user = user
        self._chance = Random(seed)
        self._sweep = erasing(replica, Log())
        self._texts = (f"words{number}of{seed}x" for number in itertools.count(1))

    async def play(self) -> None:
        await self._chance.choice([self.runs, self.runs, self.forks, self.forks, self.imports, self.erases])()
        if self._chance.random() < 0.3:
            await self._sweep.sweep()

    async def runs(self) -> None:
        """A run looks something up, or does not, and answers, or does not."""
        talk = self._chance.choice([*self.talks, Talk("")])
        text = next(self._texts)
        owner = await self._user.start(text, conversation_id=talk.conversation_id)
        if not talk.conversation_id:
            talk.conversation_id = (await self._user.run(owner.run_id)).conversation_id
            self.talks.append(talk)
        talk.add(text, is_answer=False)
        loaded = await owner.load()
        assert [(message.number, message.text) for message in loaded.messages] == talk.told
        _check(loaded)
        if self._chance.random() < 0.5:
            text, call_id = next(self._texts), f"call_{owner.run_id}"
            call = owner.call(
                call_id, call_pb2.CALL_STATE_FAILED, result=result(f'"{next(self._texts)}"', is_error=True)
            )
            await owner.commit(
                messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text, call_ids=[call_id])],
                calls=[call],
            )
            talk.add(text, is_answer=True)
        if self._chance.random() < 0.8:
            text = next(self._texts)
            await owner.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text)])
            talk.add(text, is_answer=True)
        await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)

    async def imports(self) -> None:
        """A short history from elsewhere."""
        talk, number = Talk(""), next(self._texts)
        asked = call_pb2.Call(
            call_id=f"call_{number}",
            round=1,
            tool_name="gone",
            state=call_pb2.CALL_STATE_SUCCEEDED,
            proposed_arguments="{}",
            result=result(f'"{next(self._texts)}"'),
            imported=True,
        )
        every = [next(self._texts) for _ in range(3)]
        roles = message_pb2.ROLE_USER, message_pb2.ROLE_ASSISTANT, message_pb2.ROLE_ASSISTANT
        messages = [
            message_pb2.Message(role=role, text=text, imported=True) for role, text in zip(roles, every, strict=True)
        ]
        messages[1].call_ids.append(asked.call_id)
        talk.conversation_id = (
            await self._user.ask("ImportConversation", store_id="acme", user_id="ann", messages=messages, calls=[asked])
        ).conversation.conversation_id
        for text, role in zip(every, roles, strict=True):
            talk.add(text, is_answer=role == message_pb2.ROLE_ASSISTANT)
        self.talks.append(talk)

    async def forks(self) -> None:
        """A fork somewhere, or a refusal that names places where it can be made."""
        if not self.talks:
            return
        source = self._chance.choice(self.talks)
        places = {entry.number for entry in source.entries if entry.is_answer}
        number = self._chance.choice([0, self._chance.randint(1, source.last_number + 1)])
        place = number or max(places, default=0)
        if place not in places:
            with pytest.raises(ForkPointOpen) as refused:
                await fork(self._user, source.conversation_id, number)
            assert {*map(int, refused.value.metadata.values())} <= places
            return
        made = await fork(self._user, source.conversation_id, number)
        kept = [entry for entry in source.entries if entry.number <= place]
        self.talks.append(Talk(made.conversation_id, place, kept))

    async def erases(self) -> None:
        """A conversation goes, and what was written in it goes from all its forks."""
        if not self.talks:
            return
        gone = self.talks.pop(self._chance.randrange(len(self.talks)))
        await erase(self._replica, gone.conversation_id)
        self._erased_count += 1
        self.erased += [entry.text for entry in gone.entries if entry.written_in == gone.conversation_id]
        for talk in self.talks:
            talk.entries = [entry for entry in talk.entries if entry.written_in != gone.conversation_id]
        with pytest.raises((ConversationErased, ConversationNotFound)):
            await fork(self._user, gone.conversation_id)

    async def check(self) -> None:
        """All is read as it should be, and what was erased is nowhere."""
        for talk in self.talks:
            assert await texts(self._user, talk.conversation_id) == talk.told
        for _ in range(self._erased_count):
            await swept(self._sweep)
        left = await everything(self._replica.database)
        assert [line for line in left.splitlines() if any(text in line for text in self.erased)] == []
        for talk in self.talks:
            assert await texts(self._user, talk.conversation_id) == talk.told


def _check(loaded: pb.LoadRunResponse) -> None:
    """What the model would be given passes a strict check."""
    state = State(
        run=wire.RUN.read(loaded.run),
        messages=tuple(map(wire.MESSAGE.read, loaded.messages)),
        calls={call.call_id: call for call in map(wire.CALL.read, loaded.calls)},
    )
    check_history(history.of_run(state))


async def test_the_past_is_what_was_said_and_not_erased(replica: Replica, user: User) -> None:
    for seed in range(_WALKS):
        player = Player(replica, user, seed)
        for _ in range(_STEPS):
            await player.play()
        await player.check()
