"""People who decide, over the real ledger and two replicas: who may, how many, what they see (HITL-6, D6, D7)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.chassis.rpc_client import translating
from pawl.errors import PawlError
from pawl.event.v1 import call_pb2
from tests.system.agent_loop.conftest import Replica
from tests.system.agent_loop.worker import DIGEST, Worker

AWAITING, ASKED = call_pb2.CALL_STATE_AWAITING_APPROVAL, call_pb2.CALL_STATE_ASKED
OF_STORE = agent_pb2.PendingFilter(scope=agent_pb2.PENDING_SCOPE_STORE)
APPROVE, EDIT = call_pb2.DECISION_KIND_APPROVE, call_pb2.DECISION_KIND_EDIT


class Person:
    """A user of the test's store, who has all roles, as everybody without API keys."""

    def __init__(self, replica: Replica, store_id: str, name: str) -> None:
        self.stub = replica.stub
        self.metadata: Any = (("pawl-store", store_id), ("pawl-user", name))

    async def decide(self, run_id: str, call_id: str = "call_1", **fields: Any) -> str:
        """Decide; return what it came to: the receipt's status or the error's reason."""
        values: dict[str, Any] = {"call_id": call_id, "kind": APPROVE, "digest": DIGEST}
        decision = types_pb2.CallDecision(**(values | fields))
        request = agent_pb2.DecideRequest(request_id="mine", run_id=run_id, decision=decision)
        try:
            with translating():
                response = await self.stub.Decide(request, metadata=self.metadata)
        except PawlError as error:
            return error.reason
        self.run = response.run
        return types_pb2.ReceiptStatus.Name(response.receipt.status).removeprefix("RECEIPT_STATUS_")

    async def pending(self, wanted: agent_pb2.PendingFilter | None = None) -> list[call_pb2.Call]:
        request = agent_pb2.ListPendingRequest(filter=wanted)
        return list((await self.stub.ListPending(request, metadata=self.metadata)).calls)


@pytest.fixture
def people(replicas: list[Replica], store_id: str) -> dict[str, Person]:
    names = ("me", "cyd", "dan", "eve")
    return {name: Person(replicas[number % 2], store_id, name) for number, name in enumerate(names)}


async def test_two_approvals_at_once_count_both(people: dict[str, Person], worker: Worker) -> None:
    """D6. Both use the same request id: it is known for each of them."""
    run_id = await worker.add_run()
    await worker.add_call(run_id, "call_1", AWAITING, approvals_required=3)
    said = await asyncio.gather(*(people[name].decide(run_id) for name in ("cyd", "dan")))
    assert said == ["ACCEPTED", "ACCEPTED"]
    assert await people["me"].decide(run_id) == "PERMISSION_DENIED", "who started it is none of several who approve"
    (call,) = await people["me"].pending()
    assert {approval.user_id for approval in call.approval.approvals} == {"cyd", "dan"}
    assert not call.approval.HasField("decision")
    assert await people["cyd"].decide(run_id) == "DUPLICATE"
    assert await people["eve"].decide(run_id) == "ACCEPTED"
    assert not await people["me"].pending()


async def test_the_same_person_at_once_counts_once(
    people: dict[str, Person], replicas: list[Replica], store_id: str, worker: Worker
) -> None:
    """D6"""
    run_id = await worker.add_run()
    await worker.add_call(run_id, "call_1", AWAITING, approvals_required=2)
    tabs = [Person(replica, store_id, "cyd") for replica in replicas for _ in range(4)]
    requests = [
        agent_pb2.DecideRequest(
            run_id=run_id, decision=types_pb2.CallDecision(call_id="call_1", kind=APPROVE, digest=DIGEST)
        )
        for _ in tabs
    ]
    calls = [tab.stub.Decide(request, metadata=tab.metadata) for tab, request in zip(tabs, requests, strict=True)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(answer, agent_pb2.DecideResponse) for answer in answers) == 1
    (call,) = await people["me"].pending()
    assert [approval.user_id for approval in call.approval.approvals] == ["cyd"]


