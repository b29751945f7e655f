"""A client of the Session stream: several replicas, reconnecting, nothing lost and nothing twice.

    async with AsyncClient() as pawl, pawl.session(tools=[show]) as session:
        run_id = await session.start("show me the plan")
        async for frame in session:
            ...

What makes it safe: every frame has an id and is kept until its receipt arrives;
after a reconnect, to whichever replica, those kept are sent again with the same
ids, and every attached run is attached again after the last `seq` seen. So a
command takes effect once, and each event is given once.
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
# A replica that is well takes a stream at once; each failure in a row doubles it.
_OPENING_SECONDS: Final = 2.0
_PROGRESS_BYTES_MAX: Final = 1024
FRAME_BYTES_MAX: Final = 1280 * 1024
"""Most bytes of a frame: as many as agent-loop takes, unless its PAWL_MESSAGE_BYTES_MAX is less."""
# Cancelled: another program has the client id. Each would end the stream of the other one for ever.
_HOPELESS: Final = (Cancelled, InvalidArgument, PermissionDenied, TooLarge, Unauthenticated, Unimplemented, StartError)


def definitions_of(tools: Sequence[Tool[..., Any]]) -> list[tool_pb2.ToolDefinition]:
    """Return functions of `pawl.tools.tool` as tools that come with a run.

    Raises:
        ToolDefinitionError: one is no such function, or has what only the registry can do.
    """
    if not tools:
        return []
    from pawl.client.front_end import definition_of  # noqa: PLC0415  # takes half of the registry along

    return [definition_of(tool) for tool in tools]


class AsyncSession:
    """One front end. An async context manager, and an iterator over event, gap and end frames of the attached runs.

    It is connected within its `with` only: elsewhere its methods raise RuntimeError.

    `tools` are functions made by `pawl.tools.tool`. The runs that the session starts have them, and no others; their
    calls come here: async ones run in tasks, others in threads, `calls_max` at once. So do calls of tools of these
    names in runs that it is attached to, if those were started with tools, or of tools in the register. A `client_id`
    that is kept over restarts of the program takes its calls back. `addresses` are those of `target`, unless others
    are given. `on_connected` is told the address of each connection, `on_lost` that it is gone. When no replica has
    answered for the `retry_seconds` of the client, or one refuses for good, every method raises the error of the last
    connection (PawlError); a replica of which `on_connected` raises counts as one that does not answer. So does every
    method that waits when the session is left (Cancelled).
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
        self._unreceipted: dict[str, tuple[wire.SessionRequest, asyncio.Future[types_pb2.Receipt]]] = {}
        self._last_seq: dict[str, int] = {}
        self._attaching_again: dict[str, str] = {}
        self._offers: dict[str, wire.Offer] = {}
        self._results: dict[str, tuple[bytes, bool]] = {}
        self._tool_tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(calls_max, thread_name_prefix="pawl-tool")
        # No longer than the logs of the attached runs: a receipt behind an event must not wait for its reader.
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
        """Return the next event, gap or end. Safe to cancel.

        Raises:
            PawlError: the session is over; or, once, a replica refused to go on with the run that metadata `run_id`
                names: nothing more comes of it.
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
        """Start a run, queued behind those of its conversation, and attach to it; returns its id once it is durable."""
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
        """Get the events of a run after `after_seq`, and its front-end calls."""
        await self._send(
            wire.SessionRequest(attach=wire.Attach(run_id=run_id, after_seq=natural(after_seq, "after_seq")))
        )

    async def decide(self, decision: types_pb2.CallDecision) -> None:
        """Approve, edit, reject or answer a call."""
        await self._send(wire.SessionRequest(decision=checked(decision)))

    async def cancel(self, run_id: str, reason: str = "") -> None:
        """Stop a run."""
        await self._send(wire.SessionRequest(cancel=wire.Cancel(run_id=run_id, reason=reason)))

    async def _send(self, frame: wire.SessionRequest) -> types_pb2.Receipt:
        """Return the receipt of a frame, however many connections that takes; raises PawlError if it says no."""
        self._check_entered()
        if self._failure is not None:
            raise self._failure
        if (size := frame.ByteSize()) > FRAME_BYTES_MAX:
            raise TooLarge(f"a frame has at most {FRAME_BYTES_MAX} bytes, this one has {size}")
        frame.frame_id = next(self._frame_ids)
        future: asyncio.Future[types_pb2.Receipt] = asyncio.get_running_loop().create_future()
        self._unreceipted[frame.frame_id] = (frame, future)
        if self._outgoing is not None:
            self._outgoing.put_nowait(frame)
        receipt = await future
        check_taken(receipt)
        return receipt

    def _check_entered(self) -> None:
        if self._connection is None:
            raise RuntimeError("the session is not connected: use it within `with client.session(...) as session:`")

    async def _stay_connected(self) -> NoReturn:
        """Connect to one replica after the other until one refuses for good or none answers, which it raises."""
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
                error = NoAnswer(f"no answer from {address}: it is silent")
            except Exception as caught:  # noqa: BLE001  # however a connection ends, the next replica is tried
                error = caught
            was_connected, self._outgoing = self._outgoing is not None, None
            if was_connected:
                last_answer, failures = loop.time(), 0
                self._on_lost()
            is_hopeless = isinstance(error, _HOPELESS)
            if is_hopeless or loop.time() - last_answer >= self._target.retry_seconds:
                raise error
            await asyncio.sleep(min(0.1 * 2**failures, 2.0))
            failures += 1

    def _end(self, connection: asyncio.Task[NoReturn]) -> None:
        """Tell all who wait why the session is over."""
        failure = None if connection.cancelled() else connection.exception()
        self._failure = error = failure or Cancelled("the session was left")
        self._news.set()
        for _, future in self._unreceipted.values():
            if not future.done():
                future.set_exception(error)
        self._unreceipted.clear()

    async def _connect(self, address: str, failures: int) -> None:
        """Use one connection until it ends; a replica that does not take it in time is not waited for."""
        async with self._target.connect(address) as channel:
            stream: Any = AgentServiceStub(channel).Session(metadata=self._target.metadata)
            async with asyncio.timeout(min(_OPENING_SECONDS * 2**failures, SILENCE_SECONDS_MAX)):
                await stream.write(wire.SessionRequest(frame_id=next(self._frame_ids), hello=self._hello))
                await stream.initial_metadata()
            frame = await self._read(stream)
            self._on_connected(address)  # Before anything else begins: if it fails, nobody is connected.
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
        """Return what a fresh connection sends first: attachments, then all that has no receipt yet."""
        outgoing: asyncio.Queue[wire.SessionRequest] = asyncio.Queue()
        self._attaching_again = {next(self._frame_ids): run_id for run_id in self._last_seq}
        for frame_id, run_id in self._attaching_again.items():
            attach = wire.Attach(run_id=run_id, after_seq=self._last_seq[run_id])
            outgoing.put_nowait(wire.SessionRequest(frame_id=frame_id, attach=attach))
        for frame, _ in self._unreceipted.values():
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
        if (run_id := self._attaching_again.pop(receipt.frame_id, None)) is not None:
            self._check_attached(run_id, receipt)
            return
        frame, future = self._unreceipted.pop(receipt.frame_id, (None, None))
        if frame is None or future is None:
            return  # Of a hello, or of a tool's progress.
        if receipt.status in TAKEN and frame.HasField("start"):
            self._last_seq.setdefault(receipt.run_id, 0)
        if receipt.status in TAKEN and frame.HasField("attach"):
            self._last_seq[receipt.run_id] = frame.attach.after_seq
        if not future.done():
            future.set_result(receipt)

    def _check_attached(self, run_id: str, receipt: types_pb2.Receipt) -> None:
        """Leave a run that a reconnect could not attach to again, and tell the reader, who would wait for ever."""
        try:
            check_taken(receipt)
        except PawlError as error:
            error.metadata = {"run_id": run_id}
            self._last_seq.pop(run_id, None)
            self._give(error)

    def _take_offer(self, offer: wire.Offer) -> None:
        call_id = offer.call.call_id
        self._offers[call_id] = offer
        if call_id not in self._tool_tasks:  # Else it is offered again after a reconnect, and being run.
            self._begin(offer)

    def _begin(self, offer: wire.Offer) -> None:
        call_id = offer.call.call_id
        self._tool_tasks[call_id] = task = asyncio.create_task(self._run_tool(offer), name=f"tool.{call_id}")
        task.add_done_callback(partial(self._begin_again, offer))

    def _begin_again(self, offer: wire.Offer, _: asyncio.Task[None]) -> None:
        """Run a call once more that was revoked, and offered again before its task had ended."""
        call_id = offer.call.call_id
        del self._tool_tasks[call_id]
        newest = self._offers.get(call_id, offer)
        if newest is offer:
            self._offers.pop(call_id, None)
        else:
            self._begin(newest)

    async def _run_tool(self, offer: wire.Offer) -> None:
        """Run an offered call and return its result, which is refused if it was settled elsewhere meanwhile."""
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
                    continue  # It was offered again, after a reconnect.
                if isinstance(error, CallNotPending):
                    self._keep(call.call_id, content, is_error=is_error)
            break
        del self._offers[call.call_id]

    def _keep(self, call_id: str, content: bytes, *, is_error: bool) -> None:
        """Keep a result that came under an older lease: the next one may be on its way."""
        self._results[call_id] = (content, is_error)
        if len(self._results) > self._hello.calls_max:
            del self._results[next(iter(self._results))]

    async def _perform(self, call: call_pb2.Call) -> tuple[bytes, bool]:
        """Return the content of the result of a call, and whether it is an error for the model."""
        from pawl.client.front_end import context_of, perform  # noqa: PLC0415  # is there since the hello was made

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
        """Say how far a call is, if anybody is there; nobody waits for the receipt."""
        offer = self._offers.get(call_id)
        if offer is not None and self._outgoing is not None:
            report = wire.ToolProgressReport(run_id=offer.call.run_id, call_id=call_id, offer_epoch=offer.offer_epoch)
            report.message = message.encode(errors="replace")[:_PROGRESS_BYTES_MAX].decode(errors="ignore")
            if fraction is not None:
                report.fraction = fraction
            self._outgoing.put_nowait(wire.SessionRequest(frame_id=next(self._frame_ids), tool_progress=report))
