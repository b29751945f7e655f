"""Handles all RPCs of a server uniformly, whatever their kind.

It closes several gaps in grpc.aio:

* grpc.aio reads and parses a request before it calls the method, and answers unparsable bytes with UNKNOWN. Here,
  methods receive raw bytes, which are read and parsed after authentication and admission.
* grpc.aio sends the text of an uncaught exception to the client. Here, the client gets INTERNAL with an id, and the
  log has the traceback under this id.
* grpc.aio applies its limit on concurrent RPCs late. Here, calls over the limit are refused immediately, and unary
  calls and streams are counted separately.
* grpc.aio leaves deadlines to the handlers. Here, each handler ends shortly before the client's deadline, while the
  client is still listening.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import grpc

from pawl.chassis.identity import auth
from pawl.chassis.identity.auth import IDENTITY_METADATA, Authenticator, Principal
from pawl.chassis.identity.roles import ANYBODY
from pawl.chassis.ids import IdSource, is_id
from pawl.chassis.process import logs
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.rpc import status, tls
from pawl.chassis.rpc.kinds import Behaviour, Context, Handler, encoder, read_raw
from pawl.chassis.rpc.limits import AnonymousCalls, Arrivals, CallSlots, Limits, read_one
from pawl.chassis.rpc.request_id import REQUEST_ID_KEY, set_request_id
from pawl.chassis.rpc.trace_context import TRACEPARENT_KEY, set_traceparent, valid
from pawl.errors import (
    Cancelled,
    DeadlineExceeded,
    DependencyUnavailable,
    Internal,
    MethodNotFound,
    Overloaded,
    PawlError,
    ShuttingDown,
    Unauthenticated,
    Unavailable,
)
from pawl.server.identity.login_failures import LoginFailures, source_of
from pawl.server.process import log_setup
from pawl.server.process.metrics import RpcMetrics

_UNKNOWN: Final = "unknown"
_KEY_REPLACED: Final = "the key of this service was replaced: retry with the current one"
# Requests of open methods are small and arrive together with the call.
_ANONYMOUS_ARRIVING_MAX: Final = 8
# Time reserved for sending the status after a handler's timeout.
_DEADLINE_MARGIN_SECONDS: Final = 0.02

T = TypeVar("T")
Refuse: TypeAlias = Callable[[Context, PawlError], Awaitable[object]]

_log = logs.get_logger(__name__)
_current_call: ContextVar[_ActiveCall] = ContextVar("pawl_call")


def count_as_stream() -> None:
    """Count this task's unary call as a stream, because it is about to wait.

    Raises:
        Overloaded: The stream limit has been reached.
    """
    call = _current_call.get(None)
    if call is not None:
        call.method.interceptor.count_as_stream(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    # Only services may call.
    service_only: bool = False
    # Any client may call, under a separate limit and without logs: for health checks.
    open: bool = False
    # Only agent-loop may call, on behalf of a user named in the metadata.
    forwarded: bool = False
    # At shutdown, streams get the drain time to end on their own.
    drain_streams: bool = False


class Interceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of a server.

    `access` maps services to their rules, and `callers` maps methods to their callers. With `certified_services`, a
    service key is valid only together with the service's certificate.
    """

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        ids: IdSource,
        metrics: RpcMetrics,
        limits: Limits,
        access: dict[str, Access],
        callers: Mapping[str, frozenset[str]],
        certified_services: bool = False,
    ) -> None:
        self.authenticator = authenticator
        self.certified_services = certified_services
        self.failures = LoginFailures(metrics.login_failures, SystemClock())
        self.callers = callers
        self.ids = ids
        self.metrics = metrics
        self.limits = limits
        self._access = access
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self.arrivals = Arrivals()
        self._unary_calls = CallSlots("calls are running", limits.unary_calls_max, limits)
        self._anonymous = AnonymousCalls(limits.streams_max)
        self.anonymous_arriving = AnonymousCalls(_ANONYMOUS_ARRIVING_MAX)
        self.streams = CallSlots("streams and waits are open", limits.streams_max, limits)
        self.request_streams = CallSlots("streams of requests are open", limits.request_streams_max, limits)
        self.stopping = False
        self._active: set[_ActiveCall] = set()
        self._unknown: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            Method(self, _UNKNOWN, Access(), is_stream=True).wrap(_refuse_unknown)
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        name = handler_call_details.method
        wrapped = self._methods.get(name)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return self._unknown
            wrapped = self._methods[name] = grpc.stream_stream_rpc_method_handler(
                self.wrap(name, handler), None, encoder(handler.response_serializer)
            )
        return wrapped

    def wrap(self, name: str, handler: Handler, refuse: Refuse = status.abort) -> Behaviour:
        """Return a handler's method as a function of raw requests. The function refuses calls by calling `refuse`."""
        access = self._access.get(name.split("/")[1], Access())
        is_stream = handler.request_streaming or handler.response_streaming
        method = Method(self, name, access, is_stream=is_stream, reads_many=handler.request_streaming)
        behaviour = read_raw(handler, method.receive, bytes_max=self.limits.message_bytes_max)
        return method.wrap(behaviour, refuse)

    def carried(self, name: str, *, is_stream: bool) -> Method:
        """Return a method for calls that arrive in batches, on a stream that has already been admitted."""
        return Method(self, name, Access(service_only=True, drain_streams=True), is_stream=is_stream)

    def enter(self, call: _ActiveCall, principal: Principal, *, is_carried: bool = False) -> None:
        """Admit a call or refuse it. Batched calls are admitted while their stream is open, even during shutdown."""
        self._active.add(call)
        if self.stopping and not is_carried:
            raise ShuttingDown
        call.take(self.streams if call.method.is_stream else self._unary_calls, principal)
        if call.method.reads_many and not principal.is_service:
            call.take(self.request_streams, principal)

    def enter_anonymous(self, call: _ActiveCall, connection: str) -> None:
        self._active.add(call)
        self._anonymous.enter(call, connection)

    def count_as_stream(self, call: _ActiveCall) -> None:
        if call.principal is not None and self._unary_calls in call.slots:
            call.take(self.streams, call.principal)
            call.release(self._unary_calls)

    def leave(self, call: _ActiveCall) -> None:
        self._active.discard(call)
        self._anonymous.leave(call)
        for slots in list(call.slots):
            call.release(slots)

    async def end_outdated(self) -> None:
        """End calls whose callers would no longer be admitted, with the error that a new call would get.

        Calls from services get a retryable error, because a service with a revoked key already has a new one.
        """
        found: dict[tuple[tuple[str, str], ...], Principal | PawlError] = {}
        for call in list(self._active):
            if call.caller is None:
                continue
            identity = tuple(call.identity.items())
            if identity not in found:
                found[identity] = await self._authenticate_again(call.identity)
            try:
                if isinstance(again := found[identity], PawlError):
                    raise again
                auth.check_still(call.caller, again)
            except PawlError as error:
                call.end(DependencyUnavailable(_KEY_REPLACED) if call.caller.is_service else error)

    async def _authenticate_again(self, identity: Mapping[str, str]) -> Principal | PawlError:
        # Checking a known credential never waits, so yield once to let other calls proceed.
        await asyncio.sleep(0)
        try:
            return await self.authenticator.authenticate(identity, source="", may_look_up=lambda: False)
        except PawlError as error:
            return error
        except Exception:  # noqa: BLE001  # one failure must not keep other calls alive
            _log.exception("callers.check_failed")
            return DependencyUnavailable("the caller cannot be authenticated now: try again")

    def stop_calls(self, *, drainable: bool) -> None:
        """End running calls with SHUTTING_DOWN. End calls that are allowed to drain only if `drainable` is set."""
        self.stopping = True
        for call in list(self._active):
            access = call.method.access
            if drainable or access.open or (call.method.is_stream and not access.drain_streams):
                call.end(ShuttingDown())


