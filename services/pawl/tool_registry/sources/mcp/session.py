"""One connection to an MCP server. The connection's own task opens it, keeps it open, and closes it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias, TypeVar

import httpx2
import mcp
import mcp.types
import pydantic
from mcp.client.session import ClientRequestContext

from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.tasks import shield, within
from pawl.chassis.rpc.trace_context import TRACEPARENT_KEY
from pawl.errors import SourceUnreachable
from pawl.server.egress.policy import EgressRefused
from pawl.tool_registry.sources.mcp.attempts import Fault, Garbled, Lost, Refused, TooLarge
from pawl.tool_registry.sources.mcp.call import Call
from pawl.tool_registry.sources.mcp.definitions import Described, listed
from pawl.tool_registry.sources.mcp.program import ProgramProblem
from pawl.tool_registry.sources.mcp.transports import Streams, Wire
from pawl.tool_registry.sources.rules import LeftOut
from pawl.tools.sdk.values import hide

_CONNECT_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 15.0
_END_REASON_SECONDS: Final = 3.0
_LISTED_SECONDS: Final = 30.0
_ROUNDS_MAX: Final = 10
_MESSAGE_CHARACTERS_MAX: Final = 500
_CLIENT: Final = mcp.types.Implementation(name="pawl", version="1")
# Error texts of the `mcp` package. Servers use the same error codes for other things.
_SESSION_NOT_FOUND: Final = "Session terminated"
_BROKEN: Final = ("Connection closed", "SSE stream ")
_UNREADABLE: Final = ("Failed to parse ", "Unexpected content type: ", "server answered a request with 202 ")

Connect = Callable[[Wire], AbstractAsyncContextManager[Streams]]


_Result: TypeAlias = mcp.types.CallToolResult | mcp.types.InputRequiredResult
_results: Final[pydantic.TypeAdapter[_Result]] = pydantic.TypeAdapter(_Result)

T = TypeVar("T")

_log = logs.get_logger(__name__)


class Session:
    """A connection that opens immediately, and stays open until it breaks, is stopped, or is idle for `idle_seconds`.

    A connection serves one user, who answers the server's questions. With `is_shared`, it serves all users, and the
    server can ask questions only in its responses to calls, because other questions do not identify their call.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        name: str,
        is_shared: bool,
        secrets: Collection[str],
        clock: Clock,
        idle_seconds: float,
        on_end: Callable[[Session], None],
    ) -> None:
        self._connect = connect
        self._name = name
        self._is_shared = is_shared
        self._secrets = secrets
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._on_end = on_end
        self._wire = Wire()
        self._client: mcp.Client | None = None
        self._tools: Mapping[str, Described] = {}
        self._listed_at = -math.inf
        self._listing = asyncio.Lock()
        # Tools that were listed but cannot be used.
        self.left_out: Sequence[LeftOut] = ()
        self._is_stopped = False
        self._was_refused = False
        self._users = 0
        # Calls without a response, newest last.
        self._sent: list[Call] = []
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started_at = self.used_at = clock.monotonic()
        # The task has a separate context, because it outlives the call that opened the connection.
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"mcp {self._name}", context=contextvars.Context()
        )

    @property
    def is_open(self) -> bool:
        """True while the connection is being opened, and as long as calls can be made."""
        return not self._task.done() and not self._is_stopped and not self._wire.problem

    @property
    def is_busy(self) -> bool:
        return self._users > 0

    @property
    def problem(self) -> str:
        """The reason why the connection broke or could not be opened. Empty if neither has happened."""
        return self._wire.problem

    @contextlib.contextmanager
    def used(self) -> Generator[None, None, None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.used_at = self._clock.monotonic()
            self._wire.news.set()

    async def opened(self) -> None:
        """Wait until calls can be made. If this is cancelled, the connection continues to open.

        Raises:
            SourceUnreachable: The connection cannot be opened. The message contains the reason.
        """
        await shield(self._opened)

    def stop(self) -> None:
        """Ask the connection to end. Running calls are lost. Idempotent."""
        self._is_stopped = True
        self._wire.news.set()

    async def close(self) -> None:
        """End the connection and wait up to 15 s for its resources to be released. Idempotent."""
        self.stop()
        if not (await asyncio.wait({self._task}, timeout=1.0 if self._opened.done() else 0.1))[0]:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)

    async def tools(self, *, refresh: bool = False) -> Mapping[str, Described]:
        """Return the server's tools by name. They are cached for 30 s or until the server announces a change.

        Raises:
            SourceUnreachable: The server does not list its tools.
        """
        async with self._listing:
            now = self._clock.monotonic()
            if refresh or now - self._listed_at > _LISTED_SECONDS:
                self._listed_at = now
                try:
                    self._tools, self.left_out = await self._answer(lambda client: listed(client, self._secrets))
                except Fault as fault:
                    self._listed_at = -math.inf
                    raise SourceUnreachable(f"it does not list its tools: {fault}") from None
            return self._tools

    async def call(self, call: Call, name: str, arguments: dict[str, Any]) -> mcp.types.CallToolResult:
        """Call a tool. The server can ask the user during the call.

        Cancelling this also cancels the call on the server. There is no timeout here, because the time during which the
        user is being asked does not count.

        Raises:
            Lost: The connection ended.
            Refused, TooLarge, Garbled: The response is a protocol error, too large, or not a valid result.
        """
        trace = {TRACEPARENT_KEY: call.context.traceparent} if call.context.traceparent else None
        params = mcp.types.CallToolRequestParams(name=name, arguments=arguments, _meta=trace)
        if self.is_open and self._client is not None:
            call.context.mark_started()
        self._sent.append(call)
        try:
            return await self._answer(lambda client: self._call(client, call, params))
        finally:
            self._sent.remove(call)
            call.stop_asking()

    async def _answer(self, request: Callable[[mcp.Client], Awaitable[T]]) -> T:
        if self._client is None or not self.is_open:
            raise Lost(self.problem or "the connection was closed", never_ran=True)
        self._wire.was_used = self._wire.was_used or bool(self._sent)
        try:
            return await request(self._client)
        except mcp.MCPError as error:
            if error.message == _SESSION_NOT_FOUND and self._wire.is_forgotten:
                self._wire.end("it no longer knows the session")
                raise Lost(self.problem, never_ran=True) from None
            if error.code == mcp.types.CONNECTION_CLOSED and error.message.startswith(_BROKEN):
                # Count the calls first, because other calls end while this one is waiting for the reason.
                is_alone = len(self._sent) == 1
                self._wire.news.set()
                await asyncio.wait({self._task}, timeout=_END_REASON_SECONDS)
                self._wire.end("the connection broke")
                if self._wire.is_too_large and is_alone:
                    raise TooLarge(self.problem) from None
                raise Lost(self.problem, never_ran=self._was_refused and is_alone) from None
            if error.message.startswith(_UNREADABLE):
                raise Garbled("it sent an invalid result") from None
            raise Refused(error.message, code=error.code) from None
        except pydantic.ValidationError:
            raise Garbled("it sent an invalid result") from None

    async def _call(
        self, client: mcp.Client, call: Call, params: mcp.types.CallToolRequestParams
    ) -> mcp.types.CallToolResult:
        """Send the call. While the server responds with questions, send it again with the answers.

        The package's own method validates results against the server's schema, whose patterns could take
        exponential time.
        """
        for _ in range(_ROUNDS_MAX):
            request = mcp.types.CallToolRequest(params=params)
            try:
                result = await client.session.send_request(request, _results, progress_callback=call.on_progress)
            except mcp.MCPError as error:
                # The server has not run the call, because it wants the user to open pages first.
                await _open_pages(error, call)
                if not self.is_open:
                    raise Lost(self.problem or "the connection was closed", never_ran=True) from None
                continue
            if isinstance(result, mcp.types.CallToolResult):
                return result
            answers: dict[str, Any] = {}
            for key, asked in (result.input_requests or {}).items():
                if not isinstance(asked, mcp.types.ElicitRequest):
                    raise Refused("it requests sampling or roots, which are not supported")
                answers[key] = await call.ask(asked.params)
            params = params.model_copy(update={"input_responses": answers, "request_state": result.request_state})
            if not answers:
                await self._clock.sleep(0.1)
        raise Refused(f"it asked more than {_ROUNDS_MAX} times without returning a result")

    async def _run(self) -> None:
        """Own the connection. Its contexts must be exited in the same task that entered them."""
        problem = ""
        try:
            await self._keep_open()
        except asyncio.CancelledError:
            problem = "" if self._is_stopped else "the connection broke"
        except BaseException as error:  # noqa: BLE001  # any error is described to callers
            problem = self._describe(error)
            self._was_refused = isinstance(_first(error), httpx2.ConnectError | EgressRefused)
        if problem:
            self._wire.end(problem)
        if not self._opened.done():
            self._opened.set_exception(SourceUnreachable(self.problem or "the connection was closed"))
            self._opened.exception()  # Mark the exception as retrieved, in case no caller is waiting.
        elif self.problem:
            _log.warning("mcp.lost", source=self._name, problem=self.problem)
        self._client = None
        self._on_end(self)

    async def _keep_open(self) -> None:
        client = mcp.Client(
            self._connect(self._wire),
            message_handler=self._on_message,
            elicitation_callback=self._on_elicit,
            client_info=_CLIENT,
            cache=None,
        )
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await stack.enter_async_context(client)
                    self._listed_at = self._clock.monotonic()
                    self._tools, self.left_out = await listed(client, self._secrets)
            except TimeoutError:
                late = f"it did not answer within {_CONNECT_SECONDS:g} s"
                raise SourceUnreachable(": ".join(filter(None, [late, self._wire.noise]))) from None
            self._client = client
            self.used_at = self._clock.monotonic()
            self._opened.set_result(None)
            try:
                while not self._is_stopped and not self._wire.problem:
                    left = self.used_at + self._idle_seconds - self._clock.monotonic()
                    if not self.is_busy and left <= 0:
                        return
                    self._wire.news.clear()
                    await within(max(left, 0.05), self._wire.news.wait())
            finally:
                self._is_stopped = True

    async def _on_message(self, message: object) -> None:
        if isinstance(message, mcp.types.ToolListChangedNotification):
            self._listed_at = -math.inf

    async def _on_elicit(
        self, context: ClientRequestContext, params: mcp.types.ElicitRequestParams
    ) -> mcp.types.ElicitResult:
        """Ask the user of the most recent call, because the protocol does not state to which call a question belongs.

        A question is declined if it could appear in the wrong conversation, which other users may be able to read.
        """
        if self._is_shared or len({call.context.conversation_id for call in self._sent}) != 1:
            return mcp.types.ElicitResult(action="decline")
        return await self._sent[-1].ask(params)

    def _describe(self, error: BaseException) -> str:
        """Return a human-readable description of an error, with secrets removed."""
        match _first(error):
            case SourceUnreachable() as unreachable:
                text = unreachable.message
            case ProgramProblem() as problem:
                text = str(problem)
            case mcp.MCPError() as answer:
                is_readable = not answer.message.startswith(_UNREADABLE)
                description = f"it answers {answer.message!r}" if is_readable else "its response is not valid MCP"
                text = self.problem or self._wire.refusal or description
            case EgressRefused() as refused:
                text = str(refused)
            case httpx2.HTTPError() as failure:
                text = self._wire.refusal or f"it cannot be reached: {str(failure) or type(failure).__name__}"
            case pydantic.ValidationError():
                text = "its response is not valid MCP"
            case OSError() as failed:
                text = f"it cannot be reached: {failed.strerror or type(failed).__name__}"
            case other:
                _log.error("mcp.session_failed", source=self._name, error=type(other).__name__)
                text = f"it responds incorrectly ({type(other).__name__})"
        return hide(self._secrets, text)[:_MESSAGE_CHARACTERS_MAX]


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _open_pages(error: mcp.MCPError, call: Call) -> None:
    """Ask the user to open the pages listed in an error.

    If the user does not open all of them, raise the error again.
    """
    if error.code != mcp.types.URL_ELICITATION_REQUIRED:
        raise error
    try:
        pages = mcp.UrlElicitationRequiredError.from_error(error.error).elicitations
    except (ValueError, TypeError, AttributeError):
        raise error from None
    if not pages:
        raise error
    for page in pages:
        if (await call.ask(page)).action != "accept":
            raise error
