"""The registry put together: ports in, its catalog, what runs calls and its servicers out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Self

from pawl.chassis.clock import Clock
from pawl.chassis.database import Database
from pawl.chassis.ids import IdSource, StoreId
from pawl.chassis.retry import ANY, Retry
from pawl.chassis.rpc_server import RpcServer
from pawl.tool.v1.audit_pb2_grpc import add_AuditServiceServicer_to_server
from pawl.tool.v1.completion_pb2_grpc import add_CompletionServiceServicer_to_server
from pawl.tool.v1.document_pb2_grpc import add_DocumentServiceServicer_to_server
from pawl.tool.v1.execution_pb2_grpc import add_ExecutionServiceServicer_to_server
from pawl.tool.v1.memory_pb2_grpc import add_MemoryServiceServicer_to_server
from pawl.tool.v1.rule_pb2_grpc import add_RuleServiceServicer_to_server
from pawl.tool.v1.source_pb2_grpc import add_SourceServiceServicer_to_server
from pawl.tool.v1.tool_pb2_grpc import add_ToolServiceServicer_to_server
from pawl.tool.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from pawl.tool_registry.adapters.postgres.audit import PostgresAuditLog
from pawl.tool_registry.adapters.postgres.checkpoints import PostgresCheckpoints
from pawl.tool_registry.adapters.postgres.completions import PostgresCompletions
from pawl.tool_registry.adapters.postgres.documents import PostgresDocumentRepository
from pawl.tool_registry.adapters.postgres.grants import PostgresGrantUses
from pawl.tool_registry.adapters.postgres.journal import PostgresExecutionJournal
from pawl.tool_registry.adapters.postgres.locks import PostgresResourceLocks
from pawl.tool_registry.adapters.postgres.memories import PostgresMemoryRepository
from pawl.tool_registry.adapters.postgres.rates import PostgresRateLimits
from pawl.tool_registry.adapters.postgres.rules import PostgresRuleRepository
from pawl.tool_registry.adapters.postgres.sources import PostgresSourceRepository
from pawl.tool_registry.adapters.postgres.tools import PostgresToolRepository
from pawl.tool_registry.adapters.postgres.workers import PostgresWorkerRepository
from pawl.tool_registry.app.catalog.catalog import Catalog
from pawl.tool_registry.app.catalog.ports import Helper, ToolRepository
from pawl.tool_registry.app.documents.documents import DocumentRepository, Documents
from pawl.tool_registry.app.documents.memories import Memories, MemoryRepository
from pawl.tool_registry.app.execution.attempt import AttemptParts
from pawl.tool_registry.app.execution.batch_check import BatchCheck
from pawl.tool_registry.app.execution.completions import Completing
from pawl.tool_registry.app.execution.executor import Executor, ExecutorOptions
from pawl.tool_registry.app.execution.ports import AwaitedRuns, Checkpoints, Completions, ResourceLocks, Runner, Secrets
from pawl.tool_registry.app.policy.admission import Admission
from pawl.tool_registry.app.policy.audit import AuditTrail
from pawl.tool_registry.app.policy.ports import (
    AuditLog,
    ExecutionJournal,
    GrantUses,
    Observer,
    RateLimits,
    RuleRepository,
    RunReads,
)
from pawl.tool_registry.app.policy.result_cache import ResultCache
from pawl.tool_registry.app.policy.rules import Rules
from pawl.tool_registry.app.sources.ports import Connector, SourceRepository
from pawl.tool_registry.app.sources.sources import Sources
from pawl.tool_registry.app.workers.ports import WorkerRepository
from pawl.tool_registry.app.workers.tools import WorkerTools
from pawl.tool_registry.app.workers.workers import WorkerHub, WorkerOptions
from pawl.tool_registry.domain.workers import SOURCE_KIND as WORKER
from pawl.tool_registry.rpc.audit_servicer import AuditServicer
from pawl.tool_registry.rpc.completion_servicer import CompletionServicer
from pawl.tool_registry.rpc.document_servicer import DocumentServicer
from pawl.tool_registry.rpc.execution_servicer import ExecutionServicer
from pawl.tool_registry.rpc.memory_servicer import MemoryServicer
from pawl.tool_registry.rpc.rule_servicer import RuleServicer
from pawl.tool_registry.rpc.source_servicer import SourceServicer
from pawl.tool_registry.rpc.tool_servicer import ToolServicer
from pawl.tool_registry.rpc.worker_servicer import WorkerServicer


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record that all processes of the registry share."""

    tools: ToolRepository
    workers: WorkerRepository
    sources: SourceRepository
    documents: DocumentRepository
    memories: MemoryRepository
    rules: RuleRepository
    grants: GrantUses
    journal: ExecutionJournal
    checkpoints: Checkpoints
    completions: Completions
    locks: ResourceLocks
    rates: RateLimits
    audit: AuditLog

    @classmethod
    def on_postgres(
        cls, database: Database, *, instance_id: str, lease_seconds: float, watch_seconds: float | None = None
    ) -> Self:
        """Return the record on PostgreSQL. `instance_id` must be new for each start of a process.

        A lease of another process is watched for `watch_seconds`, or for as long as the own one lasts.
        """
        journal = PostgresExecutionJournal(database, instance_id=instance_id, lease_seconds=lease_seconds)
        if watch_seconds is not None:
            journal.watch.lease_seconds = watch_seconds
        return cls(
            tools=PostgresToolRepository(database),
            workers=PostgresWorkerRepository(database, instance_id=instance_id),
            sources=PostgresSourceRepository(database),
            documents=PostgresDocumentRepository(database),
            memories=PostgresMemoryRepository(database),
            rules=PostgresRuleRepository(database),
            grants=PostgresGrantUses(database),
            journal=journal,
            checkpoints=PostgresCheckpoints(database),
            completions=PostgresCompletions(database, instance_id=instance_id),
            locks=PostgresResourceLocks(database, instance_id=instance_id, watch=journal.watch),
            rates=PostgresRateLimits(database),
            audit=PostgresAuditLog(database),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The outside of the registry. `stopping` returns when the process is to end."""

    record: Record
    runs: RunReads
    awaited_runs: AwaitedRuns
    runner: Runner
    secrets: Secrets
    helper: Helper
    connectors: Mapping[str, Connector]
    misfit: Callable[[StoreId, bytes, str], Awaitable[str]]
    """Say for a store what is wrong with an answer to a question with a schema."""
    observer: Observer
    clock: Clock
    ids: IdSource
    stopping: Callable[[], Awaitable[object]]
    public_url: str = ""
    """The address of the gateway; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a registry. 0 `store_calls_per_minute` means any number."""

    executor: ExecutorOptions
    workers: WorkerOptions
    store_calls_per_minute: int = 0
    is_ones_own: bool = False
    """Any program may be a source, and whoever owns the machine adds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRegistry:
    """A registry that is not running yet: load `catalog`, enter `hub`, `completing`, `executor`, add it to a server."""

    is_ones_own: bool

    catalog: Catalog
    rules: Rules
    sources: Sources
    documents: Documents
    memories: Memories
    hub: WorkerHub
    worker_tools: WorkerTools
    completing: Completing
    executor: Executor
    execution: ExecutionServicer
    audit: AuditLog

    def add_to(self, server: RpcServer) -> None:
        """Have a server answer for it."""
        workers = WorkerServicer(self.hub, self.worker_tools)
        server.add(add_ToolServiceServicer_to_server, ToolServicer(self.catalog))
        server.add(add_RuleServiceServicer_to_server, RuleServicer(self.rules))
        server.add(add_AuditServiceServicer_to_server, AuditServicer(self.audit))
        server.add(add_CompletionServiceServicer_to_server, CompletionServicer(self.completing))
        server.add(add_DocumentServiceServicer_to_server, DocumentServicer(self.documents))
        server.add(add_MemoryServiceServicer_to_server, MemoryServicer(self.memories))
        server.add(add_SourceServiceServicer_to_server, SourceServicer(self.sources, is_ones_own=self.is_ones_own))
        server.add(add_WorkerServiceServicer_to_server, workers, drain_streams=True)
        server.add(add_ExecutionServiceServicer_to_server, self.execution, service_only=True, drain_streams=True)


def wire(ports: Ports, limits: Limits) -> ToolRegistry:
    """Return a registry over these ports."""
    record, clock = ports.record, ports.clock
    audit = AuditTrail(record.audit, clock.now)
    hub = WorkerHub(record.workers, audit, clock=clock, stopping=ports.stopping, options=limits.workers)
    catalog = Catalog(record.tools, sources={WORKER: hub, **ports.connectors}, helper=ports.helper)
    rules = Rules(repository=record.rules, catalog=catalog, runs=ports.runs, audit=audit, ids=ports.ids, clock=clock)
    admission = Admission(
        catalog=catalog,
        rules=rules,
        journal=record.journal,
        limits=record.rates,
        cache=ResultCache(clock.monotonic),
        audit=audit,
        observer=ports.observer,
        grants=record.grants,
        answer=ports.runner.answer,
        store_calls_per_minute=limits.store_calls_per_minute,
    )
    completing = Completing(completions=record.completions, runs=ports.awaited_runs, secrets=ports.secrets, audit=audit)
    parts = AttemptParts(
        locks=record.locks,
        runner=ports.runner,
        secrets=ports.secrets,
        checkpoints=record.checkpoints,
        retry=Retry(clock, transient=ANY, event="checkpoint.delayed"),
        admission=admission,
        clock=clock,
        completions=record.completions,
        public_url=ports.public_url,
        on_withdrawn=completing.look,
    )
    executor = Executor(parts=parts, observer=ports.observer, stopping=ports.stopping, options=limits.executor)
    documents = Documents(record.documents)
    return ToolRegistry(
        is_ones_own=limits.is_ones_own,
        catalog=catalog,
        rules=rules,
        sources=Sources(
            repository=record.sources, tools=record.tools, catalog=catalog, connectors=ports.connectors, clock=clock
        ),
        documents=documents,
        memories=Memories(record.memories),
        hub=hub,
        worker_tools=WorkerTools(record.tools, record.workers, catalog),
        completing=completing,
        executor=executor,
        execution=ExecutionServicer(
            catalog, BatchCheck(admission, executor, audit), executor, audit, ports.misfit, documents
        ),
        audit=record.audit,
    )
