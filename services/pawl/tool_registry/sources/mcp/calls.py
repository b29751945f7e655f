"""Calls to MCP tools. A call runs only if the server's description of the tool is still the approved one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.process.clock import Clock
from pawl.errors import InvalidField, PermissionDenied, SourceUnreachable
from pawl.tool_registry.catalog.ports import Helper
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.sources.mcp.attempts import Fault, check_retry
from pawl.tool_registry.sources.mcp.call import Call
from pawl.tool_registry.sources.mcp.config import read_config, secrets_of
from pawl.tool_registry.sources.mcp.connections import Connections, HttpClients
from pawl.tool_registry.sources.mcp.definitions import Binding, digest_of, discovered
from pawl.tool_registry.sources.mcp.elicitation import Reader
from pawl.tool_registry.sources.mcp.permission import Programs
from pawl.tool_registry.sources.mcp.session import Session
from pawl.tool_registry.sources.rules import Discovery
from pawl.tool_registry.sources.source import Source
from pawl.tools.rules.definition import ToolVersion
from pawl.tools.sdk.context import ToolContext, ToolError

# Returns a store's current source by name.
FindSource = Callable[[StoreId, str], Awaitable[Source | None]]


class Calls:
    """Makes calls over connections that stay open.

    A call during which the server dies is retried if it is READ_ONLY or IDEMPOTENT, or if it never ran. Otherwise, its
    outcome is unknown.
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
        self._helper = helper
        self.connections = Connections(
            secrets=secrets, clock=clock, http=http, programs=programs, idle_seconds=idle_seconds
        )

    async def discover(self, source: Source) -> Discovery:
        """Return the current tools of a source, using a separate connection.

        Raises the same errors as `Connections.session`.
        """
        async with self.connections.fresh(source) as session:
            return Discovery(tools=discovered(source.name, await session.tools()), left_out=session.left_out)

    def reader(self, store_id: StoreId) -> Reader:
        return Reader(self._helper, store_id)

    async def run(self, entry: ToolVersion, arguments: dict[str, Any], context: ToolContext) -> Any:
        """Call a tool and return its result for the model.

        Raises:
            ToolError, ResultTooLarge, OutcomeUnknown: The call did not produce a result.
        """
        name = entry.source.partition(":")[2]
        source = await self._find(StoreId(context.store_id), name)
        if source is None:
            raise ToolError(f"the source {name!r} was removed")
        # Reading them makes the context hide them in results.
        secrets = [context.secret(secret) for secret in secrets_of(read_config(source.config)).values()]
        binding = msgspec.json.decode(entry.binding, type=Binding)
        attempts = 0
        while True:
            attempts += 1
            call = Call(entry, context, secrets, self.reader(StoreId(context.store_id)))
            try:
                async with self.connections.session(source, UserId(context.user_id)) as session:
                    await _check_approved(source, binding, session)
                    result = await session.call(call, binding.tool, arguments)
            except Fault as fault:
                check_retry(entry.definition, fault, attempts)
            except (SourceUnreachable, InvalidField, PermissionDenied) as error:
                raise ToolError(f"the source {name!r} is not usable: {error.message}") from None
            else:
                # Parsing a large result blocks for a while.
                return await asyncio.to_thread(call.outcome, result)


async def _check_approved(source: Source, binding: Binding, session: Session) -> None:
    # A cached list may be older than the approval.
    for refresh in (False, True):
        found = (await session.tools(refresh=refresh)).get(binding.tool)
        if found is not None and digest_of(found) == binding.digest:
            return
    what = "no longer has this tool" if found is None else "has changed its description of this tool"
    raise ToolError(
        f"NOT_ALLOWED: the source {source.name!r} {what}."
        f" An admin must review the change first: `pawl sources check {source.name}`,"
        f" then `pawl sources approve {source.name}`"
    )
