"""The worker's side of the ledger over gRPC, with the real loop, job-store and database.

The same run must leave the same log in the in-memory ledger, which validates that fake.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.agent_loop.api.ledger import PublicLedger, submission
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.drive import Drive
from pawl.agent_loop.loop.ledger import LEDGER_MESSAGE_BYTES_MAX, WorkerLedgerClient
from pawl.agent_loop.loop.ports import Claim
from pawl.agent_loop.loop.rules.fact import Cancel
from pawl.agent_loop.loop.rules.options import AskedOptions
from pawl.agent_loop.loop.rules.run import RunOptions
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, CredentialId, RunId, RunKey, StoreId, UserId, WorkerId
from pawl.chassis.rpc.client import open_channel
from pawl.errors import CallNotFound
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.values import ENDED, CallState, MessagePolicy, Question, RunState, StopCause
from tests.fakes.loop_world import World
from tests.fakes.manual_clock import run_in_virtual_time
from tests.fakes.model import calls, says
from tests.fakes.registry import tool
from tests.rpc.job_store.conftest import Replica, database, replica, start

__all__ = ["database", "replica", "start"]

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
        command = ledger_pb2.Command(command_id=f"cmd_{call.call_id}")
        match call.state:
            case call_pb2.CALL_STATE_AWAITING_APPROVAL:
                command.decision.kind = call_pb2.DECISION_KIND_APPROVE
                command.decision.digest = call.approval.digest
                command.decision.call_id = call.call_id
            case call_pb2.CALL_STATE_ASKED:
                command.decision.kind = call_pb2.DECISION_KIND_ANSWER
                command.decision.answer = "blue"
                command.decision.call_id = call.call_id
            case _:
                command.tool_result.result.content_json = b'"shown"'
                command.tool_result.call_id = call.call_id
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

    assert run.output_text == "All is done."
    assert run.usage.model_calls == 3
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
    assert loaded.loop == written.loop
    assert len(loaded.commands) == 2
    # The ledger stores the author of each message.
    messages = [replace(message, run_id=key.run_id, user_id="") for message in loaded.messages]
    assert messages == [replace(message, run_id=key.run_id, user_id="") for message in written.messages]
    times = ("create_time", "start_time", "end_time", "deadline_time")
    given: dict[str, Any] = {**dict.fromkeys(times), "offer": None, "approval": None}
    for call in loaded.calls.values():
        same = written.calls[call.call_id]
        assert replace(call, **given) == replace(same, **given)
        assert (call.approval is None) == (same.approval is None)
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
    for user_id, call_id in (("another", written.call_id), (USER, "call_of_nobody")):
        with pytest.raises(CallNotFound):
            await client.call(StoreId(STORE), UserId(user_id), CallId(call_id))


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
