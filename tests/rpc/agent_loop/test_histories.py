"""A run loaded with a kept history has the same state as one loaded completely, on a real job-store and database."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pawl.agent_loop.loop.histories import IDLE_SECONDS_MAX
from pawl.agent_loop.loop.ledger import LEDGER_MESSAGE_BYTES_MAX, WorkerLedgerClient
from pawl.agent_loop.loop.ports import Claim
from pawl.agent_loop.loop.rules.message import Message
from pawl.chassis.ids import WorkerId
from pawl.chassis.rpc.client import open_channel
from pawl.event.v1 import call_pb2, conversation_pb2, message_pb2, run_pb2
from pawl.job_store.erasure.store.retention import PostgresRetention
from tests.rpc.job_store.conftest import DAY_SECONDS, Replica, database, replica, start
from tests.rpc.job_store.test_erasures import Log, erase, erasing, sweep_all
from tests.rpc.job_store.user import Owner, User, result

__all__ = ["database", "replica", "start"]

ASSISTANT, SUMMARY = message_pb2.ROLE_ASSISTANT, message_pb2.ROLE_SUMMARY
IMAGE = message_pb2.Part(image=message_pb2.ImagePart(data=b"pixels", media_type="image/png"))
REFUSED = run_pb2.RunFailure(failure_class=run_pb2.FAILURE_CLASS_PROVIDER, reason="PROVIDER_REFUSED")
SUCCEEDED = call_pb2.CALL_STATE_SUCCEEDED
MEGABYTE = '"' + "x" * 1_000_000 + '"'


class Worker:
    """A worker that keeps histories. It compares each load with that of a client that has kept no history."""

    def __init__(self, channel: Any, replica: Replica) -> None:
        self.now = 0.0
        self.channel = channel
        self._ledger = WorkerLedgerClient(channel, lambda: self.now)
        self.replica = replica
        self.users = {name: User(replica.stub, user_id=name) for name in ("ann", "bob")}
        self._read: dict[int, Message] = {}
        # Number of kept messages in the last load.
        self.kept = 0

    async def begin(self, text: str = "hello", user_id: str = "ann", **fields: Any) -> tuple[Owner, Claim]:
        """Start a run, claim it and compare its state."""
        user = self.users[user_id]
        await user.submit(text, **fields)
        (claim,) = await self.claim()
        owner = user.owner(claim.key.run_id, claim.epoch)
        await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
        await self.compare(claim)
        return owner, claim

    async def claim(self) -> Sequence[Claim]:
        claims, _ = await self._ledger.claim(WorkerId("w1"), runs_max=1, lease_seconds=300)
        return list(claims)

    async def compare(self, claim: Claim) -> None:
        found = (await self._ledger.load(claim)).state
        whole = (await WorkerLedgerClient(self.channel).load(claim)).state
        assert found.messages == whole.messages
        assert list(found.calls.items()) == list(whole.calls.items())
        self.kept = sum(id(message) in self._read for message in found.messages)
        self._read |= {id(message): message for message in found.messages}

    async def converse(self, **fields: Any) -> None:
        """Complete a run with one call."""
        owner, _ = await self.begin(**fields)
        await settle(owner)
        await end(owner)


async def ask(owner: Owner, round_: int = 1) -> None:
    call_id = f"call_{owner.run_id}_{round_}"
    await owner.commit(
        messages=[message_pb2.Message(role=ASSISTANT, text="Let me see.", call_ids=[call_id])],
        calls=[owner.call(call_id, call_pb2.CALL_STATE_RUNNING, attempt=1, round=round_)],
    )


async def settle(owner: Owner, round_: int = 1, content: str = '"found"') -> None:
    await ask(owner, round_)
    call_id = f"call_{owner.run_id}_{round_}"
    await owner.commit(calls=[owner.call(call_id, SUCCEEDED, attempt=1, round=round_, result=result(content))])


async def end(owner: Owner, text: str = "Done.") -> None:
    await owner.commit(messages=[message_pb2.Message(role=ASSISTANT, text=text)])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)


@pytest.fixture
async def worker(replica: Replica, tmp_path: Path) -> AsyncIterator[Worker]:
    async with open_channel(f"unix:{tmp_path}/1", message_bytes_max=LEDGER_MESSAGE_BYTES_MAX, batches=True) as channel:
        yield Worker(channel, replica)


class Game:
    """Random actions in conversations of two users and their forks.

    `kept` counts messages that were not loaded again.
    """

    def __init__(self, worker: Worker, seed: int) -> None:
        self._worker = worker
        self._chance = random.Random(seed)
        self._ids = ["c0", "c1"]
        self._shared = set[str]()
        self._number = 0
        self.kept = 0

    async def play(self) -> None:
        moves = [*[self.run] * 14, self.fork, *[self.share] * 2, self.sweep, self.erase]
        await self._chance.choice(moves)()

    async def run(self) -> None:
        chance = self._chance
        where = chance.choice(self._ids)
        user_id = chance.choice(["ann", "ann", "bob"]) if where in self._shared else "ann"
        parts = [IMAGE] if chance.random() < 0.1 else []
        text = "" if parts else f"question {self._number}"
        self._number += 1
        owner, claim = await self._worker.begin(text, user_id, parts=parts, conversation_id=where)
        self.kept += self._worker.kept
        for round_ in range(1, chance.choice([1, 1, 2, 3])):
            await settle(owner, round_)
            await self._worker.compare(claim)
        match chance.choice(["answer", "answer", "answer", "late", "fail", "refuse", "summarise"]):
            case "late":
                await ask(owner, 9)
                await self._worker.compare(claim)
                call_id = f"call_{owner.run_id}_9"
                await owner.commit(calls=[owner.call(call_id, SUCCEEDED, attempt=1, round=9, result=result('"late"'))])
                await self._worker.compare(claim)
                await end(owner)
            case "refuse" | "fail" as how:
                failure = REFUSED if how == "refuse" else run_pb2.RunFailure(reason="INTERNAL")
                await owner.commit(state=run_pb2.RUN_STATE_FAILED, failure=failure)
            case "summarise":
                to_number = chance.choice([each.number for each in (await owner.load()).messages])
                summary = message_pb2.Message(role=SUMMARY, text="So far.", summarised_to_number=to_number)
                await owner.commit(messages=[summary])
                await self._worker.compare(claim)
                await end(owner)
            case _:
                await end(owner, f"answer {self._number}")

    async def fork(self) -> None:
        ann, source = self._worker.users["ann"], self._chance.choice(self._ids)
        messages = await ann.pages("ListMessages", "messages", conversation_id=source) if self._number else []
        answers = [each.number for page in messages for each in page if each.text.startswith(("answer", "Done"))]
        if answers:
            fields = {"conversation_id": source, "number": self._chance.choice(answers)}
            self._ids.append((await ann.ask("ForkConversation", **fields)).conversation.conversation_id)

    async def share(self) -> None:
        ann, where = self._worker.users["ann"], self._chance.choice(self._ids)
        sharing = self._chance.choice([conversation_pb2.SHARING_WRITE, conversation_pb2.SHARING_PRIVATE])
        if await self._exists(where):
            await ann.ask("UpdateConversation", conversation_id=where, sharing=sharing)
            is_shared = sharing == conversation_pb2.SHARING_WRITE
            self._shared = self._shared | {where} if is_shared else self._shared - {where}

    async def sweep(self) -> None:
        """Remove the messages and runs that summaries cover, as if all of them were old."""
        database = self._worker.replica.database
        for table, column in (("messages", "create_time"), ("runs", "create_time"), ("runs", "end_time")):
            await database.execute(f"UPDATE job_store.{table} SET {column} = {column} - interval '31 days'")  # noqa: S608
        while await PostgresRetention(database).remove_summarised(older_than_seconds=DAY_SECONDS, rows_max=100):
            pass

    async def erase(self) -> None:
        where = self._chance.choice(self._ids)
        if len(self._ids) > 2 and await self._exists(where):
            await erase(self._worker.replica, where)
            await sweep_all(erasing(self._worker.replica, Log()))
            self._ids.remove(where)

    async def _exists(self, conversation_id: str) -> bool:
        statement = "SELECT EXISTS (SELECT FROM job_store.conversations WHERE conversation_id = $1 AND user_id <> '')"
        return bool(await self._worker.replica.database.fetchval(statement, conversation_id))


@pytest.mark.parametrize("seed", range(2))
async def test_continued_history_equals_the_history_loaded_whole(worker: Worker, seed: int) -> None:
    game = Game(worker, seed)
    for _ in range(60):
        await game.play()
    assert game.kept > 50


async def test_results_left_out_of_a_whole_history_are_also_left_out_of_a_continued_one(worker: Worker) -> None:
    for number in range(18):
        owner, claim = await worker.begin(conversation_id="c")
        assert (worker.kept > 0) is (1 < number < 17)
        await settle(owner, content=MEGABYTE)
        await worker.compare(claim)
        await end(owner)


async def test_the_history_of_a_restored_database_is_loaded_again(worker: Worker) -> None:
    """The new messages have numbers that other messages had before the restore."""
    for _ in range(3):
        await worker.converse(conversation_id="c")
    await worker.replica.database.execute("DELETE FROM job_store.messages WHERE number > 3")
    await worker.replica.database.execute("UPDATE job_store.conversations SET last_number = 3")
    for _ in range(2):
        await Worker(worker.channel, worker.replica).converse(text="another", conversation_id="c")
    await worker.converse(conversation_id="c")


async def test_unused_history_is_forgotten(worker: Worker) -> None:
    await worker.converse(conversation_id="c")
    await worker.converse(conversation_id="c")
    await worker.converse(conversation_id="c")
    assert worker.kept == 3
    worker.now += IDLE_SECONDS_MAX
    await worker.converse(conversation_id="c")
    assert worker.kept == 0


async def test_least_recently_used_history_is_forgotten_first(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    # Each history has three kept messages and a call when it is used again, and two of them fit.
    monkeypatch.setattr("pawl.agent_loop.loop.histories.BYTES_MAX", 15_000)
    for conversation_id in ("a", "b", "a", "b", "c", "c", "b", "a"):
        await worker.converse(conversation_id=conversation_id)
        kept.append(worker.kept)
    assert kept == [0, 0, 0, 0, 0, 0, 3, 0]
