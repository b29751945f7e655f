"""The worker process. It attaches to the registry, runs calls, reconnects and drains."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import msgspec

from pawl.chassis import job_reports
from pawl.chassis.identity.local_key import IN_CLEAR, check_hidden, find_key
from pawl.chassis.process import logs
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.process.tasks import delivered, end, within
from pawl.chassis.rpc import tls
from pawl.chassis.rpc.client import open_channel
from pawl.chassis.strict_json import storable
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import worker_pb2
from pawl.tool.v1.worker_pb2_grpc import WorkerServiceStub
from pawl.worker.function import (
    DID_NOT_HAPPEN,
    CallContext,
    Category,
    EffectClass,
    Function,
    OutcomeUnknown,
    Superseded,
    ToolError,
)

_CONTENT_BYTES_MAX: Final = 1024 * 1024 + 1
# The registry would truncate longer text, or the message would be too large and break the stream.
_TEXT_CHARACTERS_MAX: Final = 64 * 1024
_BACKOFF_SECONDS: Final = (0.1, 0.5, 1.0, 2.0, 5.0)
_UNSENT_MAX: Final = 1000
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# The worker reconnects after these codes. Any other error must be fixed by the operator.
_PASSING: Final = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN"}
_NEXT: Final = {
    "UNAUTHENTICATED": "See PAWL_API_KEY, or the Worker's `api_key`.",
    "PERMISSION_DENIED": "See PAWL_API_KEY, or the Worker's `api_key`: the key must have the worker role.",
    "UNIMPLEMENTED": "The address must be the tool-registry's, for example 127.0.0.1:7602.",
}
# What gRPC reports when only one side uses TLS, or the certificate is not trusted.
_OF_TLS: Final = {
    "CERTIFICATE_VERIFY_FAILED": "The server's certificate is not signed by `authority` or PAWL_TLS_CA_FILE.",
    "WRONG_VERSION_NUMBER": "The server does not use TLS: remove `authority` and PAWL_TLS_CA_FILE.",
}
_MAYBE_TLS: Final = "If the server uses TLS, set `authority` or PAWL_TLS_CA_FILE."
# A suite starts listening a moment before it writes its address and key.
_KEYLESS_MAX: Final = 5

_TOO_LARGE: Final = "a checkpoint of {} bytes exceeds the limit of {}: save less"

Call = tuple[str, int]
Request = worker_pb2.AttachWorkerRequest
F = TypeVar("F", bound=Callable[..., Any])

_log = logs.get_logger(__name__)

# Each event loop's running workers. An event loop has one handler per signal.
_running_on: Final[dict[asyncio.AbstractEventLoop, set[Worker]]] = {}


@dataclass(frozen=True, slots=True)
class _Running:
    task: asyncio.Task[dict[str, Any]]
    context: CallContext
    function: Function


class AttachError(grpc.aio.AioRpcError):
    """Raised when the registry refuses the worker. The message is one sentence."""

    def __init__(self, error: grpc.aio.AioRpcError, address: str, group_name: str) -> None:
        code, details = error.code(), error.details()
        super().__init__(code, error.initial_metadata(), error.trailing_metadata(), details)
        self._sentence = (
            f"{address} refused the worker {group_name!r}: {details or code.name}"
            f" ({code.name}). {_NEXT.get(code.name, 'Check its name and its tools.')}"
        )

    def __str__(self) -> str:
        return self._sentence


class Worker:
    """Runs tools as the group `name`, with at most `calls_max` concurrent calls. Sync functions run in threads.

    Without `api_key`, the worker uses PAWL_API_KEY, or the key of the suite whose data folder is PAWL_DATA or `.pawl`.
    With `authority` or PAWL_TLS_CA_FILE, a file with CA certificates, it connects over TLS. Without TLS, it sends the
    key to other machines only if `key_in_clear` or PAWL_KEY_IN_CLEAR=1 is set.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        api_key: str | None = None,
        calls_max: int = 8,
        authority: str | Path | None = None,
        key_in_clear: bool = False,
    ) -> None:
        self._address, self._api_key, self._keyless = address, api_key, 0
        given = authority or os.environ.get("PAWL_TLS_CA_FILE")
        self._certificates = tls.of_client(Path(given) if given else None, SystemClock())
        self._in_clear = key_in_clear or os.environ.get(IN_CLEAR) in {"1", "true"}
        self._group_name, self._calls_max = name, calls_max
        self._worker_id = f"w-{secrets.token_hex(8)}"
        self._threads = ThreadPoolExecutor(calls_max, thread_name_prefix=f"worker-{name}")
        self._functions: dict[str, Function] = {}
        self._running: dict[Call, _Running] = {}
        self._results: dict[Call, worker_pb2.WorkerResult] = {}
        self._checkpoints: dict[int, tuple[worker_pb2.WorkerCheckpoint, Future[None]]] = {}
        self._checkpoint_bytes_max = self._checkpoints_sent = 0
        self._outgoing: asyncio.Queue[Request] = asyncio.Queue()
        self._is_draining = self._has_key = False
        self._lease_seconds, self._heard_at = 15.0, time.monotonic()

    def tool(
        self,
        *,
        category: Category = "SENSITIVE",
        effect: EffectClass = "AT_MOST_ONCE",
        reconcile: Callable[..., Any] | None = None,
        reports: str | Mapping[str, float | Sequence[int]] = "",
        **options: Any,
    ) -> Callable[[F], F]:
        """Turn a function into a tool. `options` are additional fields of pawl.tool.v1.ToolDefinition.

        The tool's name, description and schema come from the function's name, docstring and types. `reconcile` is
        required if the effect is RECONCILABLE. It receives the CallContext and returns the call's result or
        DID_NOT_HAPPEN, or raises an exception. `reports` selects the job iterations that are reported, for example
        "end" or {"every": 10}. For a single call, it selects which progress is reported: {"progress": [50]} or
        {"minutes": 10}.

        Raises:
            ValueError: `reconcile` and `effect` do not match.
            InvalidField: `reports` is malformed.
            TypeError: A parameter has no type or has a type without a schema.
        """
        if (reconcile is not None) != (effect == "RECONCILABLE"):
            raise ValueError("reconcile must be set if, and only if, the effect is RECONCILABLE")
        enums = {"category": f"TOOL_CATEGORY_{category}", "effect_class": f"EFFECT_CLASS_{effect}"}
        if reports:
            policy = job_reports.read(reports)
            options["reports"] = policy | {"reports": f"JOB_REPORTS_{policy['reports']}"}

        def make(function: F) -> F:
            made = Function(function, reconcile, **enums, **options)
            self._functions[made.definition.name] = made
            return function

        return make

    def drain(self) -> None:
        """Stop accepting calls. `run` returns once the running calls are done. Idempotent.

        SIGTERM has the same effect.
        """
        self._is_draining = True
        self._outgoing.put_nowait(Request(drain=worker_pb2.WorkerDrain()))

    async def run(self) -> None:
        """Run calls until `drain` is called. If the stream breaks, reconnect and keep the running calls.

        Raises:
            AttachError: The registry refuses this worker because of its key or its tools.
            KeyInClear: The key would be sent unencrypted.
        """
        loop, failures = asyncio.get_running_loop(), 0
        running = _running_on.setdefault(loop, set())
        running.add(self)
        for number in _SIGNALS:
            with suppress(NotImplementedError, RuntimeError, ValueError):  # Not in the main thread, or on Windows.
                loop.add_signal_handler(number, _drain, running)
        self._credential()  # Fail before connecting if the key must not be sent.
        try:
            name = tls.server_name(self._address, "tool-registry")
            async with open_channel(self._address, tls=self._certificates, server_name=name) as channel:
                while not self._is_draining or self._running or self._results:
                    heard_at = self._heard_at
                    try:
                        await self._attach(WorkerServiceStub(channel).AttachWorker(metadata=self._credential()))
                    except grpc.aio.AioRpcError as error:
                        if not self._is_passing(error.code()):
                            raise AttachError(error, self._address, self._group_name) from None
                        self._log_broken(error.code().name, error.details() or "")
                    except TimeoutError:
                        self._log_broken("SILENT", "no message from the registry")
                    failures = 0 if self._heard_at > heard_at else failures + 1
                    if time.monotonic() - self._heard_at > self._lease_seconds:
                        self._stop_reconcilable()
                    if not self._is_draining or self._running or self._results:
                        longest = _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)]
                        await asyncio.sleep(longest * random.uniform(0.5, 1))  # noqa: S311  # spreads, hides nothing
        finally:
            running.discard(self)
            if not running:
                _running_on.pop(loop, None)
                for number in _SIGNALS:
                    loop.remove_signal_handler(number)
            await end([call.task for call in self._running.values()])
            for _, saved in self._checkpoints.values():
                _settle(saved, is_kept=False)
            self._threads.shutdown(wait=False)

    def _is_passing(self, code: grpc.StatusCode) -> bool:
        if not self._has_key and code is grpc.StatusCode.UNAUTHENTICATED:
            self._keyless += 1
            return self._keyless < _KEYLESS_MAX
        return code.name in _PASSING

    def _log_broken(self, code: str, detail: str) -> None:
        hint = next((hint for sign, hint in _OF_TLS.items() if sign in detail), _NEXT.get(code, ""))
        if not hint and "Socket closed" in detail and self._certificates is None:
            hint = _MAYBE_TLS
        more = {"hint": hint} if hint else {}
        _log.warning("worker.stream_broken", address=self._address, code=code, detail=detail, **more)

    def _credential(self) -> tuple[tuple[str, str], ...]:
        """Return the key as metadata.

        The key is looked up each time, because the suite may start later, or another process may take over its port.
        """
        addresses = [address.strip() for address in self._address.split(",")]
        key = self._api_key or find_key(addresses, environment=os.environ)
        self._has_key = key is not None
        if key:
            check_hidden(addresses, speaks_tls=self._certificates is not None, in_clear=self._in_clear)
        return (("authorization", f"Bearer {key}"),) if key else ()

    async def _attach(self, stream: Any) -> None:
        self._outgoing = asyncio.Queue()
        held = {call_id: epoch for call_id, epoch in sorted([*self._running, *self._results])}  # noqa: C416  # the newest
        hello = worker_pb2.WorkerHello(
            group_name=self._group_name,
            worker_id=self._worker_id,
            calls_max=self._calls_max,
            tools=[function.definition for function in self._functions.values()],
            held_calls=[worker_pb2.HeldCall(call_id=key, lease_epoch=epoch) for key, epoch in held.items()],
        )
        with suppress(asyncio.InvalidStateError):  # The stream broke immediately: reading raises the error.
            await stream.write(Request(hello=hello))
        writer: asyncio.Task[None] | None = None
        try:
            while True:
                async with asyncio.timeout(self._lease_seconds):
                    frame = await stream.read()
                if frame is grpc.aio.EOF:
                    return
                self._heard_at = time.monotonic()
                if frame.WhichOneof("frame") == "welcome":
                    self._lease_seconds = frame.welcome.lease_seconds
                    self._checkpoint_bytes_max = frame.welcome.checkpoint_bytes_max
                    for checkpoint, _ in self._checkpoints.values():
                        self._outgoing.put_nowait(Request(checkpoint=checkpoint))
                    for result in self._results.values():
                        self._outgoing.put_nowait(Request(result=result))
                    if self._is_draining:
                        self.drain()
                    writer = asyncio.create_task(self._write(stream, frame.welcome.heartbeat_seconds))
                else:
                    self._take(frame)
        finally:
            stream.cancel()
            await end([writer] if writer else [])

    async def _write(self, stream: Any, heartbeat_seconds: float) -> None:
        while True:
            frame = await within(heartbeat_seconds, self._outgoing.get())
            if frame is None:
                frame = Request(heartbeat=worker_pb2.WorkerHeartbeat())
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # Reading raises the error too.
                await stream.write(frame)

    def _take(self, frame: worker_pb2.AttachWorkerResponse) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "invocation":
            self._start(frame.invocation)
        elif kind == "receipt":
            self._results.pop((frame.receipt.call_id, frame.receipt.lease_epoch), None)
        elif kind == "checkpoint":
            sent = self._checkpoints.pop(frame.checkpoint.number, None)
            if sent is not None:
                _settle(sent[1], is_kept=frame.checkpoint.kept)
        elif kind == "cancel":
            self._stop(frame.cancel.call_id, before=frame.cancel.lease_epoch + 1)

    def _start(self, call: worker_pb2.Invocation) -> None:
        loop = asyncio.get_running_loop()
        key = (call.call_id, call.lease_epoch)

        def progress(fraction: float | None, message: str) -> None:
            if self._outgoing.qsize() > _UNSENT_MAX:
                return  # The stream is stuck; newer progress follows.
            text = storable(message[:_TEXT_CHARACTERS_MAX])
            report = worker_pb2.WorkerProgress(call_id=key[0], lease_epoch=key[1], fraction=fraction, message=text)
            loop.call_soon_threadsafe(lambda: self._outgoing.put_nowait(Request(progress=report)))

        def save(content: bytes) -> Future[None]:
            if len(content) > self._checkpoint_bytes_max:
                raise ToolError(_TOO_LARGE.format(len(content), self._checkpoint_bytes_max))
            saved: Future[None] = Future()
            loop.call_soon_threadsafe(self._send_checkpoint, key, content, saved)
            return saved

        context = CallContext(
            **{name: getattr(call, name) for name in ("store_id", "user_id", "conversation_id", "run_id", "call_id")},
            traceparent=call.traceparent,
            attempt=call.attempt,
            deadline=call.deadline_time.ToDatetime(UTC),
            progress=progress,
            last_checkpoint=msgspec.json.decode(call.last_checkpoint_json) if call.last_checkpoint_json else None,
            _save=save,
        )
        function = self._functions[call.tool_name]
        earlier = [running.task for other, running in self._running.items() if other[0] == call.call_id]
        started = _Running(loop.create_task(self._outcome(call, function, context, earlier)), context, function)
        self._running[key] = started
        started.task.add_done_callback(lambda task: self._end(key, task))

    def _send_checkpoint(self, key: Call, content: bytes, saved: Future[None]) -> None:
        if key not in self._running:
            _settle(saved, is_kept=False)
            return
        self._checkpoints_sent += 1
        made = worker_pb2.WorkerCheckpoint(
            call_id=key[0], lease_epoch=key[1], number=self._checkpoints_sent, content_json=content
        )
        self._checkpoints[made.number] = (made, saved)
        self._outgoing.put_nowait(Request(checkpoint=made))

    def _end(self, key: Call, task: asyncio.Task[dict[str, Any]]) -> None:
        function = self._running.pop(key).function
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or isinstance(error, OutcomeUnknown):
            outcome: dict[str, Any] = {"outcome_unknown": worker_pb2.OutcomeUnknown()}
        elif error is not None:
            name, kind = function.definition.name, type(error).__name__
            _log.warning("worker.tool_failed", tool=name, error=kind)
            text = str(error) if isinstance(error, ToolError) else f"{name} failed unexpectedly: {kind}"
            outcome = {"error_message": storable(text[:_TEXT_CHARACTERS_MAX])}
        else:
            outcome = task.result()
        result = self._results[key] = worker_pb2.WorkerResult(call_id=key[0], lease_epoch=key[1], **outcome)
        self._outgoing.put_nowait(Request(result=result))

    async def _outcome(
        self, call: worker_pb2.Invocation, function: Function, context: CallContext, earlier: list[asyncio.Task[Any]]
    ) -> dict[str, Any]:
        is_question = call.purpose == worker_pb2.INVOCATION_PURPOSE_RECONCILE
        if earlier and is_question:
            raise OutcomeUnknown  # The call is still running in this process.
        if earlier:
            self._stop(call.call_id, before=call.lease_epoch)
            await asyncio.wait(earlier)
        made = function.bind(call, context)
        is_async = inspect.iscoroutinefunction(function.reconcile if is_question else function.function)
        value = await (
            made() if is_async else asyncio.get_running_loop().run_in_executor(self._threads, delivered, made)
        )
        if value is DID_NOT_HAPPEN:
            return {"did_not_happen": worker_pb2.DidNotHappen()}
        # A result over the limit is truncated just above it, so that the registry refuses it: the whole result might
        # not fit into a message.
        return {"content_json": msgspec.json.encode(value)[:_CONTENT_BYTES_MAX]}

    def _stop(self, call_id: str, *, before: int) -> None:
        """Stop a call's executions whose epoch is lower than `before`."""
        for (other, epoch), running in self._running.items():
            if other == call_id and epoch < before:
                running.context.cancelled.set()
                if inspect.iscoroutinefunction(running.function.function):
                    running.task.cancel()

    def _stop_reconcilable(self) -> None:
        """Stop reconcilable calls after the lease has expired.

        The registry may ask another worker for their outcome.
        """
        for (call_id, epoch), running in self._running.items():
            if running.function.definition.effect_class == call_pb2.EFFECT_CLASS_RECONCILABLE:
                self._stop(call_id, before=epoch + 1)


def _drain(workers: Collection[Worker]) -> None:
    for worker in list(workers):
        worker.drain()


def _settle(saved: Future[None], *, is_kept: bool) -> None:
    if not saved.set_running_or_notify_cancel():
        return  # The function is no longer waiting for the answer.
    if is_kept:
        saved.set_result(None)
    else:
        saved.set_exception(Superseded("the call was cancelled or moved to another worker"))
