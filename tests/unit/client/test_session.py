"""The Session client: despite failures, each command takes effect once and each event arrives once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.client import AsyncClient, AsyncSession, NoAnswer
from pawl.client.front_end import context_of, perform
from pawl.client.session import FRAME_BYTES_MAX
from pawl.errors import AlreadyDecided, Cancelled, PawlError, RunNotFound, TooLarge, Unauthenticated
from pawl.event.v1 import call_pb2
from pawl.tools import Category, ProcessLimits, Tool, ToolContext, ToolDefinitionError, ToolError, tool
from tests.fakes.session_agent import RUN, Book, Replica, serve
from tests.poll import until
from tests.tables import for_each

WRONG_HOLDER = types_pb2.Receipt(
    status=types_pb2.RECEIPT_STATUS_WRONG_HOLDER, reason="CALL_NOT_PENDING", message="the client does not hold the call"
)


class Cluster:
    def __init__(self, replicas: list[Replica], addresses: list[str]) -> None:
        self.book = replicas[0].book
        self.first, self.second = replicas
        self.addresses = addresses

    def client(self, **options: Any) -> AsyncSession:
        environment = {"PAWL_TOOL_REGISTRY_ADDRESS": self.addresses[0]}
        target = AsyncClient(self.addresses, environment=environment, retry_seconds=60)
        defaults: dict[str, Any] = {"client_id": "cli_test"}
        return target.session(**defaults | options)

    def refuse(self, error: grpc.StatusCode | PawlError | None = grpc.StatusCode.UNAVAILABLE) -> None:
        """Break all connections and refuse new ones with `error`; None accepts new connections again."""
        for replica in (self.first, self.second):
            replica.refuse = error
            replica.cut()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    book = Book()
    first, second = Replica(book), Replica(book)  # type: ignore[abstract]  # the one method that it is about
    async with serve(first) as one, serve(second) as two:
        yield Cluster([first, second], [one, two])


async def test_a_start_with_a_lost_receipt_takes_effect_once(
    cluster: Cluster,
) -> None:
    cluster.first.break_before_receipt = "start"
    await cluster.book.append(3, ended=True)
    async with cluster.client() as client, asyncio.timeout(60):
        assert (await client.start("go"), [frame.event.seq async for frame in until_end(client)]) == (RUN, [1, 2, 3])
    assert len(cluster.book.sent("start")) == 1
    assert [len(replica.hellos) for replica in (cluster.first, cluster.second)] == [1, 1]


async def test_a_broken_stream_resumes_after_the_last_event_seen(cluster: Cluster) -> None:
    """EVT-1: each event arrives once."""
    cluster.first.break_after_events = 4
    await cluster.book.append(10, ended=True)
    async with cluster.client() as client, asyncio.timeout(60):
        assert await client.start("go") == RUN
        assert [frame.event.seq async for frame in until_end(client)] == list(range(1, 11))
    assert cluster.book.sent("attach")[0].attach.after_seq == 4


async def until_end(client: AsyncSession) -> AsyncIterator[session_pb2.SessionResponse]:
    async for frame in client:
        if frame.HasField("end"):
            return
        yield frame


async def test_removed_events_are_reported_as_one_gap(cluster: Cluster) -> None:
    """EVT-1: even a stream that breaks right after the gap reports it once."""
    await cluster.book.append(10, ended=True)
    cluster.book.trimmed_seq = 7
    cluster.first.break_after_events = 1
    async with cluster.client() as client, asyncio.timeout(60):
        await client.start("go")
        seen = [frame.gap.to_seq or frame.event.seq async for frame in until_end(client)]
    assert seen == [7, 8, 9, 10]
    assert cluster.book.sent("attach")[0].attach.after_seq == 8


async def test_a_client_keeps_its_id_across_reconnects(cluster: Cluster) -> None:
    """FE-2: with the same id, the client keeps the calls that it holds."""
    cluster.first.break_before_receipt = "cancel"
    async with cluster.client(tools=[show]) as client:
        await client.cancel(RUN)
    hellos = cluster.first.hellos + cluster.second.hellos
    assert [(hello.client_id, [tool.name for tool in hello.tools]) for hello in hellos] == [("cli_test", ["show"])] * 2
    (definition,) = hellos[0].front_end_tools
    assert (definition.name, definition.context) == ("show", call_pb2.EXECUTION_CONTEXT_FRONTEND)
    assert b'"required":["title"]' in definition.arguments_schema_json


async def test_a_refused_frame_raises_the_error_in_its_receipt(cluster: Cluster) -> None:
    cluster.book.refusals["decision"] = types_pb2.Receipt(
        status=types_pb2.RECEIPT_STATUS_LATE, reason="ALREADY_DECIDED", message="somebody was faster"
    )
    async with cluster.client() as client:
        decision = types_pb2.CallDecision(run_id=RUN, call_id="call_1", kind=call_pb2.DECISION_KIND_APPROVE)
        with pytest.raises(AlreadyDecided, match="somebody was faster"):
            await client.decide(decision)


@tool
async def show(title: str) -> dict[str, str]:
    """Show it."""
    return {"shown": title}


@tool
def show_in_a_thread(title: str) -> dict[str, str]:
    """Show it."""
    return {"shown": title}


@tool
async def fail(title: str) -> None:
    """Show nothing."""
    raise ToolError("no screen")


@tool
def crash(title: str) -> None:
    """Fail."""
    raise StopIteration("my secret")


@tool
async def cancel_itself(title: str) -> None:
    """Fail as if it had been cancelled."""
    raise asyncio.CancelledError


@tool
async def boast(title: str) -> str:
    """Show much."""
    return "x" * 2**20


@tool(process=ProcessLimits())
def compute(n: int) -> int:
    """Compute."""
    return n


async def test_every_offered_call_is_answered(cluster: Cluster) -> None:
    """FE-5: each failure becomes an error for the model."""
    answers: dict[str, tuple[str, bool]] = {
        "show": ('{"shown":"Plan"}', False),
        "show_in_a_thread": ('{"shown":"Plan"}', False),
        "crash": ('"crash failed unexpectedly: RuntimeError"', True),
        "cancel_itself": ('"cancel_itself failed unexpectedly: CancelledError"', True),
        "boast": ('"the result of boast is 1048578 bytes, over the limit of 1048576"', True),
        "fail": ('"no screen"', True),
        "absent": ('"there is no tool absent here"', True),
    }
    async with cluster.client(tools=[show, show_in_a_thread, fail, crash, cancel_itself, boast]):
        for name in answers:
            await cluster.book.offer(name, name, b'{"title": "Plan"}', epoch=3)
        await cluster.book.until(
            lambda book: {each.tool_result.call_id for each in book.sent("tool_result")} == {*answers}
        )
    results = [frame.tool_result for frame in cluster.book.sent("tool_result")]
    for each in results:
        content, is_error = answers[each.call_id]
        starts = each.content_json.decode().startswith(content)
        assert (starts, each.is_error, each.offer_epoch) == (True, is_error, 3), each


def waiting_tool() -> tuple[Tool[..., Any], list[str], asyncio.Event]:
    """Return a tool that runs until an event is set, a list of the ids of its calls, and the event."""
    runs: list[str] = []
    leave = asyncio.Event()

    @tool
    async def slow(context: ToolContext) -> str:
        """Take long."""
        runs.append(context.call_id)
        await leave.wait()
        return "done"

    return slow, runs, leave


async def test_a_call_offered_again_while_running_runs_once(cluster: Cluster) -> None:
    """FE-2: a reconnect does not start the call again."""
    slow, runs, leave = waiting_tool()
    async with cluster.client(tools=[slow]):
        await cluster.book.offer("call_1", "slow", epoch=1)
        await until(lambda: bool(runs))
        cluster.first.cut()
        await until(lambda: bool(cluster.second.hellos))
        await cluster.book.offer("call_1", "slow", epoch=2)
        await until(lambda: cluster.second.hellos != [])
        await cluster.book.until(lambda book: book.offers[0].offer_epoch == 2)
        leave.set()
        await cluster.book.until(lambda book: bool(book.sent("tool_result")))
    assert len(runs) == 1


async def test_a_result_for_an_older_lease_is_sent_again_for_the_next(cluster: Cluster) -> None:
    """FE-2: the lease of the lost connection was released, and the call is leased again after the result arrived."""
    slow, runs, leave = waiting_tool()
    cluster.book.refusals["tool_result"] = WRONG_HOLDER
    async with cluster.client(tools=[slow]) as client:
        await cluster.book.offer("call_1", "slow", epoch=1)
        await until(lambda: runs)
        cluster.book.offers.clear()
        cluster.refuse()
        leave.set()
        await until(lambda: client._unacknowledged)
        cluster.refuse(None)
        await until(lambda: not client._tool_tasks)
        cluster.book.refusals.clear()
        await cluster.book.offer("call_1", "slow", epoch=2)
        await cluster.book.until(lambda book: len(book.sent("tool_result")) == 2)
    results = [frame.tool_result for frame in cluster.book.sent("tool_result")]
    assert [(result.offer_epoch, result.content_json) for result in results] == [(1, b'"done"'), (2, b'"done"')]
    assert len(runs) == 1


async def test_a_revoked_call_offered_again_during_cleanup_runs_again(cluster: Cluster) -> None:
    runs: list[str] = []
    revoked, leave = asyncio.Event(), asyncio.Event()

    @tool
    async def careful(context: ToolContext) -> int:
        """Leave in good order."""
        runs.append(context.call_id)
        try:
            if len(runs) == 1:
                await asyncio.Event().wait()
        finally:
            revoked.set()
            await leave.wait()
        return len(runs)

    async with cluster.client(tools=[careful]) as client:
        await cluster.book.offer("call_1", "careful", epoch=1)
        await until(lambda: runs)
        client._take(session_pb2.SessionResponse(offer_revoked=session_pb2.OfferRevoked(run_id=RUN, call_id="call_1")))
        await asyncio.wait_for(revoked.wait(), 60)
        await cluster.book.offer("call_1", "careful", epoch=2)
        await until(lambda: [offer.offer_epoch for offer in client._offers.values()] == [2])
        assert len(runs) == 1
        leave.set()
        await cluster.book.until(lambda book: bool(book.sent("tool_result")))
    (result,) = [frame.tool_result for frame in cluster.book.sent("tool_result")]
    assert (result.offer_epoch, result.content_json) == (2, b"2")


async def test_every_call_fails_once_the_server_has_been_unreachable_for_too_long() -> None:
    async with AsyncClient("127.0.0.1:1", environment={}, retry_seconds=0.1).session() as client:
        for call in (client.start("go"), client.next_frame()):
            with pytest.raises(NoAnswer):
                await asyncio.wait_for(call, 60)


async def test_an_oversized_frame_is_refused_and_the_session_continues(cluster: Cluster) -> None:
    async with cluster.client() as client, asyncio.timeout(60):
        starts = [client.start("x" * size) for size in (10, FRAME_BYTES_MAX, 20, 3 * FRAME_BYTES_MAX)]
        ends = await asyncio.gather(*starts, return_exceptions=True)
        assert [end if isinstance(end, str) else type(end) for end in ends] == [RUN, TooLarge, RUN, TooLarge]
        assert await client.start("go") == RUN
    async with cluster.client(client_id="x" * FRAME_BYTES_MAX) as client, asyncio.timeout(60):
        with pytest.raises(TooLarge):
            await client.start("go")


async def test_a_run_lost_during_a_reconnect_is_reported_once(cluster: Cluster) -> None:
    """The run was erased while the client was disconnected."""
    await cluster.book.append(3)
    async with cluster.client() as client, asyncio.timeout(60):
        await client.start("go")
        for _ in range(3):
            await client.next_frame()
        cluster.book.refusals["attach"] = types_pb2.Receipt(
            status=types_pb2.RECEIPT_STATUS_REFUSED, reason="RUN_NOT_FOUND", message="there is no such run"
        )
        cluster.first.cut()
        with pytest.raises(RunNotFound, match="there is no such run") as refused:
            await client.next_frame()
        assert refused.value.metadata == {"run_id": RUN}
        cluster.second.cut()
        await client.start("go")
        assert (await client.next_frame()).event.seq == 1
    assert len(cluster.book.sent("attach")) == 1


async def test_closing_the_session_cancels_waiting_callers(cluster: Cluster) -> None:
    cluster.refuse()
    async with cluster.client() as client:
        waits = [asyncio.create_task(wait) for wait in (client.start("go"), client.next_frame(), client.next_frame())]
        await asyncio.wait(waits, timeout=0.05)
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(end) for end in ends] == [Cancelled] * 3


async def test_a_refused_or_replaced_client_does_not_retry(cluster: Cluster) -> None:
    async with cluster.client() as client, asyncio.timeout(60):
        await client.start("go")
        cluster.first.refuse = cluster.second.refuse = Cancelled("the client opened another stream")
        cluster.first.cut()
        with pytest.raises(Cancelled, match="another stream"):
            await client.next_frame()
    assert len(cluster.first.hellos) == 1
    cluster.first.refuse = cluster.second.refuse = grpc.StatusCode.UNAUTHENTICATED
    async with cluster.client() as client, asyncio.timeout(60):
        with pytest.raises(Unauthenticated):
            await client.start("go")


@for_each(("function", "says"), [(compute, "tool that the registry runs"), (len, "decorate the function")])
async def test_a_function_that_no_front_end_can_run_is_refused(cluster: Cluster, function: Any, says: str) -> None:
    with pytest.raises(ToolDefinitionError, match=says):
        cluster.client(tools=[function])


async def test_a_session_outside_its_context_raises_immediately(cluster: Cluster) -> None:
    client = cluster.client()
    for _ in range(2):
        for call in (client.start("go"), client.next_frame()):
            with pytest.raises(RuntimeError, match="use it within"):
                await asyncio.wait_for(call, 60)
        async with client:
            await client.start("go")


async def test_progress_of_a_function_is_reported(cluster: Cluster) -> None:
    @tool
    def slow(context: ToolContext) -> None:
        """Take long."""
        context.progress(0.5, f"half of {context.call_id}" + "." * FRAME_BYTES_MAX)

    async with cluster.client(tools=[slow]):
        await cluster.book.offer("call_1", "slow", epoch=2)
        await cluster.book.until(lambda book: bool(book.sent("tool_result")))
    report = cluster.book.sent("tool_progress")[0].tool_progress
    message = "half of call_1".ljust(1024, ".")
    assert (report.call_id, report.offer_epoch, report.fraction, report.message) == ("call_1", 2, 0.5, message)


async def test_an_error_is_truncated_to_the_result_limit() -> None:
    """If the error were longer, the model would only see its size."""

    @tool(category=Category.SAFE)
    async def fail(text: str) -> None:
        """Fail."""
        raise ToolError({"x": "x" * 3_000_000, "0": "\0" * 3_000_000, "s": "\ud800"}[text])

    for text in ("x", "0", "s"):
        call = call_pb2.Call(tool_name="fail", arguments_json=b'{"text": "%s"}' % text.encode())
        context = context_of(call, threading.Event(), lambda _fraction, _message: None)
        with ThreadPoolExecutor(1) as threads:
            content, is_error = await perform(fail, call, context, threads)
        assert (is_error, 1 < len(content) <= 1024 * 1024) == (True, True)
