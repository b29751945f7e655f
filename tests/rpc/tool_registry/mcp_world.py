from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from pawl.chassis.ids import StoreId
from pawl.chassis.process.clock import Clock, SystemClock
from pawl.event.v1 import call_pb2
from pawl.server.egress.client import GuardedEgress
from pawl.tool.v1 import execution_pb2, source_pb2
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.sources.mcp.connections import Connections
from pawl.tool_registry.sources.mcp.connector import McpConnector
from pawl.tool_registry.sources.mcp.permission import Programs
from pawl.tool_registry.sources.process.helpers import Helpers
from pawl.tool_registry.sources.sources import Connector
from pawl.tool_registry.sources.store import PostgresSourceRepository
from tests.fakes.mcp_program import stdio_config
from tests.poll import put, until
from tests.rpc.tool_registry.registry import Registry, content, running

SAFE = call_pb2.TOOL_CATEGORY_SAFE
# The limit of the service for starting a server and listing its tools; a busy machine imports slowly.
PATIENCE_SECONDS = 75.0


class FakeServer:
    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.describe([a_tool(name) for name in names])

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> None:
        put(self.folder / "tools.json", json.dumps(tools))

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    async def logged(self, line: str, times: int = 1) -> None:
        await until(lambda: self.log().count(line) >= times)

    @property
    def starts(self) -> int:
        return sum(line.startswith("started") for line in self.log())

    @property
    def process_id(self) -> int:
        return [int(line.split()[1]) for line in self.log() if line.startswith("started")][-1]

    def config(
        self, name: str = "fake", *, policies: Sequence[source_pb2.SourceToolPolicy] | None = None, **more: Any
    ) -> source_pb2.SourceConfig:
        """Return the server's source configuration. By default, its tools need no approval."""
        stdio = stdio_config(self.folder, **more)
        given = [policy("*", category=SAFE)] if policies is None else policies
        return source_pb2.SourceConfig(name=name, mcp_stdio=stdio, policies=given)


def a_tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "inputSchema": {"type": "object"}} | more


def policy(tool_name: str, **fields: Any) -> source_pb2.SourceToolPolicy:
    return source_pb2.SourceToolPolicy(tool_name=tool_name, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpRegistry:
    registry: Registry
    connector: McpConnector

    @property
    def connections(self) -> Connections:
        assert self.connector.made is not None
        return self.connector.made.connections

    @property
    def open_count(self) -> int:
        return sum(session.is_open for _, session in self.connections.all())

    async def add(self, config: source_pb2.SourceConfig, *, who: str = "operator", **more: Any) -> source_pb2.Source:
        request = source_pb2.AddSourceRequest(config=config, **more)
        return (await self.registry.sources["acme", who].AddSource(request, timeout=PATIENCE_SECONDS)).source

    async def check(self, name: str = "fake") -> source_pb2.CheckSourceResponse:
        request = source_pb2.CheckSourceRequest(name=name)
        return await self.registry.sources["acme", "operator"].CheckSource(request, timeout=PATIENCE_SECONDS)

    async def approve(self, name: str, found_hash: str, *, who: str = "operator") -> source_pb2.Source:
        request = source_pb2.ApproveSourceRequest(name=name, definitions_hash=found_hash)
        return (await self.registry.sources["acme", who].ApproveSource(request)).source

    async def remove(self, name: str = "fake", *, who: str = "operator", store: str = "acme") -> None:
        await self.registry.sources[store, who].RemoveSource(source_pb2.RemoveSourceRequest(name=name))

    async def listed(self, store: str = "acme") -> list[source_pb2.Source]:
        response = await self.registry.sources[store, "operator"].ListSources(source_pb2.ListSourcesRequest())
        return list(response.sources)

    async def run(self, tool: str, arguments: Any = None, **more: Any) -> execution_pb2.ExecutionResult:
        return await self.registry.run(tool, arguments, **({"timeout_seconds": PATIENCE_SECONDS} | more))


READ_ONLY = policy("*", category=SAFE, effect_class=call_pb2.EFFECT_CLASS_READ_ONLY)
UNKNOWN = "UNKNOWN OUTCOME_UNKNOWN"


def answer(question: execution_pb2.ExecutionResult, text: str | None) -> execution_pb2.Answer:
    """Return a person's answer to a question. None declines it."""
    return execution_pb2.Answer(question=question.question.question, answer=text or "", declined=text is None)


def failure(result: execution_pb2.ExecutionResult) -> str:
    assert result.result.is_error
    text: str = content(result)["error"]
    return text


@asynccontextmanager
async def mcp_registry(
    database_url: str, folder: Path, *, secrets: Mapping[str, Mapping[str, str]] | None = None, **options: Any
) -> AsyncIterator[McpRegistry]:
    """Run a registry with MCP sources. It reaches HTTP servers through `egress`, if that option is given."""
    made: list[McpConnector] = []
    idle_seconds = options.pop("idle_seconds", 300.0)
    egress: GuardedEgress | None = options.pop("egress", None)
    clock: Clock = options.pop("clock", SystemClock())
    programs: Programs = options.pop("programs", Programs(rules=None))

    helpers = Helpers()

    def client(store_id: str) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=egress.transport(StoreId(store_id)) if egress else None, trust_env=False)

    def connectors(store: PostgresSourceRepository, known: FileSecrets) -> Mapping[str, Connector]:
        made.append(
            McpConnector(
                find=store.get,
                secrets=known,
                clock=clock,
                http=client,
                programs=programs,
                helper=helpers,
                idle_seconds=idle_seconds,
            )
        )
        return {"mcp": made[0]}

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(helpers)
        registry = await stack.enter_async_context(
            running(database_url, folder, connectors=connectors, secrets=secrets, **options)
        )
        yield McpRegistry(registry=registry, connector=await stack.enter_async_context(made[0]))
