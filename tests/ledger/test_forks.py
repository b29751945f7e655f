"""Forks and imports on the simulated store and on the real one: the same rows, and the same is read of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any, TypeVar

import pytest

from pawl.chassis.database import Database
from pawl.chassis.ids import ConversationId, RequestId, RunKey, WorkerId
from pawl.errors import PawlError
from pawl.event.v1 import message_pb2
from pawl.job_store.app.forks import AskedFork, Forks
from pawl.job_store.app.group_commit import GroupCommit
from pawl.job_store.app.ports import Operation
from pawl.job_store.app.reading import RunFilter
from pawl.job_store.domain.calls import CallChange
from pawl.job_store.domain.commit import Commit, NewMessage
from pawl.job_store.domain.conversations import key_hash
from pawl.job_store.domain.imports import ImportConversation
from pawl.job_store.domain.rows import ConversationKey
from pawl.job_store.domain.states import CallState, RunState
from pawl.job_store.rpc.messages import head_of
from tests.ledger.model import LIMITS
from tests.ledger.product import Tagged
from tests.ledger.stores import MemoryStore, PostgresStore, Store, stop_clock
from tests.unit.job_store.world import STORE, USER, change, submission

T = TypeVar("T")

_WALKS = 4
_STEPS = 25
_LIMITS = LIMITS[0] | {"per_store": 100, "per_user": 100}
_ROLES = (message_pb2.ROLE_ASSISTANT, message_pb2.ROLE_ASSISTANT, message_pb2.ROLE_USER, message_pb2.ROLE_SUMMARY)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with Database(database_url, application_name="test") as database:
        await database.migrate("job_store", "pawl.job_store.adapters.sql.migrations")
    await stop_clock(database_url)
    async with Database(database_url, application_name="one") as database:
        yield database


class Player:
    """Does on one store what it is told; ids come from the number of the step."""

    def __init__(self, store: Store, commit: GroupCommit) -> None:
        self.store = store
        self.tag = ""
        self._commit = commit
        self._forks = Forks(store.reads, store.conversations, self, head_of)  # type: ignore[arg-type]  # as it is used

    async def run(self, operation: Operation[T], **_: object) -> T:
        """Stand in for the group commit."""
        return await self._commit.run(Tagged(tag=self.tag, operation=operation), size_bytes=1)

    async def play(self, step: int, name: str, *arguments: Any) -> Any:
        """Do one step; returns what it gave, or why it was refused."""
        self.tag = str(step)
        await self.store.pass_time(1.0)
        try:
            return await getattr(self, name)(*arguments)
        except PawlError as error:
            return error.reason, error.metadata

    async def ends(self, conversation_id: str, kinds: Sequence[int], summarised_to: int, calls: int) -> None:
        """A run that writes some messages, of which one may ask for calls, and ends, or goes on with a call open."""
        asked_for = submission(conversation_id=conversation_id, message=b"", steer=b"", interrupt=b"")
        submitted = await self.run(asked_for)
        key: RunKey = submitted.run.key
        claimed = await self.store.leases.claim(WorkerId("w"), runs_max=1, lease_seconds=30)
        if [each.run_id for each in claimed] != [key.run_id]:
            return
        asked = [f"call_{self.tag}_{n}" for n in range(calls)]
        messages = tuple(_message(_ROLES[kind], summarised_to, asked if n == 0 else []) for n, kind in enumerate(kinds))
        made = tuple(change(call_id, CallState.FAILED, index=n, result=b"") for n, call_id in enumerate(asked))
        begun = Commit(
            run=key,
            epoch=claimed[0].epoch,
            commit_id="c1",
            state=RunState.RUNNING,
            messages=messages,
            calls=made if summarised_to % 2 else _opened(made),
        )
        await self.run(begun)
        if summarised_to % 2 or not made:
            ended = Commit(run=key, epoch=claimed[0].epoch, commit_id="c2", state=RunState.COMPLETED)
            await self.run(ended)

    async def forks(self, conversation_id: str, number: int) -> Any:
        asked = AskedFork(
            store_id=STORE,
            user_id=USER,
            request_id=RequestId(""),
            fingerprint=b"f",
            conversation_id=ConversationId(conversation_id),
            number=number,
        )
        return await self._forks.fork(asked, size_bytes=1)

    async def imports(self, count: int, key: str) -> Any:
        asked = f"imported_{self.tag}"
        return await self.run(
            ImportConversation(
                store_id=STORE,
                user_id=USER,
                request_id=RequestId(""),
                fingerprint=b"f",
                messages=tuple(_message(_ROLES[0], 0, [asked] if n == 0 else []) for n in range(count)),
                calls=(change(asked, CallState.SUCCEEDED, result=b""),),
                key_hash=key_hash(STORE, USER, key) if key else b"",
            )
        )

    async def reads(self) -> list[Any]:
        """Everything that can be read of all conversations."""
        found: list[Any] = []
        tables = await self.store.tables()
        for row in sorted(tables.conversations.values(), key=lambda row: row.conversation_id):
            pages = [
                await self.store.reads.messages(STORE, USER, row.conversation_id, after=after, rows_max=rows_max)
                for after, rows_max in ((0, 3), (2, 100), (row.past_number, 100))
            ]
            segments = await self.store.conversations.segments(row)
            runs = await self.store.reads.runs(
                STORE, USER, RunFilter(conversation_id=row.conversation_id), after=None, rows_max=100
            )
            found += [row, pages, segments, runs]
        for run in sorted(tables.runs.values(), key=lambda run: run.run_id):
            if run.worker_id:
                found.append(await self.store.reads.load(run.key, run.epoch))
        return [*found, {key: each for key, each in tables.segments.items() if each}]


def _message(role: Any, summarised_to: int, call_ids: Sequence[str]) -> NewMessage:
    is_summary = role == message_pb2.ROLE_SUMMARY
    body = message_pb2.Message(role=role, call_ids=call_ids).SerializeToString()
    return NewMessage(message_id="", summarised_to=summarised_to if is_summary else 0, body=body)


def _opened(made: Sequence[CallChange]) -> tuple[CallChange, ...]:
    return tuple(change(each.call_id, CallState.RUNNABLE, index=each.index) for each in made)


async def test_forks_and_imports_are_alike_on_both_stores(database: Database) -> None:
    for seed in range(_WALKS):
        chance = Random(seed)
        real = PostgresStore(database, _LIMITS)
        await real.wipe()
        simulated = MemoryStore(_LIMITS)
        async with real.open() as one, simulated.open() as two:
            players = Player(simulated, two), Player(real, one)
            made = 0
            for step in range(_STEPS):
                found = (await simulated.tables()).conversations
                known = sorted({key.conversation_id for key in found}) or [ConversationId("c0")]
                last = found.get(ConversationKey(STORE, chance.choice(known)))
                kinds = [chance.randrange(len(_ROLES)) for _ in range(chance.randint(1, 4))]
                summarised_to = chance.randint(1, max(1, last.last_number if last else 1))
                moves: list[tuple[Any, ...]] = [
                    ("ends", chance.choice(known), kinds, summarised_to, chance.randint(0, 2)),
                    ("ends", f"c{step}", kinds, 1, chance.randint(0, 1)),
                    ("forks", chance.choice(known), chance.choice([0, 0, *range(1, 9)])),
                    ("forks", chance.choice(known), chance.choice([0, 0, *range(1, 9)])),
                    ("imports", chance.randint(1, 4), chance.choice(["", "k"])),
                ]
                name, *arguments = chance.choice(moves)
                answers = [await player.play(step, name, *arguments) for player in players]
                assert answers[0] == answers[1], (seed, step, name, arguments)
                assert await players[0].reads() == await players[1].reads(), (seed, step, name, arguments)
                made += name == "forks" and not isinstance(answers[0], tuple)
            assert made
