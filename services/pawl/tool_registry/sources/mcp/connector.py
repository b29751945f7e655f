"""Connects MCP servers. The `mcp` package is imported when the first server is used."""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Self

from pawl.chassis.ids import StoreId
from pawl.chassis.process.clock import Clock
from pawl.tool_registry.catalog.ports import Helper
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.sources.mcp.permission import Programs
from pawl.tool_registry.sources.rules import Discovery
from pawl.tool_registry.sources.source import Source
from pawl.tools.rules.definition import ToolVersion
from pawl.tools.sdk.context import ToolContext
from pawl.tools.sdk.tool import Tool, forwarded

if TYPE_CHECKING:
    from pawl.tool_registry.sources.mcp.calls import Calls, FindSource
    from pawl.tool_registry.sources.mcp.connections import HttpClients

IDLE_SECONDS: Final = 300.0


class McpConnector:
    """Connects sources of kind `mcp` and runs their tools. An async context manager."""

    def __init__(
        self,
        *,
        find: FindSource,
        secrets: FileSecrets,
        clock: Clock,
        http: HttpClients,
        programs: Programs,
        helper: Helper,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._options = {
            "find": find,
            "secrets": secrets,
            "clock": clock,
            "http": http,
            "programs": programs,
            "helper": helper,
            "idle_seconds": idle_seconds,
        }
        # None until the first use.
        self.made: Calls | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.made is not None:
            await self.made.connections.close()

    async def calls(self) -> Calls:
        """Return the connector's `Calls`, creating it on first use.

        The import takes up to a second, so it runs in a thread.
        """
        if self.made is not None:
            return self.made
        return self._first(await asyncio.to_thread(importlib.import_module, f"{__package__}.calls"))

    def _first(self, module: ModuleType) -> Calls:
        if self.made is None:
            self.made = module.Calls(**self._options)
        return self.made

    async def prepared(self, source: Source) -> Source:
        return source

    async def discover(self, source: Source) -> Discovery:
        return await (await self.calls()).discover(source)

    async def forget(self, store_id: StoreId, name: str) -> None:
        if self.made is not None:
            await self.made.connections.forget(store_id, name)

    def tool(self, entry: ToolVersion) -> Tool[..., Any] | None:
        async def forward(arguments: dict[str, Any], context: ToolContext) -> Any:
            return await (await self.calls()).run(entry, arguments, context)

        return forwarded(entry.definition, forward, marks_start=True, is_remote=True)

    async def answer_problem(self, store_id: StoreId, schema_json: bytes, answer: str) -> str:
        """Return why an answer does not match its question's schema, or "" if it matches (see `elicitation.Reader`)."""
        return await (await self.calls()).reader(store_id).answer_problem(schema_json, answer)
