"""The workers attached to this process, and the calls that this process's executions send to any worker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, TypeVar

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, CallKey, StoreId, WorkerId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.tasks import end, hold, shield
from pawl.chassis.rpc.retry import ANY, INTERNAL_SECONDS_MAX, Retry
from pawl.chassis.strict_json import dumps_canonical
from pawl.errors import Cancelled, DeadlineExceeded, DependencyUnavailable, HelloRequired, PawlError, ShuttingDown
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool.v1.worker_pb2 import AttachWorkerRequest, AttachWorkerResponse
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.execution.execution import wait_any
from pawl.tool_registry.sources.worker.answers import bound, check_frame, finding_of, progress_of, value_of
from pawl.tool_registry.sources.worker.call import PendingCall, call_of
from pawl.tool_registry.sources.worker.late_results import LateResults
from pawl.tool_registry.sources.worker.link import WorkerLink, cancel, keep_checkpoint, put_back_unsent
from pawl.tool_registry.sources.worker.rules import Attached, NewsKind, Purpose, WorkerKey
from pawl.tool_registry.sources.worker.store.workers import PostgresWorkerRepository, WorkerCall
from pawl.tool_registry.sources.worker.tools import WorkerTools
from pawl.tools.rules.definition import CHECKPOINT_BYTES_MAX, ToolVersion
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.reconciling import ReconcileResult, cannot_say, failed, happened
from pawl.tools.sdk.tool import Tool, forwarded
from pawl.values import EffectClass

_SILENT_LEASES: Final = 3
_HEARTBEATS_PER_LEASE: Final = 3
_POLLS_PER_SILENCE: Final = 4
_RETRY_SECONDS: Final = 0.3
# Time to send the last frames when a stream ends.
_FLUSH_SECONDS: Final = 1.0

_log = logs.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    lease_seconds: float = 15.0
    poll_seconds: float = 1.0
    progress_seconds: float = 0.2
    forget_seconds: float = 60.0
    internal_seconds_max: float = INTERNAL_SECONDS_MAX

    @property
    def silence_seconds(self) -> float:
        """How long a worker must appear lost, in seconds, before it is treated as lost.

        If the worker is alive, its process renews the lease at every poll.
        """
        return max(self.lease_seconds / _HEARTBEATS_PER_LEASE, self.poll_seconds * _POLLS_PER_SILENCE)


class WorkerHub:
    """Runs workers' tools. An async context manager, and the ToolSource of kind `worker`.

    All calls are rows in the database that the replicas share. If a worker attached to this process has a free slot,
    the hub records the call as already held by that worker. Otherwise, the call waits until a process with a free
    worker claims it.
    """

    def __init__(
        self,
        repository: PostgresWorkerRepository,
        audit: AuditTrail,
        *,
        clock: Clock,
        stopping: Callable[[], Awaitable[object]],
        options: WorkerOptions,
    ) -> None:
        self._repository = repository
        self._clock = clock
        self._stopping = stopping
        self._options = options
        retry = partial(Retry, clock, transient=ANY, event="worker.database_delayed")
        self._retry = retry(internal_seconds_max=options.internal_seconds_max)
        self._retry_result = retry(internal_seconds_max=options.lease_seconds / _HEARTBEATS_PER_LEASE)
        self._late = LateResults(repository, audit, self._retry)
        self._links: dict[WorkerKey, WorkerLink] = {}
        self._pending: dict[CallKey, PendingCall] = {}
        self._answering: set[asyncio.Task[Any]] = set()
        self._progress: dict[CallKey, tuple[WorkerLink, pb.WorkerProgress]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def __aenter__(self) -> Self:
        loops = (
            self._watch_stop(),
            self._repeat(self._maintain, self._options.poll_seconds),
            self._repeat(self._report_progress, self._options.progress_seconds),
            self._repeat(self._register_successors, self._options.lease_seconds / _HEARTBEATS_PER_LEASE),
            self._repeat(self._repository.forget, self._options.forget_seconds),
            self._repeat(partial(self._repository.listen, self._on_news), _RETRY_SECONDS),
        )
        self._loops = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end([*self._loops, *self._answering])
        await self._late.end()

    def tool(self, entry: ToolVersion) -> Tool[..., Any]:
        return forwarded(entry.definition, partial(self._run, entry), reconcile=partial(self._reconcile, entry))

    async def _run(self, entry: ToolVersion, arguments: dict[str, Any], context: ToolContext) -> Any:
        call = call_of(entry, Purpose.RUN, dumps_canonical(arguments), context, now=self._clock.now())
        return value_of(entry, await self._await_answer(entry, call, context))

    async def _reconcile(self, entry: ToolVersion, context: ToolContext) -> ReconcileResult:
        """Continue a call that a worker may still hold, or ask another worker about its outcome."""
        run = call_of(entry, Purpose.RUN, b"", context, now=self._clock.now())
        if await self._retry.until_answered(lambda: self._repository.adopt(run), call=run.key.call_id):
            try:
                return happened(value_of(entry, await self._await_answer(entry, run, context, is_written=True)))
            except ToolError as error:
                return failed(error)
        if entry.definition.effect is EffectClass.AT_MOST_ONCE:
            return cannot_say()
        query = call_of(entry, Purpose.RECONCILE, b"", context, now=self._clock.now())
        return finding_of(entry, await self._await_answer(entry, query, context))

    async def _await_answer(
        self, entry: ToolVersion, call: WorkerCall, context: ToolContext, *, is_written: bool = False
    ) -> pb.WorkerResult:
        pending = PendingCall(
            call,
            effect=entry.definition.effect,
            repository=self._repository,
            clock=self._clock,
            context=context,
            silence_seconds=self._options.silence_seconds,
            retry=self._retry,
        )
        earlier = self._pending.get(pending.key)
        self._pending[pending.key] = pending
        task = asyncio.current_task()
        if task is not None:
            hold(self._answering, task)
        try:
            return await pending.answer(lambda: self._record(call, is_written=is_written))
        finally:
            if earlier is not None:
                earlier.news.set()
            if self._pending.get(pending.key) is pending:
                del self._pending[pending.key]

    async def _record(self, call: WorkerCall, *, is_written: bool) -> None:
        if is_written:
            self._wake_group(call.key.store_id, call.group_name)
            return
        link = self._free_link(call)
        epoch = None
        if link is None:
            await self._retry.until_answered(lambda: self._repository.add(call, None), call=call.key.call_id)
        else:
            with link.reserved(1):
                epoch = await self._record_held(call, link)
                if epoch is not None:
                    call.details.lease_epoch = epoch
                    await self._send_call(link, call.details)
        if epoch is None:
            self._wake_group(call.key.store_id, call.group_name)

    async def _record_held(self, call: WorkerCall, link: WorkerLink) -> int | None:
        key = call.key
        try:
            return await self._retry.until_answered(lambda: self._repository.add(call, link.worker), call=key.call_id)
        except asyncio.CancelledError:
            if key.call_id not in link.held_calls:
                abandon = partial(self._repository.abandon, key, call.token, link.worker.key)
                await self._retry.until_answered(abandon, call=key.call_id)
            raise

    def _free_link(self, call: WorkerCall) -> WorkerLink | None:
        links = [
            link
            for key, link in self._links.items()
            if key[:2] == (call.key.store_id, call.group_name)
            and link.worker.tools.get(call.details.tool_name) == call.definition_hash
            and link.free_slots
            and self._is_live(link)
        ]
        return max(links, key=lambda link: link.free_slots, default=None)

    def _is_live(self, link: WorkerLink) -> bool:
        return self._clock.monotonic() - link.last_frame_at < self._options.lease_seconds

    async def _send_call(self, link: WorkerLink, call: pb.Invocation) -> None:
        if not link.send_call(call):
            # Nothing was sent, so any worker may get it.
            key = CallKey(StoreId(call.store_id), CallId(call.call_id))
            await self._retry.until_answered(
                lambda: self._repository.put_back(key, call.lease_epoch), call=call.call_id
            )

    async def serve(
        self,
        caller: Principal,
        hello: pb.WorkerHello,
        tools: WorkerTools,
        incoming: AsyncIterator[AttachWorkerRequest],
        send: Callable[[AttachWorkerResponse], Awaitable[None]],
    ) -> None:
        """Attach a worker until its stream ends. Return once the worker has drained or disconnected.

        Raises:
            InvalidField, InvalidSchema, PermissionDenied, ToolExists: Its tools cannot be registered.
            Cancelled: The worker attached again.
            DeadlineExceeded: The worker did not send anything for three lease periods.
            Overloaded: The worker does not read its stream.
            ShuttingDown: This process is shutting down. Attach again.
        """
        if self._is_stopping:
            raise ShuttingDown
        hashes = await tools.register(caller, hello)
        key = WorkerKey(caller.store_id, hello.group_name, WorkerId(hello.worker_id))
        worker = Attached(key=key, attachment=secrets.token_hex(16), tools=hashes)
        link = WorkerLink(
            worker,
            calls_max=hello.calls_max or 1,
            last_frame_at=self._clock.monotonic(),
            register=lambda: tools.register(caller, hello),
        )
        earlier = self._links.get(key)
        if earlier is not None:
            earlier.end(Cancelled("the worker attached again"))
        lease_seconds = self._options.lease_seconds
        held = {CallId(call.call_id): call.lease_epoch for call in hello.held_calls}
        link.held_calls.update(await self._repository.attach(worker, held=held, lease_seconds=lease_seconds))
        welcome = pb.WorkerWelcome(
            lease_seconds=lease_seconds,
            heartbeat_seconds=lease_seconds / _HEARTBEATS_PER_LEASE,
            checkpoint_bytes_max=CHECKPOINT_BYTES_MAX,
        )
        link.send(AttachWorkerResponse(welcome=welcome))
        for call_id, epoch in held.items():
            if link.held_calls.get(call_id) != epoch:
                link.send(cancel(call_id, epoch))
        self._links[key] = link
        _log.info("worker.attached", group=key.group_name, worker=key.worker_id, tools=sorted(hashes))
        link.due.set()
        writer = asyncio.create_task(self._write(link, send))
        tasks = [asyncio.create_task(self._read(link, incoming)), asyncio.create_task(self._feed(link)), writer]
        try:
            await wait_any(*tasks, link.ended)
            if link.ended.done():
                await wait_any(writer, timeout_seconds=_FLUSH_SECONDS)
            for task in tasks:
                if task.done():
                    task.result()
            error = link.ended.result() if link.ended.done() else None
            if error is not None:
                raise error
        finally:
            await self._detach(link, tasks)

    async def _detach(self, link: WorkerLink, tasks: list[asyncio.Task[None]]) -> None:
        has_drained = link.is_draining and not link.held_calls
        link.end(Cancelled("the stream has ended"))
        await end(tasks)
        if self._links.get(link.worker.key) is link:
            del self._links[link.worker.key]
        _log.info("worker.detached", group=link.worker.key.group_name, worker=link.worker.key.worker_id)
        if has_drained:
            try:
                await self._repository.detach(link.worker)
                await self._register_successors()
            except Exception as error:  # noqa: BLE001  # the lease expires instead
                _log.warning("worker.lease_not_ended", error=type(error).__name__)

    async def _read(self, link: WorkerLink, incoming: AsyncIterator[AttachWorkerRequest]) -> None:
        silence_max = _SILENT_LEASES * self._options.lease_seconds
        while True:
            try:
                async with asyncio.timeout(silence_max):
                    frame = await anext(incoming, None)
            except TimeoutError:
                raise DeadlineExceeded(f"the worker sent no frame for {silence_max:g} s") from None
            if frame is None:
                return
            link.last_frame_at = self._clock.monotonic()
            check_frame(frame)
            match frame.WhichOneof("frame"):
                case "heartbeat":
                    link.send(AttachWorkerResponse(heartbeat=pb.WorkerHeartbeatAnswer()))
                case "drain":
                    link.drain(None)
                case "progress":
                    self._take_progress(link, frame.progress)
                case "checkpoint":
                    await keep_checkpoint(self._repository, self._retry_result, link, frame.checkpoint)
                case "result":
                    await self._take_result(link, frame.result)
                case _:
                    raise HelloRequired

    async def _write(self, link: WorkerLink, send: Callable[[AttachWorkerResponse], Awaitable[None]]) -> None:
        while (frame := await link.next()) is not None:
            await send(frame)

    async def _feed(self, link: WorkerLink) -> None:
        while True:
            await link.due.wait()
            link.due.clear()
            while (most := link.free_slots) and self._is_live(link):
                with link.reserved(most):
                    try:
                        calls = await self._claim(link, most)
                    except Exception as error:  # noqa: BLE001  # the next poll retries
                        _log.warning("worker.claim_failed", error=type(error).__name__)
                        link.note_lost_claim(self._clock.monotonic())
                        break
                    for call in calls:
                        await self._send_call(link, call)
                if len(calls) < most:
                    break

    async def _claim(self, link: WorkerLink, most: int) -> Sequence[pb.Invocation]:
        """Claim calls. If this is cancelled, claimed calls are still sent.

        If the stream has ended, the calls wait for a worker again.
        """
        claim = asyncio.ensure_future(self._repository.claim(link.worker, most=most))
        try:
            return await shield(claim)
        except asyncio.CancelledError:
            for call in await claim:
                await self._send_call(link, call)
            raise

    def _take_progress(self, link: WorkerLink, report: pb.WorkerProgress) -> None:
        if link.held_calls.get(report.call_id) != report.lease_epoch:
            return
        key = CallKey(link.worker.key.store_id, CallId(report.call_id))
        pending = self._pending.get(key)
        if pending is not None:
            progress = progress_of(report)
            pending.report(progress.fraction, progress.message)
        else:
            self._progress[key] = (link, report)

    async def _take_result(self, link: WorkerLink, result: pb.WorkerResult) -> None:
        call = CallKey(link.worker.key.store_id, CallId(result.call_id))
        bound(result)
        link.mark_answered(result.call_id, result.lease_epoch)
        # The worker's frames are not read until then. If writing fails, the worker reattaches and resends the result.
        status, late = await self._retry_result.until_answered(
            lambda: self._repository.finish(link.worker.key, result), call=result.call_id
        )
        receipt = pb.ResultReceipt(call_id=result.call_id, lease_epoch=result.lease_epoch, status=status)
        link.send(AttachWorkerResponse(receipt=receipt))
        if status != pb.RESULT_STATUS_ACCEPTED:
            _log.info("worker.result_refused", call=result.call_id, status=pb.ResultStatus.Name(status))
        if late is not None:
            self._late.record(call, late, result)
        self._wake_call(call)
        link.drop(result.call_id, result.lease_epoch)

    def _on_news(self, kind: NewsKind, store_id: StoreId, name: str) -> None:
        """Handle a notification from another process. If a notification is missed, polling finds the change."""
        match kind:
            case NewsKind.WAITING:
                self._wake_group(store_id, name)
            case NewsKind.CALL:
                self._wake_call(CallKey(store_id, CallId(name)))
            case NewsKind.CANCEL:
                for key, link in self._links.items():
                    if key.store_id == store_id:
                        link.cancel(CallId(name))

    def _wake_group(self, store_id: StoreId, group_name: str) -> None:
        for key, link in self._links.items():
            if key[:2] == (store_id, group_name):
                link.due.set()

    def _wake_call(self, key: CallKey) -> None:
        pending = self._pending.get(key)
        if pending is not None:
            pending.news.set()

    async def _maintain(self) -> None:
        await self._renew()
        await put_back_unsent(self._repository, list(self._links.values()), self._clock.monotonic())
        if self._pending:
            for key in await self._repository.news():
                self._wake_call(key)
        if self._links:
            for store_id, group_name in await self._repository.waiting_groups():
                self._wake_group(store_id, group_name)
        calls = [
            (key, CallId(call_id), epoch)
            for key, link in self._links.items()
            for call_id, epoch in link.held_calls.items()
        ]
        if calls:
            for worker, call_id in await self._repository.unwanted(calls):
                if worker in self._links:
                    self._links[worker].cancel(call_id)

    async def _renew(self) -> None:
        now = self._clock.monotonic()
        links = {link.worker.attachment: link for link in self._links.values() if self._is_live(link)}
        if not links:
            return
        seconds = {
            attachment: self._options.lease_seconds - (now - link.last_frame_at) for attachment, link in links.items()
        }
        renewed = await self._repository.renew(seconds)
        for attachment, link in links.items():
            if attachment not in renewed:
                link.end(Cancelled("the worker attached again to another replica"))

    async def _register_successors(self) -> None:
        """Register attached workers' tools if no live worker has the current definitions."""
        links = [link for link in self._links.values() if not link.is_draining]
        unserved = await self._repository.unserved([link.worker.attachment for link in links]) if links else ()
        for link in reversed(links):  # The worker that attached last is considered the newest.
            if link.worker.attachment in unserved:
                try:
                    await link.register()
                except PawlError as error:
                    key = link.worker.key
                    _log.warning(
                        "worker.not_registered", group=key.group_name, worker=key.worker_id, error=error.message
                    )

    async def _report_progress(self) -> None:
        reports, self._progress = self._progress, {}
        for link, report in reports.values():
            worker, call_id = link.worker.key, CallId(report.call_id)
            await self._repository.report(worker, call_id, report.lease_epoch, progress_of(report))

    async def _watch_stop(self) -> None:
        await self._stopping()
        self._is_stopping = True
        for link in self._links.values():
            link.drain(ShuttingDown())

    async def _repeat(self, step: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            try:
                await step()
            except DependencyUnavailable:
                _log.debug("worker.database_unreachable")
            except Exception:  # noqa: BLE001  # the next round may succeed
                _log.exception("worker.loop_failed")
            await self._clock.sleep(seconds)
