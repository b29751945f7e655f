"""One connection with an MCP server: opened, kept, listened to, and closed, by a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import httpx2
import mcp
import mcp.types
import pydantic
from mcp.client.session import ClientRequestContext
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

from pawl.chassis import logs
from pawl.chassis.clock import Clock
from pawl.chassis.egress_rules import EgressRefused
from pawl.chassis.ids import UserId
from pawl.chassis.tasks import shield, within
from pawl.errors import SourceUnreachable
from pawl.tool_registry.adapters.mcp.attempts import Garbled, Lost, Refused, TooLarge
from pawl.tool_registry.adapters.mcp.call import Call, Called, Flight, open_pages
from pawl.tool_registry.adapters.mcp.definitions import ServerTool
from pawl.tool_registry.adapters.mcp.elicitation import Asked
from pawl.tool_registry.adapters.mcp.listing import listed
from pawl.tool_registry.adapters.mcp.program import ProgramProblem
from pawl.tool_registry.adapters.mcp.transports import Streams, Wire
from pawl.tool_registry.domain.source import LeftOut
from pawl.tool_registry.sdk.values import hide

CONNECT_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 15.0
_OBITUARY_SECONDS: Final = 3.0
_RELIST_SECONDS: Final = 1.0
_RELISTEN_SECONDS: Final = 5.0
_ROUNDS_MAX: Final = 10
# With two, there is always one that is another call.
_LEFT_MAX: Final = 2
_MESSAGE_CHARACTERS_MAX: Final = 500
_CLIENT: Final = mcp.types.Implementation(name="pawl", version="1")
# What the package says in the server's place. The code alone is one that servers use too.
_SESSION_GONE: Final = "Session terminated"
_BROKEN: Final = ("Connection closed", "SSE stream ")
_UNREADABLE: Final = ("Failed to parse ", "Unexpected content type: ", "server answered a request with 202 ")

Connect = Callable[[Wire], AbstractAsyncContextManager[Streams]]

_Result: TypeAlias = Called | mcp.types.InputRequiredResult
_results: Final[pydantic.TypeAdapter[_Result]] = pydantic.TypeAdapter(_Result)

T = TypeVar("T")

_log = logs.get_logger(__name__)


class Session:
    """A connection that opens at once, and stays until it breaks, is closed, or was not used for `idle_seconds`.

    `owner` is the one user whose calls it carries. None: all users share the session of a stateless server. When the
    server asks a question, it becomes that user's.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        name: str,
        owner: UserId | None,
        secrets: Collection[str],
        clock: Clock,
        idle_seconds: float,
    ) -> None:
        self._connect = connect
        self._name = name
        self._secrets = secrets
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._wire = Wire()
        self._client: mcp.Client | None = None
        self._tools: Mapping[str, ServerTool] = {}
        self.left_out: Sequence[LeftOut] = ()
        """The tools that its server lists and that are none."""
        self._listed = asyncio.Event()
        self._is_stale = False
        self._stopped = asyncio.Event()
        self._was_refused = False
        self._flights: list[Flight] = []
        # Calls that were left before the server had answered.
        self._left: set[str] = set()
        self._is_retired = False
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.owner = owner
        self.has_asked = False
        """True if its server has ever asked a user something."""
        self.began_at = self.used_at = clock.monotonic()
        self.ended_at = math.inf
        """The time at which nothing of it was left any more, by the monotonic clock."""
        # It outlives the call that needed it first, whose context is not its own.
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"mcp {self._name}", context=contextvars.Context()
        )

    @property
    def is_open(self) -> bool:
        """True if it opens, or calls can be made."""
        return not self._task.done() and not self._stopped.is_set() and not self._wire.problem

    @property
    def is_busy(self) -> bool:
        """True if a call has a place on it."""
        return bool(self._flights)

    @property
    def problem(self) -> str:
        """The reason why it broke, or did not open; empty if it did not break."""
        return self._wire.problem

    def may_carry(self, user_id: UserId, call_id: str, *, alone: bool) -> bool:
        """Return whether a call may use it, `alone` where the server asks questions that do not say whose they are.

        Then the server must not be at any other call: one that was left in the middle
        may continue there, and ask.
        """
        if not self.is_open or self._is_retired:
            return False
        if not alone:
            return self.owner in (None, user_id)
        return self.owner == user_id and not self._flights and self._left <= {call_id}

    def take_place(self, user_id: UserId, call_id: str) -> Flight:
        """Return a place for a call, which keeps the connection open until it is given back with `leave`.

        `call_id` is the same every time that a call is made.
        """
        self.used_at = self._clock.monotonic()
        flight = Flight(user_id, call_id)
        self._flights.append(flight)
        return flight

    def leave(self, flight: Flight) -> None:
        """Give a place back; what its call has asked is asked no more."""
        self._flights.remove(flight)
        flight.end()
        self.used_at = self._clock.monotonic()
        self._wire.news.set()

    async def opened(self) -> None:
        """Return when calls can be made. Safe to cancel: it goes on opening.

        Raises:
            SourceUnreachable: that did not work; the message says why.
        """
        await shield(self._opened)

    def stop(self) -> None:
        """Have it end; calls under way are lost. Idempotent."""
        self._stopped.set()
        self._wire.news.set()

    async def close(self) -> None:
        """End it, and return when nothing of it is left. Idempotent."""
        self.stop()
        if self._task is asyncio.current_task():
            return
        if not (await asyncio.wait({self._task}, timeout=0.1 if not self._opened.done() else 1.0))[0]:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)

    async def tools(self, *, anew: bool = False) -> Mapping[str, ServerTool]:
        """Return the tools by the server's names, as it describes them since it last said that they changed.

        Raises:
            SourceUnreachable: the connection ended.
        """
        if anew:
            self._changed()
        while not self._listed.is_set() and self.is_open:
            await self._listed.wait()
        if not self.is_open:
            raise SourceUnreachable(self.problem or "the connection was closed")
        return self._tools

    async def call(
        self,
        flight: Flight,
        call: Call,
        name: str,
        arguments: dict[str, Any],
        *,
        as_task: mcp.types.TaskMetadata | None = None,
    ) -> Called:
        """Call a tool, perhaps as a task. Cancelling it tells the server so, and ends what it asks.

        There is no limit of time here, so that none runs out while a question is open.

        Raises:
            Lost: the connection ended, or has become another user's before the call was sent.
            Refused, TooLarge, Garbled: the answer is an error of the protocol, too large, or no result.
        """
        params = mcp.types.CallToolRequestParams(name=name, arguments=arguments, task=as_task)
        result = await self.sending(flight, call, lambda client: self._call(client, flight, call, params))
        if as_task and isinstance(result.task, mcp.types.Task):
            return result
        if result.task is not None and not result.content and result.structured_content is None:
            raise Garbled
        # It is done, whatever is said of a task.
        result.task = None
        return result

    async def sending(self, flight: Flight, call: Call, send: Callable[[mcp.Client], Awaitable[T]]) -> T:
        """Send what may have an effect, and in which the server may ask something. Raises as `call` does."""
        # What goes on here is asked for here.
        is_new = not flight.is_sent
        if is_new and self.has_asked and (self.owner != flight.user_id or self._sent() or self._is_retired):
            raise Lost("its server asks each user on a connection of their own", never_ran=True)
        if self.is_open and self._client is not None:
            flight.send(call.on_question)
            call.mark_begun()
        try:
            return await self.answer(send)
        except asyncio.CancelledError:
            if len(self._left) < _LEFT_MAX:
                self._left.add(flight.call_id)
            raise

    async def answer(self, send: Callable[[mcp.Client], Awaitable[T]]) -> T:
        """Return what the server answers, or say why it does not. Raises as `call` does."""
        if self._client is None or not self.is_open:
            raise Lost(self.problem or "the connection was closed", never_ran=True)
        self._wire.was_used = True
        try:
            return await send(self._client)
        except mcp.MCPError as error:
            if error.message == _SESSION_GONE and self._wire.is_forgotten:
                self._wire.end("it does not know the session any more")
                raise Lost(self.problem, never_ran=True) from None
            if error.code == mcp.types.CONNECTION_CLOSED and error.message.startswith(_BROKEN):
                # Counted now: those that are told first have left by then.
                is_alone = len(self._sent()) == 1
                await self._ended()
                if self._wire.is_too_large and is_alone:
                    raise TooLarge(self.problem) from None
                raise Lost(
                    self.problem,
                    never_ran=self._was_refused and is_alone,
                    is_too_large=self._wire.is_too_large,
                ) from None
            if error.message.startswith(_UNREADABLE):
                raise Garbled from None
            raise Refused(error.message, code=error.code) from None
        except pydantic.ValidationError:
            raise Garbled from None

    async def _ended(self) -> None:
        """Wait until it is known why the connection broke."""
        self._wire.news.set()
        await asyncio.wait({self._task}, timeout=_OBITUARY_SECONDS)
        self._wire.end("the connection broke")

    async def _call(
        self, client: mcp.Client, flight: Flight, call: Call, params: mcp.types.CallToolRequestParams
    ) -> Called:
        """Send the call, and again with answers as long as the server asks for something first.

        The package's own method checks results against the server's schema, with
        patterns that could take for ever.
        """
        for _ in range(_ROUNDS_MAX):
            request = mcp.types.CallToolRequest(params=params)
            try:
                result = await client.session.send_request(request, _results, progress_callback=call.on_progress)
            except mcp.MCPError as error:
                # It has done nothing yet, and begun no task: pages have to be opened first.
                await open_pages(error, partial(self._ask_of, flight))
                if not self.is_open:
                    raise Lost(self.problem or "the connection was closed", never_ran=True) from None
                continue
            if isinstance(result, Called):
                return result
            answers: dict[str, Any] = {}
            for key, asked in (result.input_requests or {}).items():
                if not isinstance(asked, mcp.types.ElicitRequest):
                    raise Refused("it asks for what is not offered: sampling or roots")
                answers[key] = await self._ask_of(flight, asked.params)
            params = params.model_copy(update={"input_responses": answers, "request_state": result.request_state})
            if not answers:
                await self._clock.sleep(0.1)
        raise Refused(f"it asked for more than {_ROUNDS_MAX} times before it answered")

    async def _run(self) -> None:
        """Own the connection: what is entered is left in the same task."""
        problem = ""
        try:
            await self._stay()
        except asyncio.CancelledError:
            problem = "" if self._stopped.is_set() else "the connection broke"
        except BaseException as error:  # noqa: BLE001  # whatever it is, callers get a sentence
            problem = self._sentence(error)
            self._was_refused = isinstance(_first(error), httpx2.ConnectError | EgressRefused)
        if problem:
            self._wire.end(problem)
        if self.problem and self._opened.done():
            _log.warning("mcp.lost", source=self._name, problem=self.problem)
        if not self._opened.done():
            self._opened.set_exception(SourceUnreachable(self.problem or "the connection was closed"))
            self._opened.exception()  # Seen, also when nobody waits any more.
        self.ended_at = self._clock.monotonic()
        self._client = None
        self._listed.set()

    async def _stay(self) -> None:
        client = mcp.Client(
            self._connect(self._wire),
            message_handler=self._on_message,
            elicitation_callback=self._on_elicit,
            client_info=_CLIENT,
            cache=None,
        )
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await stack.enter_async_context(client)
                    await self._list(client)
            except TimeoutError:
                raise SourceUnreachable(f"it did not answer within {CONNECT_SECONDS:g} s") from None
            listening = asyncio.create_task(self._listen(client), name=f"mcp.listen {self._name}")
            try:
                self._client = client
                self.used_at = self._clock.monotonic()
                self._opened.set_result(None)
                await self._serve(client)
            finally:
                self._stopped.set()
                self._listed.set()
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def _serve(self, client: mcp.Client) -> None:
        """Stay until it breaks, is closed or idle; read the tools anew when they have changed."""
        while not self._stopped.is_set() and not self._wire.problem:
            left = self.used_at + self._idle_seconds - self._clock.monotonic()
            if not self._flights and (left <= 0 or self._is_retired):
                return
            self._wire.news.clear()
            if self._is_stale:
                await self._list(client)
                # One that changes all the time is not asked all the time.
                await within(_RELIST_SECONDS, self._stopped.wait())
            else:
                await within(max(left, 0.05), self._wire.news.wait())

    async def _list(self, client: mcp.Client) -> None:
        self._is_stale = False
        self._tools, self.left_out = await listed(client, self._secrets)
        if not self._is_stale:
            self._listed.set()

    def _changed(self) -> None:
        self._is_stale = True
        self._listed.clear()
        self._wire.news.set()

    async def _on_message(self, message: object) -> None:
        if isinstance(message, mcp.types.ToolListChangedNotification):
            self._changed()

    async def _listen(self, client: mcp.Client) -> None:
        """Hear of changes from servers that tell only those who ask."""
        capabilities = client.server_capabilities
        if capabilities.tools is None or not capabilities.tools.list_changed:
            return
        while True:
            try:
                async with client.listen(tools_list_changed=True) as events:
                    async for _ in events:
                        self._changed()
            except ListenNotSupportedError:
                return
            except (SubscriptionLost, TimeoutError, mcp.MCPError):
                _log.info("mcp.not_listening", source=self._name)
            await self._clock.sleep(_RELISTEN_SECONDS)
            self._changed()

    async def _on_elicit(self, context: ClientRequestContext, params: Asked) -> mcp.types.ElicitResult:
        """Pass a question on to the call that it belongs to.

        The protocol does not say which one that is. It is certain if there is one
        call, and none that was left before its server had answered. Else nobody sees
        it, and no further call comes here: whoever calls again has a connection alone.
        """
        sent = self._sent()
        if len(sent) == 1 and self._left <= {sent[0].call_id}:
            return await self._ask_of(sent[0], params)
        self.has_asked = True
        self._is_retired = self._is_retired or bool(sent)
        for flight in sent:
            flight.is_in_doubt = True
        return mcp.types.ElicitResult(action="decline")

    async def _ask_of(self, flight: Flight, params: Asked) -> mcp.types.ElicitResult:
        """Ask the user of a call, whose the connection is from now on: what the answer opens is for nobody else."""
        self.has_asked = True
        if self.owner is None:
            self.owner = flight.user_id
        # Who shared it with others before may not do so any longer.
        self._is_retired = self._is_retired or self.owner != flight.user_id
        return await flight.ask(params)

    def _sent(self) -> list[Flight]:
        """Return the calls that the server has been sent and has not answered."""
        return [flight for flight in self._flights if flight.is_sent]

    def _sentence(self, error: BaseException) -> str:
        """Return what an error means, for people, without secrets."""
        match _first(error):
            case SourceUnreachable() as unreachable:
                text = unreachable.message
            case ProgramProblem() as problem:
                text = str(problem)
            case mcp.MCPError() as answer:
                text = self.problem or self._wire.refusal or f"it answers {answer.message!r}"
            case EgressRefused() as refused:
                text = f"it may not be reached: {refused}"
            case httpx2.HTTPError() as failure:
                text = self._wire.refusal or f"it cannot be reached: {str(failure) or type(failure).__name__}"
            case pydantic.ValidationError():
                text = "it answers with what is not MCP"
            case OSError() as failed:
                text = f"it cannot be reached: {failed.strerror or type(failed).__name__}"
            case other:
                _log.error("mcp.session_failed", source=self._name, error=type(other).__name__)
                text = f"it does not answer as it should ({type(other).__name__})"
        return hide(self._secrets, text)[:_MESSAGE_CHARACTERS_MAX]


def _first(error: BaseException) -> BaseException:
    """Return the error itself, or the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