async def test_an_approver_sees_the_call_and_nothing_of_the_conversation_and_another_store_nothing_at_all(
    people: dict[str, Person], replicas: list[Replica], worker: Worker
) -> None:
    """D7"""
    run_id = await worker.add_run()
    await worker.add_call(run_id, "call_1", AWAITING)
    await worker.add_call(run_id, "call_2", ASKED)
    await worker.offer(run_id, "call_3")
    stranger = Person(replicas[0], f"{worker.store_id}-2", "cyd")
    assert not await stranger.pending(OF_STORE)
    for more in ({}, {"kind": EDIT, "arguments_json": b"{}"}):
        assert await stranger.decide(run_id, **more) in {"RUN_NOT_FOUND", "CALL_NOT_FOUND"}
    boss = people["cyd"]
    assert not await boss.pending()
    (call,) = await boss.pending(OF_STORE)
    shown = {field.name for field, _ in call.ListFields()}
    assert shown == {
        "store_id", "run_id", "call_id", "round", "tool_name", "tool_version", "state", "context",
        "arguments_json", "approval", "create_time", "user_id",
    }  # fmt: skip
    assert call.user_id == "me"
    for call_id in ("call_2", "call_3", "absent"):
        answers: dict[str, Any] = {"kind": call_pb2.DECISION_KIND_ANSWER, "answer": "yes"}
        assert await boss.decide(run_id, call_id, **answers) == "RUN_NOT_FOUND"
    assert await boss.decide(run_id, kind=EDIT, arguments_json=b'{"to": "ann"}') == "ACCEPTED"
    assert {field.name for field, _ in boss.run.ListFields()} == {"store_id", "run_id", "user_id", "state"}
    with pytest.raises(grpc.aio.AioRpcError):
        await boss.stub.GetRun(agent_pb2.GetRunRequest(run_id=run_id), metadata=boss.metadata)


async def test_several_decisions_have_a_receipt_each(people: dict[str, Person], worker: Worker) -> None:
    first, second = await worker.add_run("cyd"), await worker.add_run("dan")
    await worker.add_call(first, "call_1", AWAITING)
    await worker.add_call(second, "call_2", AWAITING)
    await worker.add_call(second, "call_3", AWAITING)
    decisions = [
        types_pb2.CallDecision(run_id=first, call_id="call_1", kind=APPROVE, digest=DIGEST),
        types_pb2.CallDecision(run_id=second, call_id="call_2", kind=APPROVE, digest="cd" * 32),
        types_pb2.CallDecision(run_id=second, call_id="absent", kind=APPROVE, digest=DIGEST),
        types_pb2.CallDecision(run_id=second, call_id="call_3", kind=EDIT, digest=DIGEST, arguments_json=b"{}"),
    ]
    me = people["me"]
    request = agent_pb2.DecideCallsRequest(request_id="all", decisions=decisions)
    once = await me.stub.DecideCalls(request, metadata=me.metadata)
    assert [(receipt.call_id, receipt.reason) for receipt in once.receipts] == [
        ("call_1", ""),
        ("call_2", "DIGEST_MISMATCH"),
        ("absent", "RUN_NOT_FOUND"),
        ("call_3", ""),
    ]
    again = await me.stub.DecideCalls(request, metadata=me.metadata)
    names = [types_pb2.ReceiptStatus.Name(receipt.status) for receipt in again.receipts]
    assert names == [f"RECEIPT_STATUS_{name}" for name in ("DUPLICATE", "REFUSED", "UNKNOWN", "DUPLICATE")]


async def test_a_stream_brings_all_then_what_comes_changes_and_goes(people: dict[str, Person], worker: Worker) -> None:
    """HITL-6. A second stream, as after a reconnect, begins with what waits then."""
    run_id = await worker.add_run()
    await worker.add_call(run_id, "call_1", AWAITING, approvals_required=2)
    boss = people["eve"]
    request = agent_pb2.WatchPendingRequest(filter=OF_STORE)

    async def read(stream: Any) -> agent_pb2.WatchPendingResponse:
        found = await stream.read()
        assert isinstance(found, agent_pb2.WatchPendingResponse), found
        return found

    async with asyncio.timeout(60):
        stream = boss.stub.WatchPending(request, metadata=boss.metadata)
        first = await read(stream)
        assert ([call.call_id for call in first.calls], first.complete) == (["call_1"], True)
        await people["cyd"].decide(run_id)
        assert [len(call.approval.approvals) for call in (await read(stream)).calls] == [1]
        await worker.add_call(run_id, "call_2", AWAITING)
        assert [call.call_id for call in (await read(stream)).calls] == ["call_2"]
        await people["dan"].decide(run_id)
        assert list((await read(stream)).gone_call_ids) == ["call_1"]
        stream.cancel()
        again = await read(boss.stub.WatchPending(request, metadata=boss.metadata))
        assert ([call.call_id for call in again.calls], again.complete) == (["call_2"], True)
