"""The Connector port over MCP servers: one connection for each source, opened when it is needed."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import httpx2
import msgspec

from services.chassis.clock import Clock
from services.errors import InvalidField, SourceUnreachable
from services.tool_registry.adapters.mcp.config import HttpServer, StdioServer, read_config
from services.tool_registry.adapters.mcp.definitions import Binding, ServerTool, discovered
from services.tool_registry.adapters.mcp.program import Program, ProgramOrder
from services.tool_registry.app.ports import Secrets
from services.tool_registry.domain.definition import Effect, ToolVersion
from services.tool_registry.domain.source import DiscoveredTool, Source
from services.tool_registry.sdk import OutcomeUnknown, Tool, ToolContext, ToolError
from services.tool_registry.sdk.tool import forwarded

if TYPE_CHECKING:
    from services.tool_registry.adapters.mcp.call import Call
    from services.tool_registry.adapters.mcp.pace import Streams, Wire
    from services.tool_registry.adapters.mcp.session import Session

IDLE_SECONDS: Final = 300.0
SESSIONS_MAX: Final = 200
_BACKOFF_SECONDS_MAX: Final = 60.0
_STABLE_SECONDS: Final = 60.0
_REPEATABLE: Final = frozenset({Effect.READ_ONLY, Effect.IDEMPOTENT})

FindSource = Callable[[str, str], Awaitable[Source | None]]
"""Store and name to the source, as it is now."""
HttpClients = Callable[[str], httpx2.AsyncClient]
"""Store to a fresh client that reaches what the store's tools may reach."""


