"""A registry for tests, with gRPC, a real database and tools of the test."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallKey, ConversationId, IdSource, RunKey, StoreId, UserId
from pawl.chassis.process.clock import Clock, SystemClock
from pawl.chassis.rpc.client import open_channel
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import run_pb2
from pawl.server.db.database import Database
from pawl.server.identity.credentials import ApiKey
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.server import RpcServer
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from pawl.tool.v1.completion_pb2_grpc import CompletionServiceStub
from pawl.tool.v1.document_pb2_grpc import DocumentServiceStub
from pawl.tool.v1.execution_pb2_grpc import ExecutionServiceStub
from pawl.tool.v1.file_pb2_grpc import FileServiceStub
from pawl.tool.v1.memory_pb2_grpc import MemoryServiceStub
from pawl.tool.v1.rule_pb2_grpc import RuleServiceStub
from pawl.tool.v1.source_pb2_grpc import SourceServiceStub
from pawl.tool.v1.tool_pb2_grpc import ToolServiceStub
from pawl.tool_registry.builtin.files.folders import FileFolders
from pawl.tool_registry.builtin.files.rules import FileLimits
from pawl.tool_registry.catalog.catalog import Catalog
from pawl.tool_registry.execution.executor import Executor, ExecutorOptions
from pawl.tool_registry.execution.store.journal import PostgresExecutionJournal
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.metrics import RegistryMetrics
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.sources.mcp.connector import McpConnector
from pawl.tool_registry.sources.process.helpers import Helpers
from pawl.tool_registry.sources.process.runner import ProcessRunner
from pawl.tool_registry.sources.python.runner import PythonRunner
from pawl.tool_registry.sources.sources import Connector
from pawl.tool_registry.sources.store import PostgresSourceRepository
from pawl.tool_registry.sources.worker.workers import WorkerOptions
from pawl.tool_registry.wiring import Limits, Ports, ToolRegistry, wire
from pawl.tools import Tool
from tests.keys import authenticator
from tests.rpc.refusals import reason_of
from tests.rpc.stubs import (
    AuditServiceAsyncStub,
    CompletionServiceAsyncStub,
    DocumentServiceAsyncStub,
    ExecutionServiceAsyncStub,
    FileServiceAsyncStub,
    MemoryServiceAsyncStub,
    RuleServiceAsyncStub,
    SourceServiceAsyncStub,
    ToolServiceAsyncStub,
)

RUN, APPROVE, OFFER, ASK, REFUSE = (
    execution_pb2.DISPOSITION_RUN,
    execution_pb2.DISPOSITION_APPROVE,
    execution_pb2.DISPOSITION_OFFER,
    execution_pb2.DISPOSITION_ASK,
    execution_pb2.DISPOSITION_REFUSE,
)
PUBLIC_URL = "https://pawl.example.com"
SERVICE_KEY = "the-key-of-the-services"
_ROLES = {
    "ann": [],
    "bob": [],
    "vic": ["viewer"],
    "root": ["admin"],
    "admin": ["admin"],
    "operator": ["operator"],
    "olga": ["operator"],
    "machine": ["worker"],
    "robot": ["worker"],
    "mel": ["member"],
    "max": ["member"],
    "apu": ["approver"],
    "door": ["gateway"],
}
KEYS = [
    ApiKey(key=f"key-of-{user}-of-{store}", store_id=store, user_id=user, roles=roles)
    for store in ("acme", "other")
    for user, roles in _ROLES.items()
]
# A delegate that may not decide
DELEGATE = ApiKey(
    key="key-of-shop-of-acme", store_id="acme", user_id="shop", roles=["delegate", "member", "approver", "admin"]
)
KEYS.append(DELEGATE)
# The metadata of a delegate that acts for ann with all her roles
FOR_ANN = (("pawl-user", "ann"), ("pawl-roles", "approver,admin"))


ANN = Principal(store_id=StoreId("acme"), user_id=UserId("ann"))


class Ledger(LedgerReads):
    """A ledger with a run and an approved call of ann in acme, and the agents clerk and counter.

    `completed_calls` are the completions that it was notified of, and `stopped` are runs that accept no results. All
    runs have the labels `of_runs`.
    """

    def __init__(self) -> None:
        self.completed_calls: list[tuple[str, str]] = []
        self.stopped: set[str] = set()
        self.of_runs: dict[str, str] = {}
        self.away = False

    async def has_run(self, run: RunKey, user_id: UserId) -> bool:
        return (run.store_id, user_id, run.run_id) == ("acme", "ann", "run")

    async def has_conversation(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> bool:
        return (store_id, conversation_id) == ("acme", "conversation")

    async def gated_tool(self, key: CallKey, user_id: UserId) -> str | None:
        return "pay" if (key.store_id, user_id, key.call_id) == ("acme", "ann", "approved") else None

    async def has_agent(self, store_id: StoreId, name: str) -> bool:
        return name == "default" or (store_id, name) in {("acme", "clerk"), ("acme", "counter")}

    async def takes_results(self, run: RunKey) -> bool:
        self._answer()
        return run.run_id not in self.stopped

    async def labels(self, run: RunKey) -> Mapping[str, str]:
        return self.of_runs

    async def note_completion(self, run: RunKey, key: CallKey) -> None:
        self._answer()
        self.completed_calls.append((run.run_id, key.call_id))

    def _answer(self) -> None:
        if self.away:
            raise DependencyUnavailable


def context(
    store: str = "acme",
    user: str = "ann",
    run: str = "run",
    roles: Sequence[str] = (),
    *,
    agent: str = "default",
    above: Sequence[str] = (),
    **more: Any,
) -> execution_pb2.CallContext:
    """Return the context of a call. `above` are the agents of the ancestor runs."""
    ancestors = [
        run_pb2.RunAbove(run_id=f"above_{number}", conversation_id=f"c_{number}", agent_name=name)
        for number, name in enumerate(above)
    ]
    fields: dict[str, Any] = {
        "store_id": store,
        "user_id": user,
        "conversation_id": "conversation",
        "run_id": run,
        "user_roles": roles,
        "agent_name": agent,
        "above": ancestors,
    }
    return execution_pb2.CallContext(**fields | more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    address: str
    execution: ExecutionServiceAsyncStub
    users: Mapping[tuple[str, str], ToolServiceAsyncStub]
    rules: Mapping[tuple[str, str], RuleServiceAsyncStub]
    sources: Mapping[tuple[str, str], SourceServiceAsyncStub]
    auditors: Mapping[tuple[str, str], AuditServiceAsyncStub]
    documents: Mapping[tuple[str, str], DocumentServiceAsyncStub]
    files: Mapping[tuple[str, str], FileServiceAsyncStub]
    memories: Mapping[tuple[str, str], MemoryServiceAsyncStub]
    completions: Mapping[tuple[str, str], CompletionServiceAsyncStub]
    ledger: Ledger
    executor: Executor
    catalog: Catalog
    metrics: Metrics
    runner: PythonRunner
    instance_id: str
    # Announce the end of the process; the server runs until the registry is closed
    stop: Callable[[], None]
    forget_rule_uses: Callable[[float], Awaitable[None]]

    @property
    def ann(self) -> ToolServiceAsyncStub:
        return self.users["acme", "ann"]

    async def check(
        self, tool: str, arguments: Any = None, *, call: str = "call", version: int = 1, **who: Any
    ) -> execution_pb2.Verdict:
        """Check one call. `arguments` are raw bytes or a value."""
        names = [entry.definition.name for entry in await self.catalog.visible(ANN)]
        one = proposed(call, tool, arguments, tool_version=version)
        (verdict,) = await self.verdicts(one, who=context(**who), known_tool_names=names)
        return verdict

    async def verdicts(
        self, *calls: execution_pb2.ProposedCall, who: Any = None, **more: Any
    ) -> list[execution_pb2.Verdict]:
        request = execution_pb2.CheckCallsRequest(context=who or context(), calls=calls, **more)
        return list((await self.execution.CheckCalls(request)).verdicts)

    def stream(
        self, tool: str, arguments: Any = None, *, call: str = "call", version: int = 1, who: Any = None, **more: Any
    ) -> Any:
        return self.execution.ExecuteTool(
            execution_pb2.ExecuteToolRequest(
                context=who or context(),
                call_id=call,
                tool_name=tool,
                tool_version=version,
                arguments_json=as_json(arguments),
                **more,
            )
        )

    async def run(self, tool: str, arguments: Any = None, **more: Any) -> execution_pb2.ExecutionResult:
        """Run one call to its end. Return its result, which must be the last response and the only result."""
        responses = [response async for response in self.stream(tool, arguments, **more)]
        kinds = [response.WhichOneof("kind") for response in responses]
        assert (kinds.count("result"), kinds[-1]) == (1, "result")
        result: execution_pb2.ExecutionResult = responses[-1].result
        return result

    async def run_out_of_time(
        self, tool: str, arguments: Any = None, *, call: str = "call"
    ) -> tuple[str, execution_pb2.ExecutionResult]:
        """Run a call that starts and times out, and return its id and result.

        On a busy machine, a call may time out before it starts. The next attempt then has a longer timeout.
        """
        for tries in itertools.count():
            name = f"{call}_{tries}"
            result = await self.run(tool, arguments, call=name, timeout_seconds=0.1 * 4**tries)
            assert outcome(result) == "FAILED TOOL_TIMEOUT"
            if "was not started" not in content(result)["error"]:
                return name, result
        raise AssertionError

    async def run_approved(self, tool: str, arguments: Any = None, **more: Any) -> execution_pb2.ExecutionResult:
        """Run a gated call with an approval of exactly this call."""
        digest = (await self.check(tool, arguments, call=more.get("call", "call"))).digest
        return await self.run(tool, arguments, approved_digest=digest, **more)

    async def cancel(self, call: str = "call", *, wait: float = 5, **who: str) -> execution_pb2.CancelExecutionResponse:
        request = execution_pb2.CancelExecutionRequest(context=context(**who), call_id=call, wait_seconds=wait)
        return await self.execution.CancelExecution(request)


def proposed(
    call: str, tool: str, arguments: Any = None, *, tool_version: int = 1, **more: Any
) -> execution_pb2.ProposedCall:
    """Return a call as a model writes it. `arguments` are raw bytes or a value."""
    return execution_pb2.ProposedCall(
        call_id=call, tool_name=tool, tool_version=tool_version, arguments_json=as_json(arguments), **more
    )


def as_json(arguments: Any) -> bytes:
    return arguments if isinstance(arguments, bytes) else json.dumps({} if arguments is None else arguments).encode()


def content(result: execution_pb2.ExecutionResult) -> Any:
    return json.loads(result.result.content_json)


def outcome(result: execution_pb2.ExecutionResult) -> str:
    name = execution_pb2.ExecutionOutcome.Name(result.outcome).removeprefix("EXECUTION_OUTCOME_")
    return f"{name} {result.result.error_reason}".strip()


def error_of(result: execution_pb2.ExecutionResult) -> str:
    """Return the error of a call that has failed."""
    assert outcome(result) == "FAILED TOOL_ERROR"
    return str(content(result)["error"])


async def pieces(read: Callable[[int], Awaitable[execution_pb2.ExecutionResult]]) -> list[Any]:
    """Read a long content from its start to its end."""
    found = [content(await read(0))]
    while found[-1]["next_offset"] is not None:
        found.append(content(await read(found[-1]["next_offset"])))
    return found


async def refusal(call: Awaitable[Any] | AsyncIterable[Any]) -> str:
    return await reason_of(call)


async def all_pages(method: Callable[[Any], Awaitable[Any]], request: Any, field: str) -> list[Any]:
    found: list[Any] = []
    while True:
        page = await method(request)
        assert len(getattr(page, field)) <= (request.page_size or 200)
        found += getattr(page, field)
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


async def _fits(store_id: str, schema_json: bytes, answer: str) -> str:
    return ""


_WORKER_OPTIONS = WorkerOptions()
_FILE_LIMITS = FileLimits()
_T = TypeVar("_T")


@asynccontextmanager
async def running(
    database_url: str,
    folder: Path,
    tools: Iterable[Tool[..., Any]] = (),
    *,
    name: str = "a",
    options: ExecutorOptions | None = None,
    secrets: Mapping[str, Mapping[str, str]] | None = None,
    threads_max: int = 4,
    connectors: Callable[[PostgresSourceRepository, FileSecrets], Mapping[str, Connector]] = lambda *_: {},
    drain_seconds: float = 1.0,
    worker_options: WorkerOptions = _WORKER_OPTIONS,
    store_calls_per_minute: int = 0,
    file_limits: FileLimits = _FILE_LIMITS,
    wrap_journal: Callable[[PostgresExecutionJournal], Any] = lambda journal: journal,
    clock: Clock | None = None,
) -> AsyncIterator[Registry]:
    """Run a registry with these tools. Several registries on one database are replicas."""
    options = options or ExecutorOptions(grace_seconds=drain_seconds, renew_seconds=0.2)
    clock, stop, metrics = clock or SystemClock(), asyncio.Event(), Metrics(f"registry_{name}")
    instance_id = (ids := IdSource(clock)).new(name)
    async with (
        Database(database_url, application_name="test", connections_max=8) as database,
        PythonRunner(threads_max=threads_max) as threads,
    ):
        await database.create_schema("tool_registry")
        sources, known = PostgresSourceRepository(database), FileSecrets(secrets or {})
        mcp = (kinds := connectors(sources, known)).get("mcp")
        ports = Ports(
            database=database,
            instance_id=instance_id,
            journal=wrap_journal(_journal(database, instance_id, options)),
            ledger=(ledger := Ledger()),
            runner=(processes := ProcessRunner(threads, processes_max=2)),
            secrets=known,
            files=FileFolders(folder / "files", file_limits, clock.now),
            helper=(helpers := Helpers()),
            connectors=kinds,
            answer_problem=mcp.answer_problem if isinstance(mcp, McpConnector) else _fits,
            observer=(seen := RegistryMetrics(metrics)),
            clock=clock,
            ids=ids,
            stopping=stop.wait,
            public_url=PUBLIC_URL,
        )
        limits = Limits(executor=options, workers=worker_options, store_calls_per_minute=store_calls_per_minute)
        _watch(seen, (registry := wire(ports, limits)).executor, threads, processes)
        server = _server(f"unix:{folder}/{name}", ids, metrics, drain_seconds)
        async with helpers, processes, _serving(registry, server, tools) as channels:
            yield Registry(
                address=server.address,
                execution=ExecutionServiceStub(channels.service),
                users=channels.stubs(ToolServiceStub),
                rules=channels.stubs(RuleServiceStub),
                sources=channels.stubs(SourceServiceStub),
                auditors=channels.stubs(AuditServiceStub),
                documents=channels.stubs(DocumentServiceStub),
                files=channels.stubs(FileServiceStub),
                memories=channels.stubs(MemoryServiceStub),
                completions=channels.stubs(CompletionServiceStub),
                ledger=ledger,
                executor=registry.executor,
                catalog=registry.catalog,
                metrics=metrics,
                runner=threads,
                instance_id=instance_id,
                stop=stop.set,
                forget_rule_uses=registry.rules.repository.forget,
            )
            stop.set()


def _journal(database: Database, instance_id: str, options: ExecutorOptions) -> PostgresExecutionJournal:
    journal = PostgresExecutionJournal(database, instance_id=instance_id, lease_seconds=options.lease_seconds)
    journal.watch.lease_seconds = min(options.lease_seconds, 0.6)
    return journal


@asynccontextmanager
async def _serving(
    registry: ToolRegistry, server: RpcServer, tools: Iterable[Tool[..., Any]]
) -> AsyncIterator[_Channels]:
    await registry.catalog.load("module:test", tools)
    registry.add_to(server)
    async with registry.hub, registry.completing, registry.executor, server, _Channels(server.address) as channels:
        yield channels


def _watch(observer: RegistryMetrics, executor: Executor, threads: PythonRunner, processes: ProcessRunner) -> None:
    observer.watch(
        running=lambda: executor.running_count,
        threads_busy=lambda: threads.threads_busy,
        processes_busy=lambda: processes.processes_busy,
    )


def _server(address: str, ids: IdSource, metrics: Metrics, drain_seconds: float) -> RpcServer:
    return RpcServer(
        address,
        authenticator=authenticator(KEYS, service_key=SERVICE_KEY),
        ids=ids,
        metrics=metrics,
        drain_seconds=drain_seconds,
    )


class _OnDemand(dict[tuple[str, str], _T]):
    def __init__(self, make: Callable[[tuple[str, str]], _T]) -> None:
        self._make = make

    def __missing__(self, who: tuple[str, str]) -> _T:
        return self.setdefault(who, self._make(who))


class _Channels:
    def __init__(self, address: str) -> None:
        self.service = open_channel(address, service_key=SERVICE_KEY)
        keys = {(key.store_id or "", key.user_id): key.key for key in KEYS}
        self.users = _OnDemand[grpc.aio.Channel](lambda who: open_channel(address, service_key=keys[who]))

    def stubs(self, stub: Callable[[grpc.aio.Channel], Any]) -> dict[tuple[str, str], Any]:
        return _OnDemand[Any](lambda who: stub(self.users[who]))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        channels: Sequence[grpc.aio.Channel] = (self.service, *self.users.values())
        await asyncio.gather(*(channel.close() for channel in channels))


def front_end_tool(name: str = "show_chart", **changes: Any) -> tool_pb2.ToolDefinition:
    fields: dict[str, Any] = {
        "name": name,
        "description": "Show a chart.",
        "arguments_schema_json": b'{"type": "object", "properties": {"points": {"type": "array"}}}',
        "context": 2,
        "category": 1,
        "effect_class": 1,
    }
    return tool_pb2.ToolDefinition(**fields | changes)
