"""Runs that workers load and drive on a real job-store and database, with and without a kept history."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.agent_loop.api.ledger import PublicLedger, submission
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.drive import Drive
from pawl.agent_loop.loop.histories import IDLE_SECONDS_MAX
from pawl.agent_loop.loop.ledger import LEDGER_MESSAGE_BYTES_MAX, WorkerLedgerClient
from pawl.agent_loop.loop.ports import Claim
from pawl.agent_loop.loop.rules.fact import Cancel
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.options import AskedOptions
from pawl.agent_loop.loop.rules.run import RunOptions
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, CredentialId, RunId, RunKey, StoreId, UserId, WorkerId
from pawl.chassis.rpc.client import open_channel
from pawl.errors import CallNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, event_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.values import ENDED, CallState, MessagePolicy, Question, RunState, StopCause
from tests.fakes.loop_world import World
from tests.fakes.manual_clock import run_in_virtual_time
from tests.fakes.model import calls, says
from tests.fakes.registry import tool
from tests.rpc.job_store.conftest import DAY_SECONDS, Replica, database, replica, start
from tests.rpc.job_store.test_erasures import Log, erase, erasing, sweep_all
from tests.rpc.job_store.user import Owner, User, result
from tests.rpc.refusals import raises

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
        assert (found.messages, list(found.calls.items())) == (whole.messages, list(whole.calls.items()))
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
        await self._chance.choice([*[self.run] * 14, self.fork, *[self.share] * 2, self.sweep, self.erase])()

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
        asked: Any = {"store_id": "acme", "older_than_seconds": DAY_SECONDS, "rows_max": 100}
        while await PostgresRetention(database).remove_summarised(**asked):
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
    for _ in range(3):
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


VERDICTS = {
    "write": tool(),
    "look": tool(effect="READ_ONLY", resource_keys=("a", "b")),
    "mail": tool("APPROVE", digest="d" * 64, preview="To: Ann", approval_cause="category SENSITIVE"),
    "show": tool("OFFER", context="FRONTEND"),
    "ask": tool("ASK", context="HUMAN", question=Question(question="Which?", options=("red", "blue"))),
}
STORE, USER = "store", "user"

# The ledger stores times in microseconds, which a float represents only approximately.
TICK_SECONDS = 2e-6


def world() -> World:
    """A world whose model gives the same answers whichever ledger it uses."""
    found = World(
        VERDICTS,
        [
            calls('write {"n":1}', 'look {"n":1}', 'mail {"n":1}', 'show {"n":1}', text="Let me see."),
            calls('ask {"n":1}', 'write {"n":2}'),
            says("All is done."),
        ],
        seconds=0.01,
    )
    found.model.by_round = True
    return found


@pytest.fixture
async def client(replica: Replica, tmp_path: Path) -> AsyncIterator[WorkerLedgerClient]:
    async with open_channel(f"unix:{tmp_path}/1", message_bytes_max=LEDGER_MESSAGE_BYTES_MAX, batches=True) as channel:
        yield WorkerLedgerClient(channel)


async def submit(replica: Replica, options: RunOptions | None = None) -> RunKey:
    request = ledger_pb2.SubmitMessageRequest(
        store_id=STORE,
        user_id=USER,
        text="hello",
        options=wire.OPTIONS.write(options or RunOptions()),
        policy=ledger_pb2.MESSAGE_POLICY_QUEUE,
    )
    response = await replica.stub.SubmitMessage(request)
    return RunKey(StoreId(STORE), RunId(response.run.run_id))


async def claim(client: WorkerLedgerClient) -> Claim:
    while True:
        claims, _ = await client.claim(WorkerId("worker"), runs_max=1, lease_seconds=10)
        if claims:
            return next(iter(claims))
        await asyncio.sleep(0.01)


async def respond(replica: Replica, key: RunKey) -> None:
    run = (await replica.stub.GetRun(ledger_pb2.GetRunRequest(store_id=STORE, run_id=key.run_id))).run
    for call in run.pending_calls:
        kind: dict[str, Any] = {"tool_result": {"result": {"content_json": b'"shown"'}}}
        if call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
            kind = {"decision": {"kind": call_pb2.DECISION_KIND_APPROVE, "digest": call.approval.digest}}
        elif call.state == call_pb2.CALL_STATE_ASKED:
            kind = {"decision": {"kind": call_pb2.DECISION_KIND_ANSWER, "answer": "blue"}}
        ((name, fields),) = kind.items()
        command = ledger_pb2.Command(command_id=f"cmd_{call.call_id}", **{name: fields | {"call_id": call.call_id}})
        request = ledger_pb2.SendCommandRequest(store_id=STORE, run_id=key.run_id, user_id=USER, command=command)
        response = await replica.stub.SendCommand(request)
        assert response.outcome == ledger_pb2.COMMAND_OUTCOME_ACCEPTED, response.message


async def log_of(replica: Replica, key: RunKey) -> list[str]:
    """Return the types of all events except output, which depends on the clock."""
    request = ledger_pb2.ListEventsRequest(store_id=STORE, user_id=USER, run_id=key.run_id, events_max=1000)
    response = await replica.stub.ListEvents(request)
    types = (event_pb2.RunEvent.FromString(event).type for event in response.events)
    return [type_ for type_ in types if type_ != "output.delta"]


def log_in_memory() -> list[str]:
    async def main() -> list[str]:
        found = world()
        await found.finish(key := found.ledger.submit("hello"))
        return [event.type for event in found.ledger.log(key) if event.type != "output.delta"]

    return run_in_virtual_time(main())


async def test_run_completes_with_the_same_log_as_in_memory(replica: Replica, client: WorkerLedgerClient) -> None:
    key = await submit(replica)
    dependencies = dataclasses.replace(world().dependencies, ledger=client)

    state = RunState.QUEUED
    while state not in ENDED:
        await Drive(await claim(client), dependencies).run()
        await respond(replica, key)
        run = (await replica.stub.GetRun(ledger_pb2.GetRunRequest(store_id=STORE, run_id=key.run_id))).run
        state = RunState(run.state)

    assert (run.output_text, run.usage.model_calls) == ("All is done.", 3)
    assert await log_of(replica, key) == await asyncio.to_thread(log_in_memory)


async def test_next_worker_reads_exactly_what_the_last_one_wrote(replica: Replica, client: WorkerLedgerClient) -> None:
    """C9: the state of a run survives the round trip through the ledger."""
    options = RunOptions(instructions="Be brief.", temperature=0.5, tool_names=("write", "look", "mail", "show"))
    key = await submit(replica, options)
    found = world()
    drive = Drive(await claim(client), dataclasses.replace(found.dependencies, ledger=client))
    await drive.run()
    await respond(replica, key)

    loaded = (await client.load(await claim(client))).state

    written = drive._base
    assert loaded.run.options == options
    assert (loaded.run.round, loaded.run.tools, loaded.run.usage) == (1, written.run.tools, written.run.usage)
    assert (loaded.loop, len(loaded.commands)) == (written.loop, 2)
    # The ledger stores the author of each message.
    messages = [replace(message, run_id=key.run_id, user_id="") for message in loaded.messages]
    assert messages == [replace(message, run_id=key.run_id, user_id="") for message in written.messages]
    times = ("create_time", "start_time", "end_time", "deadline_time")
    given: dict[str, Any] = {**dict.fromkeys(times), "offer": None, "approval": None}
    for call in loaded.calls.values():
        same = written.calls[call.call_id]
        assert (replace(call, **given), call.approval is None) == (replace(same, **given), same.approval is None)
        assert (call.deadline_time is None) == (same.deadline_time is None)
        assert call.deadline_time is None or abs(call.deadline_time - (same.deadline_time or 0)) < TICK_SECONDS
    states = {call.tool_name: call.state for call in loaded.calls.values()}
    assert states["mail"] is CallState.AWAITING_APPROVAL
    assert states["show"] is CallState.OFFERED


async def test_a_call_is_read_by_its_id_and_only_for_its_user(replica: Replica, client: WorkerLedgerClient) -> None:
    """A program may name calls that were not loaded with the claim."""
    await submit(replica)
    drive = Drive(await claim(client), dataclasses.replace(world().dependencies, ledger=client))
    await drive.run()
    written = next(call for call in drive._base.calls.values() if call.tool_name == "write")

    read = await client.call(StoreId(STORE), UserId(USER), written.call_id)

    assert (read.state, read.result, read.arguments_json) == (written.state, written.result, written.arguments_json)
    await raises(
        CallNotFound,
        *(
            client.call(StoreId(STORE), UserId(user_id), CallId(call_id))
            for user_id, call_id in (("another", written.call_id), (USER, "call_of_nobody"))
        ),
    )


async def test_a_renewal_returns_the_held_runs_and_marks_those_with_commands(
    replica: Replica, client: WorkerLedgerClient
) -> None:
    key = await submit(replica)
    held = await claim(client)
    assert (await client.renew(WorkerId("worker"), lease_seconds=10)).with_commands == ()
    command = ledger_pb2.Command(command_id="cmd_1", cancel=ledger_pb2.CancelCommand(cause=run_pb2.STOP_CAUSE_USER))
    await replica.stub.SendCommand(
        ledger_pb2.SendCommandRequest(store_id=STORE, run_id=key.run_id, user_id=USER, command=command)
    )

    renewal = await client.renew(WorkerId("worker"), lease_seconds=10)

    assert (renewal.held, renewal.with_commands) == ((held,), (held,))
    (read,) = (await client.read_inbox(held, (await client.load(held)).state)).commands
    assert read.kind == Cancel(cause=StopCause.USER)
    await client.release(WorkerId("worker"))
    assert (await client.renew(WorkerId("worker"), lease_seconds=10)).held == ()


# The roles of a user come from the credential and pass through the ledger to the registry.


MEMBER = Principal(store_id=StoreId("acme"), user_id=UserId("ann"), roles=frozenset({"member"}))
ADMIN = Principal(store_id=StoreId("acme"), user_id=UserId("ann"), roles=frozenset({"member", "admin"}))


@pytest.fixture
async def clients(replica: Replica, tmp_path: Path) -> AsyncIterator[tuple[PublicLedger, WorkerLedgerClient]]:
    async with open_channel(f"unix:{tmp_path}/1", message_bytes_max=LEDGER_MESSAGE_BYTES_MAX, batches=True) as channel:
        yield PublicLedger(channel), WorkerLedgerClient(channel)


def message(
    caller: Principal, request_id: str = "", *, policy: MessagePolicy = MessagePolicy.QUEUE
) -> ledger_pb2.SubmitMessageRequest:
    return submission(
        caller,
        asked_options=AskedOptions(),
        options=RunOptions(),
        request_id=request_id,
        conversation_id="conv",
        text="hello",
        policy=policy.value,
    )


async def test_a_run_and_its_decisions_record_separate_credentials(
    clients: tuple[PublicLedger, WorkerLedgerClient],
) -> None:
    """HITL-4: the ledger stores both and sends them to the loop.

    A run keeps the credential that started it, even when messages with other credentials join it.
    """
    public, worker = clients
    mine = dataclasses.replace(MEMBER, credential_id=CredentialId("key_1"), delegate_user_id=UserId("shop"))
    created = (await public.submit_message(message(mine, "r1"))).run
    other = dataclasses.replace(MEMBER, credential_id=CredentialId("key_2"))
    again = (await public.submit_message(message(other, "r1"))).run
    assert (again.run_id, again.credential_id, again.delegate_user_id) == (created.run_id, "key_1", "shop")
    assert (await public.submit_message(message(other, policy=MessagePolicy.STEER))).steered
    (claim,), _ = await worker.claim(WorkerId("worker"), runs_max=1, lease_seconds=10)
    loaded = (await worker.load(claim)).state
    assert (loaded.run.credential_id, loaded.run.delegate_user_id) == ("key_1", "shop")
    (steer,) = loaded.commands
    assert (steer.user_id, steer.credential_id, steer.delegate_user_id) == ("ann", "key_2", "")


async def test_repeated_or_joining_messages_never_widen_the_roles_of_a_run(
    clients: tuple[PublicLedger, WorkerLedgerClient],
) -> None:
    """I2: if the roles of a key change between two attempts, the second attempt starts no run."""
    public, worker = clients
    first = (await public.submit_message(message(MEMBER, "r1"))).run
    assert (await public.submit_message(message(ADMIN, "r1"))).run.run_id == first.run_id
    assert (await public.submit_message(message(ADMIN, policy=MessagePolicy.STEER))).steered
    (claim,), _ = await worker.claim(WorkerId("worker"), runs_max=1, lease_seconds=10)
    assert (await worker.load(claim)).state.run.user_roles == ("member",)
