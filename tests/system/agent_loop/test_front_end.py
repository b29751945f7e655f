"""Front ends on two replicas over the real ledger and NATS: each call has one holder, each frame one effect."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from tests.rpc.agent_loop.client import ACCEPTED, Client
from tests.system.agent_loop.conftest import Replica
from tests.system.agent_loop.worker import Worker

WRONG_HOLDER = types_pb2.RECEIPT_STATUS_WRONG_HOLDER
LATE = types_pb2.RECEIPT_STATUS_LATE


@pytest.fixture
def me(store_id: str) -> Any:
    """Metadata of the user whose runs these are."""
    return (("pawl-store", store_id), ("pawl-user", "me"))


@pytest.fixture
async def run_id(worker: Worker) -> str:
    """A run that the worker holds."""
    return await worker.add_run()


async def attached(replica: Replica, me: Any, run_id: str, client_id: str) -> Client:
    client = Client(replica.stub, metadata=me)
    await client.hello(client_id, "show")
    assert (await client.attach(run_id)).status == ACCEPTED
    return client


async def replaced(client: Client) -> None:
    """Return when the server has ended the stream for a newer one."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await client.end()
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    assert "opened another stream" in (ended.value.details() or "")


async def test_a_call_goes_from_a_client_that_leaves_to_one_on_another_replica(
    replicas: list[Replica], worker: Worker, me: Any, run_id: str
) -> None:
    """FE-2: offered once at a time; the late result of the first changes nothing."""
    first = await attached(replicas[0], me, run_id, "cli_a")
    second = await attached(replicas[1], me, run_id, "cli_b")
    await worker.offer(run_id, "call_1")
    offers = {asyncio.create_task(client.offer()): client for client in (first, second)}
    done, waiting = await asyncio.wait(offers, return_when=asyncio.FIRST_COMPLETED)
    (won,) = done
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    winner = offers[won]
    client_id = "cli_b" if winner is first else "cli_a"
    assert won.result().offer_epoch == 1
    winner.leave()
    heir = await attached(replicas[0], me, run_id, client_id)
    taken = await heir.offer()
    assert (taken.call.call_id, taken.offer_epoch) == ("call_1", 2)
    back = await attached(replicas[1], me, run_id, "cli_c")
    assert (await back.answer(won.result())).status == WRONG_HOLDER
    assert (await heir.answer(taken, b'{"shown":true}')).status == ACCEPTED
    assert (await heir.answer(taken, b'{"shown":false}')).status == LATE
    await worker.settle(run_id, "call_1", call_pb2.CALL_STATE_SUCCEEDED)
    await worker.finish(run_id)
    assert (await heir.next("end")).end.state == run_pb2.RUN_STATE_COMPLETED


async def test_the_newest_stream_of_a_client_holds_its_calls(
    replicas: list[Replica], worker: Worker, me: Any, run_id: str
) -> None:
    """The older one, on another replica, changes nothing any more, and ends."""
    old = await attached(replicas[0], me, run_id, "cli_a")
    await worker.offer(run_id, "call_1")
    lost = await old.offer()
    new = await attached(replicas[1], me, run_id, "cli_a")
    taken = await new.offer()
    assert taken.offer_epoch == lost.offer_epoch
    late = types_pb2.ToolResult(run_id=run_id, call_id="call_1", content_json=b'"old"', offer_epoch=lost.offer_epoch)
    assert (await old.ask("late", tool_result=late)).status == WRONG_HOLDER
    await replaced(old)
    # What the old stream had refused was never the last word: the client may not have read it.
    assert (await new.ask("late", tool_result=late)).status == ACCEPTED
    assert (await new.answer(taken, b'"new"')).status == LATE


async def test_a_result_sent_again_by_a_newer_stream_needs_no_offer_of_its_own(
    replicas: list[Replica], worker: Worker, me: Any, run_id: str
) -> None:
    """The frame had no receipt, and the client has come back by another replica."""
    old = await attached(replicas[0], me, run_id, "cli_a")
    await worker.offer(run_id, "call_1")
    offer = await old.offer()
    new = Client(replicas[1].stub, metadata=me)
    await new.hello("cli_a", "show")
    result = types_pb2.ToolResult(run_id=run_id, call_id="call_1", content_json=b"1", offer_epoch=offer.offer_epoch)
    assert (await new.ask("result", tool_result=result)).status == ACCEPTED
    assert (await old.ask("result", tool_result=result)).status == types_pb2.RECEIPT_STATUS_DUPLICATE


async def test_a_frame_sent_again_through_another_replica_takes_effect_once(
    replicas: list[Replica], worker: Worker, me: Any
) -> None:
    """I2"""
    run_ids = set()
    for replica in (*replicas, *replicas):
        client = Client(replica.stub, metadata=me)
        await client.hello("cli_a")
        run_ids.add((await client.ask("start", start=session_pb2.Start(text="Hello"))).run_id)
        client.leave()
    (run_id,) = run_ids
    await worker.begin(run_id)
    await worker.finish(run_id)
