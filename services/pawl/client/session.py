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
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from pawl.agent.v1 import session_pb2 as wire
from pawl.agent.v1 import types_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.chassis.start import StartError
from pawl.chassis.tasks import within
from pawl.client.decisions import TAKEN, check_taken, checked
from pawl.client.forms import natural, parts_of
from pawl.client.streams import GIVE_UP_SECONDS, SILENCE_SECONDS_MAX
from pawl.client.target import NoAnswer, Target, error_of
from pawl.errors import Cancelled, InvalidArgument, PawlError, PermissionDenied, Unauthenticated, Unimplemented
from pawl.event.v1 import message_pb2, run_pb2

if TYPE_CHECKING:
    from pawl.tool.v1 import tool_pb2
    from pawl.tools import Tool

_HEARTBEAT_SECONDS: Final = 10.0
# Cancelled: another program has the client id. Each would end the stream of the other one for ever.
_HOPELESS: Final = (Cancelled, InvalidArgument, PermissionDenied, Unauthenticated, Unimplemented, StartError)


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
    answered for `give_up_seconds`, or one refuses for good, every method raises the error of the last connection
    (PawlError).
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
        give_up_seconds: float = GIVE_UP_SECONDS,
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
        self._give_up_seconds = give_up_seconds
        self._frame_ids = map(f"{secrets.token_hex(4)}-{{}}".format, itertools.count(1))
        self._unreceipted: dict[str, tuple[wire.SessionRequest, asyncio.Future[types_pb2.Receipt]]] = {}
        self._last_seq: dict[str, int] = {}
        self._offers: dict[str, wire.Offer] = {}
        self._tool_tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(calls_max, thread_name_prefix="pawl-tool")
        # No longer than the logs of the attached runs: a receipt behind an event must not wait for its reader.
        self._incoming: asyncio.Queue[wire.SessionResponse | Exception] = asyncio.Queue()
        self._outgoing: asyncio.Queue[wire.SessionRequest] | None = None
        self._failure: Exception | None = None
        self._connection: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._connection = asyncio.create_task(self._stay_connected(), name="session")
        return self

    async def __aexit__(self, *_: object) -> None:
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
        """Return the next event, gap or end. Safe to cancel."""
        if self._incoming.empty():
            self._check_entered()
        frame = await self._incoming.get()
        if isinstance(frame, Exception):
            self._incoming.put_nowait(frame)
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
        if self._failure is not None:
            raise self._failure
        self._check_entered()
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

    async def _stay_connected(self) -> None:
        """Connect to one replica after the other until one refuses for good or none answers."""
        loop = asyncio.get_running_loop()
        last_answer, failures = loop.time(), 0
        for address in itertools.cycle(self._addresses):
            error: Exception = NoAnswer(f"{address} closed the session")
            try:
                await self._connect(address)
            except grpc.aio.AioRpcError as caught:
                error = error_of(caught, address)
                error.__cause__ = caught
            except TimeoutError:
                error = NoAnswer(f"no answer from {address}: it is silent")
            except Exception as caught:  # noqa: BLE001  # however a connection ends, the next replica is tried
                error = caught
            if self._outgoing is not None:
                self._outgoing, last_answer, failures = None, loop.time(), 0
                self._on_lost()
            if isinstance(error, _HOPELESS) or loop.time() - last_answer > self._give_up_seconds:
                self._fail(error)
                return
            await asyncio.sleep(min(0.1 * 2**failures, 2.0))
            failures += 1

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._incoming.put_nowait(error)
        for _, future in self._unreceipted.values():
            if not future.done():
                future.set_exception(error)

    async def _connect(self, address: str) -> None:
        """Use one connection until it ends."""
        async with self._target.connect(address) as channel:
            stream: Any = AgentServiceStub(channel).Session(metadata=self._target.metadata)
            await stream.write(wire.SessionRequest(frame_id=next(self._frame_ids), hello=self._hello))
            frame = await self._read(stream)
            self._outgoing = self._first_frames()
            writing = asyncio.create_task(self._write(stream, self._outgoing), name="session.write")
            self._on_connected(address)
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
        for run_id, seq in self._last_seq.items():
            attach = wire.Attach(run_id=run_id, after_seq=seq)
            outgoing.put_nowait(wire.SessionRequest(frame_id=next(self._frame_ids), attach=attach))
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
                self._incoming.put_nowait(frame)
            case "gap" if frame.gap.to_seq > self._last_seq.get(frame.gap.run_id, 0):
                self._last_seq[frame.gap.run_id] = frame.gap.to_seq
                self._incoming.put_nowait(frame)
            case "end" if self._last_seq.pop(frame.end.run_id, None) is not None:
                self._incoming.put_nowait(frame)
            case "receipt":
                self._take_receipt(frame.receipt)
            case "offer":
                self._take_offer(frame.offer)
            case "offer_revoked" if (task := self._tool_tasks.get(frame.offer_revoked.call_id)) is not None:
                task.cancel()

    def _take_receipt(self, receipt: types_pb2.Receipt) -> None:
        frame, future = self._unreceipted.pop(receipt.frame_id, (None, None))
        if frame is None or future is None:
            return  # Of an attachment that a reconnect made again, or of a tool's progress.
        if receipt.status in TAKEN and frame.HasField("start"):
            self._last_seq.setdefault(receipt.run_id, 0)
        if receipt.status in TAKEN and frame.HasField("attach"):
            self._last_seq[receipt.run_id] = frame.attach.after_seq
        if not future.done():
            future.set_result(receipt)

    def _take_offer(self, offer: wire.Offer) -> None:
        call_id = offer.call.call_id
        self._offers[call_id] = offer
        if call_id not in self._tool_tasks:  # Else it is offered again after a reconnect, and being run.
            self._tool_tasks[call_id] = task = asyncio.create_task(self._run_tool(call_id), name=f"tool.{call_id}")
            task.add_done_callback(lambda _: self._tool_tasks.pop(call_id, None))

    async def _run_tool(self, call_id: str) -> None:
        """Run an offered call and return its result, which is refused if it was settled elsewhere meanwhile."""
        from pawl.client.front_end import context_of, perform  # noqa: PLC0415  # is there since the hello was made

        call, cancelled, loop = self._offers[call_id].call, threading.Event(), asyncio.get_running_loop()

        def report(fraction: float | None, message: str) -> None:
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._report, call_id, fraction, message)

        try:
            content, is_error = await perform(
                self._tools.get(call.tool_name), call, context_of(call, cancelled, report), self._threads
            )
        finally:
            cancelled.set()
            offer = self._offers.pop(call_id)
        result = types_pb2.ToolResult(run_id=call.run_id, call_id=call_id, content_json=content, is_error=is_error)
        result.offer_epoch = offer.offer_epoch
        with suppress(PawlError):  # Refused, or the session is over: nobody wants the result any more.
            await self._send(wire.SessionRequest(tool_result=result))

    def _report(self, call_id: str, fraction: float | None, message: str) -> None:
        """Say how far a call is, if anybody is there; nobody waits for the receipt."""
        offer = self._offers.get(call_id)
        if offer is not None and self._outgoing is not None:
            report = wire.ToolProgressReport(run_id=offer.call.run_id, call_id=call_id, offer_epoch=offer.offer_epoch)
            report.message = message
            if fraction is not None:
                report.fraction = fraction
            self._outgoing.put_nowait(wire.SessionRequest(frame_id=next(self._frame_ids), tool_progress=report))
