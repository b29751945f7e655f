"""Calls of MCP tools: each runs only while its server describes the tool as it was approved."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import mcp.types
import msgspec

from pawl.chassis.clock import Clock
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import DependencyUnavailable, InvalidField, PermissionDenied, SourceUnreachable
from pawl.tool_registry.adapters.mcp import task
from pawl.tool_registry.adapters.mcp.attempts import Attempts, Fault
from pawl.tool_registry.adapters.mcp.call import Call
from pawl.tool_registry.adapters.mcp.config import read_config, secrets_of
from pawl.tool_registry.adapters.mcp.connections import Connections, HttpClients
from pawl.tool_registry.adapters.mcp.definitions import Binding, ServerTool, discovered
from pawl.tool_registry.adapters.mcp.elicitation import Reader
from pawl.tool_registry.adapters.mcp.permission import Programs
from pawl.tool_registry.adapters.mcp.session import Session
from pawl.tool_registry.adapters.secret_file import FileSecrets
from pawl.tool_registry.app.catalog.ports import Helper
from pawl.tool_registry.domain.definition import ToolVersion
from pawl.tool_registry.domain.source import Discovery, Source
from pawl.tool_registry.sdk.context import ToolContext, ToolError

FindSource = Callable[[StoreId, str], Awaitable[Source | None]]
"""Store and name to the source, as it is now."""


class Calls:
    """Makes calls over connections that it keeps.

    If the server dies in the middle of a call, READ_ONLY and IDEMPOTENT calls are made again, and tasks are asked for
    again; the outcome of others is unknown.
    """

    def __init__(
        self,
        *,
        find: FindSource,
        secrets: FileSecrets,
        clock: Clock,
        http: HttpClients,
        programs: Programs,
        helper: Helper,
        idle_seconds: float,
    ) -> None:
        self._find = find
        self._clock = clock
        self._helper = helper
        self.connections = Connections(
            secrets=secrets, clock=clock, http=http, programs=programs, idle_seconds=idle_seconds
        )

    async def discover(self, source: Source) -> Discovery:
        """Return what a source describes now, on a connection of its own. Raises as `Connections.session`."""
        async with self.connections.fresh(source) as session:
            tools = await session.tools()
            return Discovery(tools=discovered(source.name, list(tools.values())), left_out=session.left_out)

    def reader(self, store_id: StoreId) -> Reader:
        """Return what reads the answers to questions of a store's servers."""
        return Reader(self._helper, store_id)

    async def run(self, entry: ToolVersion, arguments: dict[str, Any], context: ToolContext) -> Any:
        """Call a tool and return its result for the model.

        Raises:
            ToolError, ResultTooLarge, OutcomeUnknown: the call has no result.
        """
        attempts = Attempts(entry.definition, context.last_checkpoint)
        name = entry.source.partition(":")[2]
        while True:
            try:
                source = await self._find(StoreId(context.store_id), name)
                if source is None:
                    raise ToolError(f"the source {name!r} was removed")
                # From now on they are hidden in whatever comes back.
                secrets = [context.secret(secret) for secret in secrets_of(read_config(source.config)).values()]
            except ToolError as error:
                raise attempts.unasked(error) from None
            call = Call(entry, context, secrets, self.reader(StoreId(context.store_id)))
            try:
                result = await self._attempt(call, source, arguments, attempts)
            except Fault as fault:
                attempts.again(fault)
            except (SourceUnreachable, DependencyUnavailable, InvalidField, PermissionDenied) as error:
                if not attempts.task_id or not isinstance(error, SourceUnreachable | DependencyUnavailable):
                    raise attempts.unasked(ToolError(f"the source {name!r} cannot be used: {error.message}")) from None
            else:
                # Reading a large one takes a while.
                return await asyncio.to_thread(call.outcome, result)
            if attempts.task_id:
                await self._clock.sleep(attempts.pause_seconds())

    async def _attempt(
        self, call: Call, source: Source, arguments: dict[str, Any], attempts: Attempts
    ) -> mcp.types.CallToolResult:
        """Make a call, or ask for the task that does it; cancelling it cancels the task."""
        async with self.connections.session(source, UserId(call.context.user_id)) as session:
            if not attempts.task_id:
                binding = msgspec.json.decode(call.entry.binding, type=Binding)
                tool = await _approved(source, binding, session)
                left = call.context.deadline.timestamp() - self._clock.now()
                as_task = task.metadata(left) if tool.demands_task else None
                result = await session.call(call, binding.tool, arguments, as_task=as_task)
                if result.task is None:
                    return result
                await task.started(call, attempts, result.task.task_id)
            try:
                return await task.ended(session, call, attempts, self._clock)
            except asyncio.CancelledError:
                if not call.context.begins_again:
                    await task.cancel(session, call, attempts.task_id)
                raise


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