class _ActiveCall:
    def __init__(self, method: Method) -> None:
        self.method = method
        self.started = time.perf_counter()
        self.code = "CANCELLED"
        self.slots: list[CallSlots] = []
        self.principal: Principal | None = None
        self.reason: PawlError | None = None
        self.running = False
        self.is_logged = False
        self.caller: Principal | None = None
        self.identity: dict[str, str] = {}
        self.scope: asyncio.Timeout | None = None

    def take(self, slots: CallSlots, principal: Principal) -> None:
        slots.take(principal)
        self.slots.append(slots)
        self.principal = principal

    def release(self, slots: CallSlots) -> None:
        if self.principal is not None:
            self.slots.remove(slots)
            slots.release(self.principal)

    def end(self, reason: PawlError) -> None:
        self.reason = reason
        # Do not interrupt a call that is sending its status.
        if self.scope is not None and self.running and not self.scope.expired():
            self.scope.reschedule(asyncio.get_running_loop().time())


class Method:
    def __init__(
        self, interceptor: Interceptor, name: str, access: Access, *, is_stream: bool, reads_many: bool = False
    ) -> None:
        self.interceptor = interceptor
        self.name = name
        self.access = access
        self.callers = ANYBODY if name == _UNKNOWN else interceptor.callers.get(name)
        self.is_stream = is_stream
        self.reads_many = reads_many
        self._seconds = interceptor.metrics.seconds.labels(name)
        self._in_flight = interceptor.metrics.in_flight.labels(name)

    def wrap(self, behaviour: Behaviour, refuse: Refuse = status.abort) -> Behaviour:
        async def serve(requests: AsyncIterator[bytes], context: Context) -> None:
            call, refused = _ActiveCall(self), ""
            self._in_flight.inc()
            try:
                response = await self._run(call, behaviour, requests, context)
                if response is not None:
                    await context.write(response)
                call.code = _code_name(context)
            except Exception as raised:  # noqa: BLE001  # the client must get one of our statuses
                error = _leading(raised)
                if isinstance(error, grpc.aio.AbortError):
                    call.code = _code_name(context)
                    raise error from None
                refusal = self._refusal(error, call)
                call.code, refused = refusal.kind.value, refusal.reason
                # gRPC would treat an AbortError not raised by `abort` as a program fault.
                if context.done():
                    raise asyncio.CancelledError from None  # The client has disconnected.
                try:
                    await refuse(context, refusal)
                except grpc.aio.InternalError:
                    raise asyncio.CancelledError from None  # The client disconnected just now.
            finally:
                self._end(call, refused)

        return serve

    async def serve_carried(self, serve: Callable[[], Awaitable[T]], request_id: str, timeout_seconds: float) -> T:
        """Serve one call of a batch. The caller must already be authenticated in the current task.

        A timeout of 0 means no timeout.

        Raises:
            PawlError: The error to send to the client.
        """
        call, refused = _ActiveCall(self), ""
        self._in_flight.inc()
        if is_id(request_id):
            set_request_id(request_id)
            log_setup.bind(request_id=request_id)
        try:
            principal = auth.current_principal()
            auth.check_may_call(principal, self.callers)
            self.interceptor.enter(call, principal, is_carried=True)
            answer = await _in_time(call, timeout_seconds or None, serve)
            call.code = "OK"
            return answer
        except Exception as raised:  # noqa: BLE001  # as in `wrap`
            refusal = self._refusal(_leading(raised), call)
            call.code, refused = refusal.kind.value, refusal.reason
            raise refusal from None
        finally:
            self._end(call, refused)

    async def receive(self, context: Context) -> bytes:
        if not self.access.open:
            return await self.interceptor.arrivals.read(context, _current_call.get().caller or auth.current_principal())
        call, arriving = _current_call.get(), self.interceptor.anonymous_arriving
        arriving.enter(call, context.peer())
        try:
            return await read_one(context)
        finally:
            arriving.leave(call)

    async def _run(
        self, call: _ActiveCall, behaviour: Behaviour, requests: AsyncIterator[bytes], context: Context
    ) -> Any:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        given = metadata.get(REQUEST_ID_KEY, "")
        request_id = given if is_id(given) else self.interceptor.ids.new("req")
        set_request_id(request_id)
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
        if given_context := metadata.get(TRACEPARENT_KEY):
            set_traceparent(traceparent := valid(given_context))
            self.interceptor.metrics.trace_contexts_ignored.inc(not traceparent)
        if self.access.open:
            self.interceptor.enter_anonymous(call, context.peer())
        else:
            principal = await self._login(call, context, metadata)
            auth.set_principal(principal)
            log_setup.bind(request_id=request_id, **_caller(principal))
            auth.check_may_call(principal, self.callers)
            if self.name != _UNKNOWN:
                named = context.invocation_metadata() or ()
                auth.set_principal(auth.acting_user(principal, named, forwarded=self.access.forwarded))
            self.interceptor.enter(call, principal)
            call.caller = principal
        _current_call.set(call)
        return await _in_time(call, context.time_remaining(), lambda: behaviour(requests, context))

    async def _login(self, call: _ActiveCall, context: Context, metadata: dict[str, str]) -> Principal:
        source = source_of(self._client(context, metadata) or context.peer())
        failures = self.interceptor.failures
        call.identity = {name: metadata[name] for name in IDENTITY_METADATA if name in metadata}
        try:
            auth.check_not_repeated(context.invocation_metadata() or ())
            principal = await self.interceptor.authenticator.authenticate(
                metadata,
                source=source,
                may_look_up=lambda: failures.start_lookup(call, source, metadata["authorization"]),
            )
            # The gateway's key has no rights: each call that it relays has its own credential.
            is_gateway = principal.credential_id == auth.GATEWAY.credential_id
            if principal.is_service and self.interceptor.certified_services and not is_gateway:
                tls.check_service(principal.credential_id, context.auth_context())
            return principal
        except Unauthenticated as refusal:
            call.is_logged = True
            failures.note(source, tuple(context.invocation_metadata() or ()), self.name, refusal.__cause__)
            raise
        except (Overloaded, Unavailable):
            call.is_logged = not failures.may_log(source)
            raise
        finally:
            failures.end_lookup(call)

    def _client(self, context: Context, metadata: dict[str, str]) -> str:
        """Return the client address that the gateway reported, or an empty string for a direct call."""
        client = self.interceptor.authenticator.client_of(metadata)
        if client and self.interceptor.certified_services:
            try:
                tls.check_service(auth.GATEWAY.credential_id, context.auth_context())
            except Unauthenticated:
                return ""
        return client

    def _refusal(self, error: Exception, call: _ActiveCall) -> PawlError:
        if isinstance(error, PawlError):
            return error
        if isinstance(error, TimeoutError) and call.scope is not None and call.scope.expired():
            return call.reason or DeadlineExceeded()
        error_id = self.interceptor.ids.new("err")
        _log.error("rpc.failed", method=self.name, error_id=error_id, exc_info=error)
        return Internal(f"internal error {error_id}", error_id=error_id)

    def _end(self, call: _ActiveCall, refused: str) -> None:
        self.interceptor.leave(call)
        self._in_flight.dec()
        seconds = time.perf_counter() - call.started
        self._seconds.observe(seconds)
        self.interceptor.metrics.requests.labels(self.name, call.code).inc()
        if not self.access.open and not call.is_logged:
            fields = {"reason": refused} if refused else {}
            # Routine calls between services are logged at INFO only when they fail.
            routine = self.access.service_only and call.code == grpc.StatusCode.OK.name
            log = _log.debug if routine else _log.info
            log("rpc.served", method=self.name, code=call.code, milliseconds=round(seconds * 1000, 2), **fields)