@dataclass(slots=True)
class _Slot:
    """What is known of the connection of one source."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: Session | None = None
    made_of: tuple[Any, ...] = ()
    failures: int = 0
    not_before: float = 0.0
    problem: str = ""


class McpConnector:
    """Connects sources of the kind `mcp` and runs their tools; an async context manager.

    A connection is closed when it is idle for `idle_seconds`, when its source
    changes, and at the end. A tool runs only while its server describes it as it
    did when it was approved. After a crash the server is started again, at once
    the first time, then with growing pauses. If it dies in the middle of a call,
    READ_ONLY and IDEMPOTENT ones are made once more; the outcome of others is
    unknown.
    """

    def __init__(
        self,
        *,
        find: FindSource,
        secrets: Secrets,
        clock: Clock,
        http: HttpClients,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._find = find
        self._secrets = secrets
        self._clock = clock
        self._http = http
        self._idle_seconds = idle_seconds
        self._slots: dict[tuple[str, str], _Slot] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        slots, self._slots = self._slots, {}
        sessions = [slot.session for slot in slots.values() if slot.session is not None]
        await asyncio.gather(*(session.close() for session in sessions))

    async def discover(self, source: Source) -> Sequence[DiscoveredTool]:
        _, tools = await self._described(source, is_forced=True)
        return discovered(source.name, list(tools.values()))

    async def forget(self, store_id: str, name: str) -> None:
        slot = self._slots.pop((store_id, name), None)
        if slot is not None and slot.session is not None:
            await slot.session.close()

    def tool(self, entry: ToolVersion) -> Tool[..., Any] | None:
        async def forward(arguments: dict[str, Any], context: ToolContext) -> Any:
            return await self._run(entry, arguments, context)

        return forwarded(entry.definition, forward)

    @property
    def open_count(self) -> int:
        """How many connections are open."""
        return sum(slot.session is not None and slot.session.is_open for slot in self._slots.values())

    async def _run(self, entry: ToolVersion, arguments: dict[str, Any], context: ToolContext) -> Any:
        name = entry.source.partition(":")[2]
        source = await self._find(context.store_id, name)
        if source is None:
            raise ToolError(f"the source {name!r} was removed")
        # From now on they are taken out of whatever comes back.
        values = [context.secret(secret) for secret in read_config(source.config).secrets.values()]
        binding = msgspec.json.decode(entry.binding, type=Binding)
        call_id, problem = f"{context.run_id} {context.call_id}", ""
        for _ in range(2):
            session = await self._approved_session(source, binding, call_id)
            sessions, calls = _late("session"), _late("call")
            call: Call = calls.Call(entry, context, values)
            try:
                result = await session.call(
                    binding.tool,
                    arguments,
                    call_id=call_id,
                    on_progress=call.on_progress,
                    on_question=call.on_question,
                )
            except sessions.Lost as lost:
                problem = lost.problem
                if not lost.never_ran and entry.definition.effect not in _REPEATABLE:
                    raise OutcomeUnknown from None
            except sessions.Refused as refused:
                raise ToolError(f"{entry.definition.name} was refused by its server: {refused}") from None
            except sessions.Garbled:
                if entry.definition.effect not in _REPEATABLE:
                    raise OutcomeUnknown from None
                raise ToolError(f"the server of {entry.definition.name} answered with what is no result") from None
            else:
                return call.outcome(result)
        raise ToolError(f"the server of {entry.definition.name} went away: {problem}")

    async def _approved_session(self, source: Source, binding: Binding, call_id: str) -> Session:
        """Return a connection for a call, whose server describes the tool as it was approved."""
        try:
            session, tools = await self._described(source, call_id=call_id)
            found = tools.get(binding.tool)
        except (SourceUnreachable, InvalidField) as error:
            raise ToolError(f"the source {source.name!r} cannot be used: {error.message}") from None
        if found is not None and found.digest == binding.digest:
            return session
        what = "does not have this tool any more" if found is None else "describes this tool differently now"
        raise ToolError(
            f"NOT_ALLOWED: the source {source.name!r} {what}."
            f" An admin must look at the change first: `pawl sources check {source.name}`,"
            f" then `pawl sources approve {source.name}`"
        )

    async def _described(
        self, source: Source, *, call_id: str = "", is_forced: bool = False
    ) -> tuple[Session, Mapping[str, ServerTool]]:
        """Return a connection, good for a call, and what its server has; `is_forced` asks it anew.

        Raises:
            InvalidField, SourceUnreachable: as `_session`.
        """
        session = await self._session(source, call_id, is_forced=is_forced)
        try:
            return session, await session.tools(anew=is_forced)
        except SourceUnreachable:
            if session.problem:
                raise
            # It was closed for being idle in this very moment.
            session = await self._session(source, call_id, is_forced=is_forced)
            return session, await session.tools(anew=is_forced)

    async def _session(self, source: Source, call_id: str, *, is_forced: bool) -> Session:
        """Return the open connection of a source, or a new one.

        Raises:
            InvalidField: the configuration cannot be used.
            SourceUnreachable: it does not answer, or was asked in vain too lately; `is_forced` asks all the same.
        """
        server = read_config(source.config)
        values = self._secret_values(source, server)
        made_of = (source.config, tuple(sorted(values.items())))
        slot = self._slots.setdefault((source.store_id, source.name), _Slot())
        async with slot.lock:
            session = slot.session
            if session is not None:
                if session.is_open and slot.made_of == made_of and not session.is_spent(call_id):
                    session.touch()
                    return session
                if session.problem:
                    self._failed(slot, session.problem, lived=self._clock.monotonic() - session.opened_at)
                slot.session = None
                await session.close()
            if slot.made_of != made_of:
                slot.failures, slot.not_before = 0, 0.0
            wait = slot.not_before - self._clock.monotonic()
            if wait > 0 and not is_forced:
                raise SourceUnreachable(f"{slot.problem}; it is tried again in {wait:.0f} s")
            await self._make_room()
            slot.made_of = made_of
            sessions = await asyncio.to_thread(_late, "session")
            opened: Session = sessions.Session(
                self._transport(source, server, values),
                name=f"{source.store_id}/{source.name}",
                secrets=frozenset(values.values()),
                clock=self._clock,
                idle_seconds=self._idle_seconds,
            )
            try:
                await opened.open()
            except SourceUnreachable as error:
                self._failed(slot, error.message, lived=0.0)
                raise
            if self._slots.get((source.store_id, source.name)) is not slot:
                await opened.close()
                raise SourceUnreachable("it was changed or removed meanwhile")
            slot.session = opened
            return opened

    def _failed(self, slot: _Slot, problem: str, *, lived: float) -> None:
        slot.problem = problem
        slot.failures = 1 if lived > _STABLE_SECONDS else slot.failures + 1
        pause = 0.0 if slot.failures == 1 else min(2.0 ** (slot.failures - 2), _BACKOFF_SECONDS_MAX)
        slot.not_before = self._clock.monotonic() + pause

    async def _make_room(self) -> None:
        if self.open_count < SESSIONS_MAX:
            return
        idle = [slot.session for slot in self._slots.values() if slot.session is not None and not slot.session.is_busy]
        if not idle:
            raise SourceUnreachable(f"{SESSIONS_MAX} sources are in use here, which is the limit")
        await min(idle, key=lambda session: session.used_at).close()

    def _secret_values(self, source: Source, server: StdioServer | HttpServer) -> dict[str, str]:
        """Return the secrets that a server needs, by the names that it knows them by."""
        values: dict[str, str] = {}
        for name, secret in server.secrets.items():
            value = self._secrets.own(source.store_id, secret)
            if value is None:
                raise SourceUnreachable(f"no secret named {secret!r} is configured")
            values[name] = value
        return values

    def _transport(
        self, source: Source, server: StdioServer | HttpServer, values: Mapping[str, str]
    ) -> Callable[[Wire], AbstractAsyncContextManager[Streams]]:
        from services.tool_registry.adapters.mcp.http import http_transport  # noqa: PLC0415
        from services.tool_registry.adapters.mcp.pace import Pacer  # noqa: PLC0415
        from services.tool_registry.adapters.mcp.stdio import stdio_transport  # noqa: PLC0415

        if isinstance(server, HttpServer):
            client = self._http(source.store_id)
            return lambda _: http_transport(client, server.url, {**server.headers, **values}, Pacer(self._clock))
        order = ProgramOrder(
            command=server.command,
            environment={**server.environment, **values},
            readable=server.readable,
            writable=server.writable,
            memory_bytes_max=server.memory_bytes_max,
            processes_max=server.processes_max,
        )
        program = Program(order, name=f"{source.store_id}/{source.name}", secrets=frozenset(values.values()))
        return lambda wire: stdio_transport(program, wire, Pacer(self._clock))


def _late(module: str) -> Any:
    """Return a module that imports the package `mcp`, which takes most of a second the first time."""
    return importlib.import_module(f"services.tool_registry.adapters.mcp.{module}")
