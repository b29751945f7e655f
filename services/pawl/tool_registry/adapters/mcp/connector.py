"""The Connector port over MCP servers: connections opened when they are needed, and kept for the next calls."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Self

import httpx2
import msgspec

from pawl.chassis import tasks
from pawl.chassis.clock import Clock
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import InvalidField, PermissionDenied, SourceUnreachable
from pawl.tool.v1.source_pb2 import McpHttpConfig, McpStdioConfig
from pawl.tool_registry.adapters.mcp.config import McpServer, read_config, secrets_of
from pawl.tool_registry.adapters.mcp.definitions import Binding, ServerTool, discovered
from pawl.tool_registry.adapters.mcp.permission import Programs
from pawl.tool_registry.adapters.mcp.pool import Pool, crowd
from pawl.tool_registry.adapters.mcp.program import Program
from pawl.tool_registry.app.catalog.ports import Helper
from pawl.tool_registry.app.execution.outcome import doubt
from pawl.tool_registry.app.execution.ports import Secrets
from pawl.tool_registry.domain.definition import EffectClass, ToolVersion
from pawl.tool_registry.domain.source import DiscoveredTool, Source
from pawl.tool_registry.sdk.context import OutcomeUnknown, ResultTooLarge, ToolContext, ToolError
from pawl.tool_registry.sdk.tool import Tool, forwarded

if TYPE_CHECKING:
    from pawl.tool_registry.adapters.mcp.call import Call, Flight
    from pawl.tool_registry.adapters.mcp.session import Session
    from pawl.tool_registry.adapters.mcp.transports import Streams, Wire

IDLE_SECONDS: Final = 300.0
# The connection may break once, and once turn out to be another user's.
_TRIES_MAX: Final = 3
_DISCOVERY: Final = "discovery"
_REPEATABLE: Final = frozenset({EffectClass.READ_ONLY, EffectClass.IDEMPOTENT})

FindSource = Callable[[StoreId, str], Awaitable[Source | None]]
"""Store and name to the source, as it is now."""
HttpClients = Callable[[StoreId], httpx2.AsyncClient]
"""Store to a fresh client that reaches what the store's tools may reach."""


