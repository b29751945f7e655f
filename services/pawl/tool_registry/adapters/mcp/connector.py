"""The Connector port over MCP servers: what their tools are, and calls of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from pawl.chassis.clock import Clock
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import InvalidField, PermissionDenied, SourceUnreachable
from pawl.tool_registry.adapters.mcp.attempts import Attempts, Fault, InDoubt
from pawl.tool_registry.adapters.mcp.config import read_config, secrets_of
from pawl.tool_registry.adapters.mcp.connections import Connections, HttpClients, late, load
from pawl.tool_registry.adapters.mcp.definitions import Binding, ServerTool, discovered
from pawl.tool_registry.adapters.mcp.permission import Programs
from pawl.tool_registry.app.catalog.ports import Helper
from pawl.tool_registry.app.execution.ports import Secrets
from pawl.tool_registry.domain.definition import ToolVersion
from pawl.tool_registry.domain.source import Discovery, Source
from pawl.tool_registry.sdk.context import OutcomeUnknown, ToolContext, ToolError
from pawl.tool_registry.sdk.reconciling import ReconcileResult, cannot_say, did_not_happen, happened
from pawl.tool_registry.sdk.tool import Tool, forwarded
from pawl.values import EffectClass

if TYPE_CHECKING:
    from pawl.tool_registry.adapters.mcp.call import Call, Flight
    from pawl.tool_registry.adapters.mcp.session import Session

IDLE_SECONDS: Final = 300.0
_DISCOVERY: Final = "discovery"

FindSource = Callable[[StoreId, str], Awaitable[Source | None]]
"""Store and name to the source, as it is now."""


class McpConnector:
    """Connects sources of the kind `mcp` and runs their tools; an async context manager.

    A tool runs only while its server describes it as it did when it was approved. If
    the server dies in the middle of a call, READ_ONLY and IDEMPOTENT ones are made
    once more; the outcome of others is unknown.
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
        self._clock = clock
        self._helper = helper
        self.connections = Connections(
            secrets=secrets, clock=clock, http=http, programs=programs, idle_seconds=idle_seconds
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connections.close()

    async def prepared(self, source: Source) -> Source:
        return source

    async def discover(self, source: Source) -> Discovery:
        place = self.connections.place(source, UserId(""), _DISCOVERY, is_forced=True, is_alone=True)
        async with place as (session, _):
            tools = await session.tools()
            self.connections.recover(source)
            session.stop()  # No user owns it.
        return Discovery(tools=discovered(source.name, list(tools.values())), left_out=session.left_out)

    async def forget(self, store_id: StoreId, name: str) -> None:
        await self.connections.forget(store_id, name)

    def tool(self, entry: ToolVersion) -> Tool[..., Any] | None:
        async def forward(arguments: dict[str, Any], context: ToolContext) -> Any:
            return await self._run(entry, arguments, context)

        async def reconcile(context: ToolContext) -> ReconcileResult:
            return await self._reconcile(entry, context)

        asked = reconcile if entry.definition.effect is EffectClass.RECONCILABLE else None
        return forwarded(entry.definition, forward, reconcile=asked, marks_begun=True, is_remote=True)

    async def misfit(self, store_id: StoreId, schema_json: bytes, answer: str) -> str:
        """Return what is wrong with an answer to a question of a server, as `elicitation.Reader` does."""
        await load()
        problem: str = await late("elicitation").Reader(self._helper, store_id).misfit(schema_json, answer)
        return problem

    async def _reconcile(self, entry: ToolVersion, context: ToolContext) -> ReconcileResult:
        """Ask for the task that an earlier execution has begun. One that has failed says so to who asks again."""
        if not Attempts(entry.definition, context.last_checkpoint).task_id:
            return cannot_say()
        try:
            return happened(await self._run(entry, {}, context))
        except ToolError:
            return did_not_happen()

    async def _run(self, entry: ToolVersion, arguments: dict[str, Any], context: ToolContext) -> Any:
        attempts = Attempts(entry.definition, context.last_checkpoint)
        try:
            source, secrets = await self._usable(entry, context)
        except ToolError as error:
            raise attempts.unasked(error) from None
        await load()
        while True:
            call = late("call").Call(entry, context, secrets, self._helper)
            try:
                result = await self._attempt(call, source, arguments, attempts)
                if call.is_in_doubt and attempts.may_repeat:
                    raise InDoubt
            except Fault as fault:
                attempts.again(fault)
            except (SourceUnreachable, InvalidField, PermissionDenied) as error:
                raise ToolError(f"the source {source.name!r} cannot be used: {error.message}") from None
            else:
                # Looking through a large one takes a while.
                return await asyncio.to_thread(call.outcome, result)

    async def _usable(self, entry: ToolVersion, context: ToolContext) -> tuple[Source, Collection[str]]:
        """Return a tool's source and its secrets, which from now on are taken out of whatever comes back.

        Raises:
            ToolError: the source was removed, or a secret of it.
        """
        name = entry.source.partition(":")[2]
        source = await self._find(StoreId(context.store_id), name)
        if source is None:
            raise ToolError(f"the source {name!r} was removed")
        return source, [context.secret(secret) for secret in secrets_of(read_config(source.config)).values()]

    async def _attempt(self, call: Call, source: Source, arguments: dict[str, Any], attempts: Attempts) -> Any:
        """Make a call whose server describes the tool as it was approved, and return the server's result.

        One that a task does already is asked for.
        """
        place = partial(self._place, source.name, call.context)
        task = late("task")
        if attempts.task_id:
            return await task.ended(place, attempts.task_id, call, self._clock)
        binding = msgspec.json.decode(call.entry.binding, type=Binding)
        async with place(source, is_alone=attempts.is_alone) as (session, flight):
            tool = await _approved(source, binding, session)
            left = call.context.deadline.timestamp() - self._clock.now()
            as_task = task.metadata(left) if tool.demands_task else None
            result = await session.call(flight, call, binding.tool, arguments, as_task=as_task)
            if result.task is not None:
                return await task.ended(place, result.task.task_id, call, self._clock, held=(session, flight))
            call.is_in_doubt = flight.is_in_doubt
            return result

    @asynccontextmanager
    async def _place(
        self, name: str, context: ToolContext, found: Source | None = None, *, is_alone: bool = False
    ) -> AsyncGenerator[tuple[Session, Flight], None]:
        """Hold a place for a call on a source as it was `found`, or is now: what goes on for long opens no old one.

        Raises:
            OutcomeUnknown: the source was removed.
            InvalidField, PermissionDenied, SourceUnreachable: as of `Connections.place`.
        """
        source = found or await self._find(StoreId(context.store_id), name)
        if source is None:
            raise OutcomeUnknown
        call_id = f"{context.run_id} {context.call_id}"
        async with self.connections.place(source, UserId(context.user_id), call_id, is_alone=is_alone) as place:
            yield place


async def _approved(source: Source, binding: Binding, session: Session) -> ServerTool:
    """Return a tool that its server describes as it was approved; a ToolError if it does not."""
    # A connection may be older than the approval.
    for anew in (False, True):
        found = (await session.tools(anew=anew)).get(binding.tool)
        if found is not None and found.digest == binding.digest:
            return found
    what = "does not have this tool any more" if found is None else "describes this tool differently now"
    raise ToolError(
        f"NOT_ALLOWED: the source {source.name!r} {what}."
        f" An admin must look at the change first: `pawl sources check {source.name}`,"
        f" then `pawl sources approve {source.name}`"
    )