async def _refuse_unknown(_request: Any, _context: Context) -> NoReturn:
    raise MethodNotFound


async def _in_time(call: _ActiveCall, seconds: float | None, serve: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `serve`, or fail shortly before the client's deadline.

    Raises:
        DeadlineExceeded: `serve` did not end in time, or the client's deadline leaves no time for it.
    """
    if seconds is not None and seconds <= _DEADLINE_MARGIN_SECONDS:
        raise DeadlineExceeded
    async with asyncio.timeout(None if seconds is None else seconds - _DEADLINE_MARGIN_SECONDS) as call.scope:
        call.running = True
        try:
            return await serve()
        finally:
            call.running = False


def _caller(principal: Principal) -> dict[str, str]:
    if principal.is_service:
        return {"caller": principal.credential_id}
    return {"store": principal.store_id, "user": principal.user_id}


def _code_name(context: Context) -> str:
    """Return the name of the code that a handler set or aborted with. grpc.aio stores it as an enum or a number."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODE_NAMES.get(code or 0, "UNKNOWN")


_CODE_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


def _leading(error: Exception) -> Exception:
    """Return the error to report for a failed call or task group.

    An AbortError comes first. If all failures are PawlErrors, report the first one. Otherwise, report `error`. gRPC
    raises an InternalError if a message cannot be sent because the client has just disconnected.
    """
    leaves = _leaves(error) if isinstance(error, ExceptionGroup) else [error]
    for leaf in leaves:
        if isinstance(leaf, grpc.aio.AbortError):
            return leaf
    leaves = [
        Cancelled("the client has disconnected") if isinstance(leaf, grpc.aio.InternalError) else leaf
        for leaf in leaves
    ]
    return leaves[0] if all(isinstance(leaf, PawlError) for leaf in leaves) else error


def _leaves(group: ExceptionGroup[Exception]) -> list[Exception]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, ExceptionGroup) else [error])
    ]