class McpConnector:
    """Connects sources of the kind `mcp` and runs their tools; an async context manager.

    A connection is closed when it is idle for `idle_seconds`, when its source
    changes, and at the end; `Pool` says which calls share one. One that opens goes
    on opening when the call that needed it has run out of time. A tool runs only
    while its server describes it as it did when it was approved. After a crash the
    server is started again, at once the first time, then with growing pauses. If it
    dies in the middle of a call, READ_ONLY and IDEMPOTENT ones are made once more;
    the outcome of others is unknown.
    """

    def __init__(
        self,
        *,
        find: FindSource,
        secrets: Secrets,
        clock: Clock,
        http: HttpClients,
        programs: Programs,
        helper: Helper,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._find = find
        self._secrets = secrets
        self._clock = clock
        self._http = http
        self._programs = programs
        self._helper = helper
        self._idle_seconds = idle_seconds
        self._pools: dict[tuple[StoreId, str], Pool] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pools, self._pools = self._pools, {}
        self._close([session for pool in pools.values() for session in pool.sessions])
        await asyncio.gather(*self._closing)

    async def prepared(self, source: Source) -> Source:
        return source

    async def discover(self, source: Source) -> Sequence[DiscoveredTool]:
        async with self._place(source, UserId(""), _DISCOVERY, is_forced=True) as (session, _):
            tools = await session.tools(anew=True)
        return discovered(source.name, list(tools.values()))

    async def forget(self, store_id: StoreId, name: str) -> None:
        pool = self._pools.pop((store_id, name), None)
        if pool is not None:
            await asyncio.gather(*(session.close() for session in pool.sessions))

    def tool(self, entry: ToolVersion) -> Tool[..., Any] | None:
        async def forward(arguments: dict[str, Any], context: ToolContext) -> Any:
            return await self._run(entry, arguments, context)

        return forwarded(entry.definition, forward, marks_begun=True, is_remote=True)

    async def misfit(self, store_id: StoreId, schema_json: bytes, answer: str) -> str:
        """Return what is wrong with an answer to a question of a server, as `elicitation.Reader` does."""
        await _load()
        problem: str = await _late("elicitation").Reader(self._helper, store_id).misfit(schema_json, answer)
        return problem

    async def _run(self, entry: ToolVersion, arguments: dict[str, Any], context: ToolContext) -> Any:
        name = entry.source.partition(":")[2]
        source = await self._find(StoreId(context.store_id), name)
        if source is None:
            raise ToolError(f"the source {name!r} was removed")
        # From now on they are taken out of whatever comes back.
        values = [context.secret(secret) for secret in secrets_of(read_config(source.config)).values()]
        binding = msgspec.json.decode(entry.binding, type=Binding)
        await _load()
        problem = ""
        for _ in range(_TRIES_MAX):
            sessions, call = _late("session"), _late("call").Call(entry, context, values, self._helper)
            try:
                result = await self._send(source, binding, arguments, context, call)
            except sessions.TooLarge as large:
                text = f"{entry.definition.name} cannot be read: {large}{doubt(entry.definition)}"
                raise ResultTooLarge(text) from None
            except sessions.Lost as lost:
                problem = f"went away: {lost.problem}"
                if not lost.never_ran and entry.definition.effect not in _REPEATABLE:
                    raise OutcomeUnknown from None
            except sessions.Refused as refused:
                raise ToolError(f"{entry.definition.name} was refused by its server: {refused}") from None
            except sessions.Garbled:
                if entry.definition.effect not in _REPEATABLE:
                    raise OutcomeUnknown from None
                raise ToolError(f"the server of {entry.definition.name} answered with what is no result") from None
            else:
                if not call.is_in_doubt or entry.definition.effect not in _REPEATABLE:
                    # Looking through a large one takes a while.
                    return await asyncio.to_thread(call.outcome, result)
                problem = "asked something, and did not say in which call"
        raise ToolError(f"the server of {entry.definition.name} {problem}")

    async def _send(
        self, source: Source, binding: Binding, arguments: dict[str, Any], context: ToolContext, call: Call
    ) -> Any:
        """Make a call whose server describes the tool as it was approved, and return the server's result."""
        try:
            place = self._place(source, UserId(context.user_id), f"{context.run_id} {context.call_id}")
            async with place as (session, flight):
                found = (await session.tools()).get(binding.tool)
                _check_approved(source, binding, found)
                result = await session.call(flight, call, binding.tool, arguments)
                call.is_in_doubt = flight.is_in_doubt
                return result
        except (SourceUnreachable, InvalidField, PermissionDenied) as error:
            raise ToolError(f"the source {source.name!r} cannot be used: {error.message}") from None

    @asynccontextmanager
    async def _place(
        self, source: Source, user_id: UserId, call_id: str, *, is_forced: bool = False
    ) -> AsyncGenerator[tuple[Session, Flight], None]:
        """Hold a place on an open connection of a source; a new one goes on opening when nobody waits for it any more.

        Raises:
            InvalidField: the configuration cannot be used.
            SourceUnreachable: it does not answer, or was asked in vain too lately; `is_forced` asks all the same.
        """
        server = read_config(source.config)
        if isinstance(server, McpStdioConfig):
            self._programs.check(source.store_id, server)
        values = self._secret_values(source, server)
        await _load()
        session = self._session(source, server, values, user_id, call_id, is_forced=is_forced)
        flight = session.take_place(user_id, call_id)
        try:
            await session.opened()
            yield session, flight
        finally:
            session.leave(flight)

    def _session(
        self,
        source: Source,
        server: McpServer,
        values: Mapping[str, str],
        user_id: UserId,
        call_id: str,
        *,
        is_forced: bool,
    ) -> Session:
        """Return a connection that may carry a call, or begin a new one."""
        pool = self._pools.setdefault((source.store_id, source.name), Pool())
        self._close(pool.renew((source.config, tuple(sorted(values.items())))))
        now = self._clock.monotonic()
        session = pool.find(user_id, call_id, now)
        if session is not None:
            return session
        wait = pool.not_before - now
        if wait > 0 and not is_forced:
            raise SourceUnreachable(f"{pool.problem}; it is tried again in {wait:.0f} s")
        self._close(pool.spent(user_id))
        owner = user_id if pool.is_asking else None
        self._make_room(source.store_id, owner)
        begun: Session = _late("session").Session(
            self._transport(source, server, values),
            name=f"{source.store_id}/{source.name}",
            owner=owner,
            secrets=frozenset(values.values()),
            clock=self._clock,
            idle_seconds=self._idle_seconds,
        )
        pool.sessions.append(begun)
        return begun

    def _make_room(self, store_id: StoreId, owner: UserId | None) -> None:
        crowded = crowd(self._sessions(), store_id, owner)
        if crowded is None:
            return
        sessions, limit = crowded
        idle = [session for session in sessions if not session.is_busy]
        if not idle:
            raise SourceUnreachable(limit)
        self._close([min(idle, key=lambda session: session.used_at)])

    def _sessions(self) -> Iterator[tuple[StoreId, Session]]:
        """Give all connections, each behind its store."""
        return ((store_id, one) for (store_id, _), pool in self._pools.items() for one in pool.sessions)

    def _close(self, sessions: Sequence[Session]) -> None:
        """End connections without waiting for it: who calls next has nothing to do with them."""
        for session in sessions:
            session.stop()
            tasks.start(self._closing, session.close(), name="mcp.close")

    def _secret_values(self, source: Source, server: McpServer) -> dict[str, str]:
        """Return the secrets that a server needs, by the names that it knows them by."""
        values: dict[str, str] = {}
        for name, secret in secrets_of(server).items():
            value = self._secrets.own(source.store_id, secret)
            if value is None:
                raise SourceUnreachable(f"no secret named {secret!r} is configured")
            values[name] = value
        return values

    def _transport(
        self, source: Source, server: McpServer, values: Mapping[str, str]
    ) -> Callable[[Wire], AbstractAsyncContextManager[Streams]]:
        transports = _late("transports")
        if isinstance(server, McpHttpConfig):
            client = self._http(source.store_id)
            headers = {**server.headers, **values}
            return lambda wire: transports.http_transport(client, server.url, headers, wire, self._clock)
        order = self._programs.order(server, values)
        program = Program(order, name=f"{source.store_id}/{source.name}", secrets=frozenset(values.values()))
        return lambda wire: transports.stdio_transport(program, wire, self._clock)


def _check_approved(source: Source, binding: Binding, found: ServerTool | None) -> None:
    """Refuse, with a ToolError, a tool that its server does not describe as it was approved."""
    if found is not None and found.digest == binding.digest:
        return
    what = "does not have this tool any more" if found is None else "describes this tool differently now"
    raise ToolError(
        f"NOT_ALLOWED: the source {source.name!r} {what}."
        f" An admin must look at the change first: `pawl sources check {source.name}`,"
        f" then `pawl sources approve {source.name}`"
    )


async def _load() -> None:
    """Import the package `mcp`, which takes most of a second the first time."""
    await asyncio.to_thread(_late, "call")


def _late(module: str) -> Any:
    """Return a module that imports the package `mcp`; after `_load` that takes no time."""
    return importlib.import_module(f"pawl.tool_registry.adapters.mcp.{module}")
