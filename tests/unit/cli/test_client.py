"""The Session client: a command takes effect once and an event is given once, whatever breaks when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.cli.client import Refused, SessionClient
from pawl.event.v1 import call_pb2
from tests.fakes.session_agent import RUN, Book, Replica, serve


class Cluster:
    """Two replicas of one book, and clients of both."""

    def __init__(self, replicas: list[Replica], addresses: list[str]) -> None:
        self.book = replicas[0].book
        self.first, self.second = replicas
        self.addresses = addresses

    def client(self, **options: Any) -> SessionClient:
        return SessionClient(self.addresses, client_id="cli_test", give_up_seconds=5, **options)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    book = Book()
    first, second = Replica(book), Replica(book)  # type: ignore[abstract]  # the one method that it is about
    async with serve(first, tmp_path, "1") as one, serve(second, tmp_path, "2") as two:
        yield Cluster([first, second], [one, two])


async def seqs_until_end(client: SessionClient) -> list[int]:
    """The seqs of all events until the run ends."""
    seqs: list[int] = []
    async with asyncio.timeout(10):
        async for frame in client:
            if frame.HasField("end"):
                return seqs
            seqs.append(frame.event.seq)
    raise AssertionError


async def test_a_started_run_gives_its_events_in_order_and_its_end(cluster: Cluster) -> None:
    await cluster.book.append(5, ended=True)
    async with cluster.client() as client:
        assert await client.start("go") == RUN
        assert await seqs_until_end(client) == [1, 2, 3, 4, 5]


async def test_a_start_whose_receipt_is_lost_takes_effect_once_and_is_receipted_by_another_replica(
    cluster: Cluster,
) -> None:
    cluster.first.break_before_receipt = "start"
    await cluster.book.append(3, ended=True)
    async with cluster.client() as client:
        assert await client.start("go") == RUN
        assert await seqs_until_end(client) == [1, 2, 3]
    assert len(cluster.book.sent("start")) == 1
    assert [len(replica.hellos) for replica in (cluster.first, cluster.second)] == [1, 1]


@pytest.mark.parametrize("break_after", [1, 4, 9])
async def test_a_stream_that_breaks_goes_on_after_the_last_event_seen(cluster: Cluster, break_after: int) -> None:
    """EVT-1: none missing, none twice."""
    cluster.first.break_after_events = break_after
    await cluster.book.append(10, ended=True)
    async with cluster.client() as client:
        await client.start("go")
        assert await seqs_until_end(client) == list(range(1, 11))
    assert cluster.book.sent("attach")[0].attach.after_seq == break_after


async def test_events_that_are_gone_are_a_gap_that_is_given_once(cluster: Cluster) -> None:
    """EVT-1: also when the stream breaks just behind it."""
    await cluster.book.append(10, ended=True)
    cluster.book.trimmed_seq = 7
    cluster.first.break_after_events = 1
    seen: list[tuple[str, int]] = []
    async with cluster.client() as client, asyncio.timeout(10):
        await client.start("go")
        async for frame in client:
            if frame.HasField("end"):
                break
            seen.append(("gap", frame.gap.to_seq) if frame.HasField("gap") else ("event", frame.event.seq))
    assert seen == [("gap", 7), ("event", 8), ("event", 9), ("event", 10)]
    assert cluster.book.sent("attach")[0].attach.after_seq == 8


async def test_a_client_keeps_its_id_over_reconnects(cluster: Cluster) -> None:
    """FE-2: by it, it keeps the calls that it holds."""
    cluster.first.break_before_receipt = "cancel"
    async with cluster.client(tools={"show": show}) as client:
        await client.cancel(RUN)
    hellos = cluster.first.hellos + cluster.second.hellos
    assert [hello.client_id for hello in hellos] == ["cli_test", "cli_test"]
    assert [[tool.name for tool in hello.tools] for hello in hellos] == [["show"], ["show"]]


async def test_a_refused_frame_raises_with_the_receipt(cluster: Cluster) -> None:
    cluster.book.refusals["decision"] = types_pb2.Receipt(
        status=types_pb2.RECEIPT_STATUS_LATE, reason="ALREADY_DECIDED", message="somebody was faster"
    )
    async with cluster.client() as client:
        decision = types_pb2.CallDecision(run_id=RUN, call_id="call_1", kind=call_pb2.DECISION_KIND_APPROVE)
        with pytest.raises(Refused, match="somebody was faster") as caught:
            await client.decide(decision)
    assert caught.value.receipt.reason == "ALREADY_DECIDED"


async def show(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"shown": arguments["title"]}


async def fail(_: dict[str, Any]) -> None:
    raise ValueError("no screen")


@pytest.mark.parametrize(
    ("tool", "content", "is_error"),
    [
        ("show", b'{"shown": "Plan"}', False),
        ("fail", b'"no screen"', True),
        ("absent", b'"there is no tool absent here"', True),
    ],
)
async def test_an_offered_call_is_answered_in_any_case(
    cluster: Cluster, tool: str, content: bytes, is_error: bool
) -> None:
    """FE-5: an unknown tool answers with an error, never silence."""
    async with cluster.client(tools={"show": show, "fail": fail}):
        await cluster.book.offer("call_1", tool, b'{"title": "Plan"}', epoch=3)
        await cluster.book.until(lambda book: bool(book.sent("tool_result")))
    result = cluster.book.sent("tool_result")[0].tool_result
    assert (result.content_json, result.is_error, result.offer_epoch) == (content, is_error, 3)


async def test_a_call_offered_again_while_it_runs_is_run_once_under_the_newest_lease(cluster: Cluster) -> None:
    """FE-2."""
    runs: list[dict[str, Any]] = []
    leave = asyncio.Event()

    async def slow(arguments: dict[str, Any]) -> None:
        runs.append(arguments)
        await leave.wait()

    async with cluster.client(tools={"slow": slow}):
        await cluster.book.offer("call_1", "slow", epoch=1)
        await wait_until(lambda: bool(runs))
        cluster.first.cut()
        await wait_until(lambda: bool(cluster.second.hellos))
        await cluster.book.offer("call_1", "slow", epoch=2)
        await wait_until(lambda: cluster.second.hellos != [])
        await cluster.book.until(lambda book: book.offers[0].offer_epoch == 2)
        leave.set()
        await cluster.book.until(lambda book: bool(book.sent("tool_result")))
    assert len(runs) == 1


async def test_a_revoked_call_is_cancelled_and_gives_no_result(cluster: Cluster) -> None:
    cancelled = asyncio.Event()

    async def endless(_: dict[str, Any]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    client = cluster.client(tools={"endless": endless})
    async with client:
        await cluster.book.offer("call_1", "endless")
        await wait_until(lambda: "call_1" in client._tool_tasks)
        revoked = session_pb2.OfferRevoked(run_id=RUN, call_id="call_1")
        await asyncio.sleep(0)
        client._take(session_pb2.SessionResponse(offer_revoked=revoked))
        await asyncio.wait_for(cancelled.wait(), 5)
        await wait_until(lambda: not client._tool_tasks)
    assert cluster.book.sent("tool_result") == []


async def test_when_nobody_answers_for_long_enough_every_call_says_so(tmp_path: Path) -> None:
    client = SessionClient([f"unix:{tmp_path}/nobody"], give_up_seconds=0.1)
    async with client:
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(client.start("go"), 10)
        with pytest.raises(grpc.aio.AioRpcError):
            await client.next_frame()


async def test_a_credential_that_is_refused_is_not_tried_again(cluster: Cluster) -> None:
    cluster.first.refuse = cluster.second.refuse = grpc.StatusCode.UNAUTHENTICATED
    async with cluster.client() as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(client.start("go"), 10)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def wait_until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
