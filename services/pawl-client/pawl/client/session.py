"""The client for the Session stream. It reconnects to any replica without losing or repeating commands and events.

    async with AsyncClient() as pawl, pawl.session(tools=[show]) as session:
        run_id = await session.start("show me the plan")
        async for frame in session:
            ...

Every command has an id and is stored until its receipt arrives. After a reconnect, the client resends stored commands
with the same ids and attaches to each run after the last `seq` seen. Each command therefore takes effect once, and each
event is delivered once.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import grpc

from pawl.agent.v1 import session_pb2 as wire
from pawl.agent.v1 import types_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.chassis.process.start import StartError
from pawl.chassis.process.tasks import check_cancelled, within
from pawl.client.decisions import TAKEN, check_taken, checked
from pawl.client.forms import natural, parts_of
from pawl.client.streams import SILENCE_SECONDS_MAX
from pawl.client.target import NoAnswer, Target, error_of
from pawl.errors import (
    CallNotPending,
    Cancelled,
    InvalidArgument,
    PawlError,
    PermissionDenied,
    TooLarge,
    Unauthenticated,
    Unimplemented,
)
from pawl.event.v1 import call_pb2, message_pb2, run_pb2

if TYPE_CHECKING:
    from pawl.tool.v1 import tool_pb2
    from pawl.tools import Tool

_HEARTBEAT_SECONDS: Final = 10.0
# A healthy replica accepts a stream immediately. Each consecutive failure doubles this timeout.
_OPENING_SECONDS: Final = 2.0
_PROGRESS_BYTES_MAX: Final = 1024
# agent-loop's limit for a frame, unless its PAWL_MESSAGE_BYTES_MAX is lower.
FRAME_BYTES_MAX: Final = 1280 * 1024
# Cancelled means that another program uses the client id. If both reconnected, they would end each other's streams
# forever.
_PERMANENT: Final = (Cancelled, InvalidArgument, PermissionDenied, TooLarge, Unauthenticated, Unimplemented, StartError)


def definitions_of(tools: Sequence[Tool[..., Any]]) -> list[tool_pb2.ToolDefinition]:
    """Return a run's front-end tool definitions for functions decorated with `pawl.tools.tool`.

    Raises:
        ToolDefinitionError: An item is not such a function, or it uses options that only the registry supports.
    """
    if not tools:
        return []
    from pawl.client.front_end import definition_of  # noqa: PLC0415  # imports pydantic, which few programs need

    return [definition_of(tool) for tool in tools]


class AsyncSession:
    """A front-end session: an async context manager, and an iterator over the frames of attached runs.

    Frames are events, gaps and ends. Methods raise RuntimeError outside the `with` block.

    `tools` are functions decorated with `pawl.tools.tool`. Runs started by the session have these tools and no other
    front-end tools. The session executes the calls of these tools, async functions as tasks and other functions in
    threads, at most `calls_max` at a time. It also executes calls of tools with these names in other attached runs, if
    those runs were started with tools, or if the registry has the tools. A program that reuses its `client_id` after a
    restart gets its calls back. `addresses` defaults to the addresses of `target`.

    `on_connected` is called with the address of each new connection, and `on_lost` when a connection is lost. If
    `on_connected` raises an exception, the replica counts as unavailable. If no replica answers within the client's
    `retry_seconds`, or if a replica refuses permanently, every method raises the last connection's error, normally a
    PawlError. Leaving the session raises Cancelled in every waiting method.
    """

    def __init__(
        self,
        target: Target,
        *,
        tools: Sequence[Tool[..., Any]] = (),
        client_id: str = "",
        calls_max: int = 4,
        addresses: Sequence[str] = (),
        on_connected: Callable[[str], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._target = target
        self._addresses = addresses or target.agent
        definitions = definitions_of(tools)
        self._tools = {tool.name: tool for tool in tools}
        names = [wire.ClientTool(name=name) for name in self._tools]
        self._hello = wire.Hello(
            client_id=client_id or f"py_{secrets.token_hex(8)}",
            tools=names,
            calls_max=calls_max,
            front_end_tools=definitions,
        )
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._frame_ids = map(f"{secrets.token_hex(4)}-{{}}".format, itertools.count(1))
        self._unacknowledged: dict[str, tuple[wire.SessionRequest, asyncio.Future[types_pb2.Receipt]]] = {}
        self._last_seq: dict[str, int] = {}
        self._reattaching: dict[str, str] = {}
        self._offers: dict[str, wire.Offer] = {}
        self._results: dict[str, tuple[bytes, bool]] = {}
        self._tool_tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(calls_max, thread_name_prefix="pawl-tool")
        # Limited by the size of the attached runs' logs. A receipt that follows an event must not wait for the reader.
        self._incoming: deque[wire.SessionResponse | PawlError] = deque()
        self._news = asyncio.Event()
        self._outgoing: asyncio.Queue[wire.SessionRequest] | None = None
        self._failure: BaseException | None = None
        self._connection: asyncio.Task[NoReturn] | None = None

    async def __aenter__(self) -> Self:
        self._failure = None
        self._connection = asyncio.create_task(self._stay_connected(), name="session")
        self._connection.add_done_callback(self._end)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._offers.clear()
        tasks = [*self._tool_tasks.values(), *([self._connection] if self._connection else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connection = None
        self._threads.shutdown(wait=False)

    async def __aiter__(self) -> AsyncGenerator[wire.SessionResponse, None]:
        while True:
            yield await self.next_frame()

    async def next_frame(self) -> wire.SessionResponse:
        """Return the next event, gap or end frame. Safe to cancel.

        Raises:
            PawlError: The session has ended, or a replica refused to attach to a run again. In the second case, the
                error is raised once, has the `run_id` in its metadata, and no more frames arrive for that run.
        """
        if not self._incoming:
            self._check_entered()
        while not self._incoming:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        frame = self._incoming.popleft()
        if isinstance(frame, PawlError):
            raise frame
        return frame

    async def start(
        self,
        text: str = "",
        *,
        parts: Sequence[message_pb2.Part | str] = (),
        conversation_id: str = "",
        conversation_key: str = "",
        agent: str = "",
        labels: Mapping[str, str] | None = None,
        options: run_pb2.RunOptions | None = None,
    ) -> str:
        """Start a run and attach to it. The run waits for earlier runs of its conversation.

        Return the run's id once the run is durable.
        """
        start = wire.Start(
            conversation_id=conversation_id,
            conversation_key=conversation_key,
            text=text,
            parts=parts_of(parts),
            agent=agent,
            labels=labels,
            options=options,
        )
        return (await self._send(wire.SessionRequest(start=start))).run_id

    async def attach(self, run_id: str, after_seq: int = 0) -> None:
        """Receive a run's events after `after_seq` and offers of its front-end calls."""
        await self._send(
            wire.SessionRequest(attach=wire.Attach(run_id=run_id, after_seq=natural(after_seq, "after_seq")))
        )

    async def decide(self, decision: types_pb2.CallDecision) -> None:
        """Approve, edit, reject or answer a call."""
        await self._send(wire.SessionRequest(decision=checked(decision)))

    async def cancel(self, run_id: str, reason: str = "") -> None:
        """Cancel a run. A run that has ended does not change."""
        await self._send(wire.SessionRequest(cancel=wire.Cancel(run_id=run_id, reason=reason)))

    async def _send(self, frame: wire.SessionRequest) -> types_pb2.Receipt:
        """Send a frame, reconnecting if necessary, and return its receipt.

        Raises:
            PawlError: The frame was refused.
        """
        self._check_entered()
        if self._failure is not None:
            raise self._failure
        if (size := frame.ByteSize()) > FRAME_BYTES_MAX:
            raise TooLarge(f"a frame must be at most {FRAME_BYTES_MAX} bytes, got {size}")
        frame.frame_id = next(self._frame_ids)
        future: asyncio.Future[types_pb2.Receipt] = asyncio.get_running_loop().create_future()
        self._unacknowledged[frame.frame_id] = (frame, future)
        if self._outgoing is not None:
            self._outgoing.put_nowait(frame)
        receipt = await future
        check_taken(receipt)
        return receipt

    def _check_entered(self) -> None:
        if self._connection is None:
            raise RuntimeError("the session is not connected: use it within `with client.session(...) as session:`")

    async def _stay_connected(self) -> NoReturn:
        """Connect to one replica after another until one refuses permanently or none responds in time.

        The last error is then raised.
        """
        loop = asyncio.get_running_loop()
        last_answer, failures = loop.time(), 0
        addresses = itertools.cycle(self._addresses)
        while True:
            address = next(addresses)
            error: Exception = NoAnswer(f"{address} closed the session")
            try:
                await self._connect(address, failures)
            except grpc.aio.AioRpcError as caught:
                error = error_of(caught, address)
            except TimeoutError:
                error = NoAnswer(f"no answer from {address}: the stream is silent")
            except Exception as caught:  # noqa: BLE001  # however a connection ends, the next replica is tried
                error = caught
            was_connected, self._outgoing = self._outgoing is not None, None
            if was_connected:
                last_answer, failures = loop.time(), 0
                self._on_lost()
            is_permanent = isinstance(error, _PERMANENT)
            if is_permanent or loop.time() - last_answer >= self._target.retry_seconds:
                raise error
            await asyncio.sleep(min(0.1 * 2**failures, 2.0))
            failures += 1

    def _end(self, connection: asyncio.Task[NoReturn]) -> None:
        """Fail all waiting methods with the reason why the session has ended."""
        failure = None if connection.cancelled() else connection.exception()
        self._failure = error = failure or Cancelled("the session was closed")
        self._news.set()
        for _, future in self._unacknowledged.values():
            if not future.done():
                future.set_exception(error)
        self._unacknowledged.clear()

    async def _connect(self, address: str, failures: int) -> None:
        """Use one connection until it ends. Skip a replica that does not accept the stream in time."""
        async with self._target.connect(address) as channel:
            stream: Any = AgentServiceStub(channel).Session(metadata=self._target.metadata)
            async with asyncio.timeout(min(_OPENING_SECONDS * 2**failures, SILENCE_SECONDS_MAX)):
                await stream.write(wire.SessionRequest(frame_id=next(self._frame_ids), hello=self._hello))
                await stream.initial_metadata()
            frame = await self._read(stream)
            self._on_connected(address)  # This comes first, because a connection for which it raises does not count.
            self._outgoing = self._first_frames()
            writing = asyncio.create_task(self._write(stream, self._outgoing), name="session.write")
            try:
                while frame is not grpc.aio.EOF:
                    self._take(frame)
                    frame = await self._read(stream)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def _read(self, stream: Any) -> Any:
        async with asyncio.timeout(SILENCE_SECONDS_MAX):
            return await stream.read()

    def _first_frames(self) -> asyncio.Queue[wire.SessionRequest]:
        """Return the first frames of a new connection: attachments, then all frames that have no receipt yet."""
        outgoing: asyncio.Queue[wire.SessionRequest] = asyncio.Queue()
        self._reattaching = {next(self._frame_ids): run_id for run_id in self._last_seq}
        for frame_id, run_id in self._reattaching.items():
            attach = wire.Attach(run_id=run_id, after_seq=self._last_seq[run_id])
            outgoing.put_nowait(wire.SessionRequest(frame_id=frame_id, attach=attach))
        for frame, _ in self._unacknowledged.values():
            outgoing.put_nowait(frame)
        return outgoing

    async def _write(self, stream: Any, outgoing: asyncio.Queue[wire.SessionRequest]) -> None:
        while True:
            frame = await within(_HEARTBEAT_SECONDS, outgoing.get())
            if frame is None:
                frame = wire.SessionRequest(heartbeat=wire.ClientHeartbeat())
            await stream.write(frame)

    def _take(self, frame: wire.SessionResponse) -> None:
        match frame.WhichOneof("frame"):
            case "event" if frame.event.seq > self._last_seq.get(frame.event.run_id, 0):
                self._last_seq[frame.event.run_id] = frame.event.seq
                self._give(frame)
            case "gap" if frame.gap.to_seq > self._last_seq.get(frame.gap.run_id, 0):
                self._last_seq[frame.gap.run_id] = frame.gap.to_seq
                self._give(frame)
            case "end" if self._last_seq.pop(frame.end.run_id, None) is not None:
                self._give(frame)
            case "receipt":
                self._take_receipt(frame.receipt)
            case "offer":
                self._take_offer(frame.offer)
            case "offer_revoked" if (task := self._tool_tasks.get(frame.offer_revoked.call_id)) is not None:
                self._offers.pop(frame.offer_revoked.call_id, None)
                task.cancel()

    def _give(self, frame: wire.SessionResponse | PawlError) -> None:
        self._incoming.append(frame)
        self._news.set()

    def _take_receipt(self, receipt: types_pb2.Receipt) -> None:
        if (run_id := self._reattaching.pop(receipt.frame_id, None)) is not None:
            self._check_attached(run_id, receipt)
            return
        frame, future = self._unacknowledged.pop(receipt.frame_id, (None, None))
        if frame is None or future is None:
            return  # A receipt of a hello or of tool progress.
        if receipt.status in TAKEN and frame.HasField("start"):
            self._last_seq.setdefault(receipt.run_id, 0)
        if receipt.status in TAKEN and frame.HasField("attach"):
            self._last_seq[receipt.run_id] = frame.attach.after_seq
        if not future.done():
            future.set_result(receipt)

    def _check_attached(self, run_id: str, receipt: types_pb2.Receipt) -> None:
        """Report to the reader if a run could not be attached again. Otherwise, the reader would wait forever."""
        try:
            check_taken(receipt)
        except PawlError as error:
            error.metadata = {"run_id": run_id}
            self._last_seq.pop(run_id, None)
            self._give(error)

    def _take_offer(self, offer: wire.Offer) -> None:
        call_id = offer.call.call_id
        self._offers[call_id] = offer
        if call_id not in self._tool_tasks:  # Otherwise, it is running and was offered again.
            self._start_call(offer)

    def _start_call(self, offer: wire.Offer) -> None:
        call_id = offer.call.call_id
        self._tool_tasks[call_id] = task = asyncio.create_task(self._run_tool(offer), name=f"tool.{call_id}")
        task.add_done_callback(partial(self._restart_call, offer))

    def _restart_call(self, offer: wire.Offer, _: asyncio.Task[None]) -> None:
        """Restart a call that was revoked and offered again before its task ended."""
        call_id = offer.call.call_id
        del self._tool_tasks[call_id]
        newest = self._offers.get(call_id, offer)
        if newest is offer:
            self._offers.pop(call_id, None)
        else:
            self._start_call(newest)

    async def _run_tool(self, offer: wire.Offer) -> None:
        """Run an offered call and send its result. The result is refused if the call has already ended."""
        call = offer.call
        kept = self._results.pop(call.call_id, None)
        content, is_error = kept or await self._perform(call)
        check_cancelled()
        while True:
            newest = self._offers[call.call_id]
            result = types_pb2.ToolResult(run_id=call.run_id, call_id=call.call_id, content_json=content)
            result.is_error, result.offer_epoch = is_error, newest.offer_epoch
            try:
                await self._send(wire.SessionRequest(tool_result=result))
            except Exception as error:  # noqa: BLE001  # refused, or the session is over
                if newest is not self._offers[call.call_id]:
                    continue  # The call was offered again after a reconnect.
                if isinstance(error, CallNotPending):
                    self._keep(call.call_id, content, is_error=is_error)
            break
        del self._offers[call.call_id]

    def _keep(self, call_id: str, content: bytes, *, is_error: bool) -> None:
        """Keep a result that was refused because of an old lease. A new offer of the call may be on its way."""
        self._results[call_id] = (content, is_error)
        if len(self._results) > self._hello.calls_max:
            del self._results[next(iter(self._results))]

    async def _perform(self, call: call_pb2.Call) -> tuple[bytes, bool]:
        """Run a call. Return the content of its result, and whether it is an error for the model."""
        from pawl.client.front_end import context_of, perform  # noqa: PLC0415  # already imported for the hello

        cancelled, loop = threading.Event(), asyncio.get_running_loop()

        def report(fraction: float | None, message: str) -> None:
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._report, call.call_id, fraction, message)

        context = context_of(call, cancelled, report)
        try:
            return await perform(self._tools.get(call.tool_name), call, context, self._threads)
        finally:
            cancelled.set()

    def _report(self, call_id: str, fraction: float | None, message: str) -> None:
        """Send a call's progress without waiting for the receipt."""
        offer = self._offers.get(call_id)
        if offer is not None and self._outgoing is not None:
            report = wire.ToolProgressReport(run_id=offer.call.run_id, call_id=call_id, offer_epoch=offer.offer_epoch)
            report.message = message.encode(errors="replace")[:_PROGRESS_BYTES_MAX].decode(errors="ignore")
            if fraction is not None:
                report.fraction = fraction
            self._outgoing.put_nowait(wire.SessionRequest(frame_id=next(self._frame_ids), tool_progress=report))
