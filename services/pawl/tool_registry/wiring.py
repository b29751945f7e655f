"""Builds the registry from its dependencies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pawl.chassis.ids import IdSource, StoreId
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.retry import ANY, Retry
from pawl.server.db.database import Database
from pawl.server.rpc.server import RpcServer
from pawl.tool.v1.audit_pb2_grpc import add_AuditServiceServicer_to_server
from pawl.tool.v1.completion_pb2_grpc import add_CompletionServiceServicer_to_server
from pawl.tool.v1.document_pb2_grpc import add_DocumentServiceServicer_to_server
from pawl.tool.v1.execution_pb2_grpc import add_ExecutionServiceServicer_to_server
from pawl.tool.v1.file_pb2_grpc import add_FileServiceServicer_to_server
from pawl.tool.v1.memory_pb2_grpc import add_MemoryServiceServicer_to_server
from pawl.tool.v1.rule_pb2_grpc import add_RuleServiceServicer_to_server
from pawl.tool.v1.source_pb2_grpc import add_SourceServiceServicer_to_server
from pawl.tool.v1.tool_pb2_grpc import add_ToolServiceServicer_to_server
from pawl.tool.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rpc import AuditServicer
from pawl.tool_registry.audit.store.audit import PostgresAuditLog
from pawl.tool_registry.builtin.files.folders import FileFolders
from pawl.tool_registry.builtin.files.rpc import FileServicer
from pawl.tool_registry.catalog.catalog import Catalog
from pawl.tool_registry.catalog.ports import Helper
from pawl.tool_registry.catalog.rpc import ToolServicer
from pawl.tool_registry.catalog.store import PostgresToolRepository
from pawl.tool_registry.documents.rpc import DocumentServicer
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from pawl.tool_registry.execution.attempt import AttemptParts
from pawl.tool_registry.execution.batch_check import BatchCheck
from pawl.tool_registry.execution.completion_rpc import CompletionServicer
from pawl.tool_registry.execution.completions import Completing
from pawl.tool_registry.execution.executor import Executor, ExecutorOptions
from pawl.tool_registry.execution.rpc import ExecutionServicer
from pawl.tool_registry.execution.store.checkpoints import PostgresCheckpoints
from pawl.tool_registry.execution.store.completions import PostgresCompletions
from pawl.tool_registry.execution.store.journal import PostgresExecutionJournal
from pawl.tool_registry.execution.store.locks import PostgresResourceLocks
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.memory.rpc import MemoryServicer
from pawl.tool_registry.memory.store import PostgresMemoryRepository
from pawl.tool_registry.metrics import RegistryMetrics
from pawl.tool_registry.policy.admission import Admission
from pawl.tool_registry.policy.result_cache import ResultCache
from pawl.tool_registry.policy.rpc import RuleServicer
from pawl.tool_registry.policy.ruleset import Rules
from pawl.tool_registry.policy.store.grants import PostgresGrantUses
from pawl.tool_registry.policy.store.rates import PostgresRateLimits
from pawl.tool_registry.policy.store.rule_rows import PostgresRuleRepository
from pawl.tool_registry.rules.registering import WORKER
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.sources.process.runner import ProcessRunner
from pawl.tool_registry.sources.rpc import SourceServicer
from pawl.tool_registry.sources.sources import Connector, Sources
from pawl.tool_registry.sources.store import PostgresSourceRepository
from pawl.tool_registry.sources.worker.rpc import WorkerServicer
from pawl.tool_registry.sources.worker.store.workers import PostgresWorkerRepository
from pawl.tool_registry.sources.worker.tools import WorkerTools
from pawl.tool_registry.sources.worker.workers import WorkerHub, WorkerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """External dependencies of the registry. `stopping` returns when the process should shut down."""

    database: Database
    # A new id each time a process starts.
    instance_id: str
    journal: PostgresExecutionJournal
    ledger: LedgerReads
    runner: ProcessRunner
    secrets: FileSecrets
    files: FileFolders
    helper: Helper
    connectors: Mapping[str, Connector]
    # Takes a store, a schema and an answer. Returns why the answer does not match; empty if it matches.
    answer_problem: Callable[[StoreId, bytes, str], Awaitable[str]]
    observer: RegistryMetrics
    clock: Clock
    ids: IdSource
    stopping: Callable[[], Awaitable[object]]
    # The gateway's address; empty if it is not public.
    public_url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a registry. If `store_calls_per_minute` is 0, calls are not limited."""

    executor: ExecutorOptions
    workers: WorkerOptions
    store_calls_per_minute: int = 0
    # True if one person owns this deployment. The owner may connect any local program as a source.
    is_personal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRegistry:
    """An assembled registry that is not running yet.

    To run it, load `catalog`, enter `hub`, `completing` and `executor`, then add the servicers to a server.
    """

    catalog: Catalog
    rules: Rules
    hub: WorkerHub
    completing: Completing
    executor: Executor
    add_to: Callable[[RpcServer], None]


def wire(ports: Ports, limits: Limits) -> ToolRegistry:
    database, instance_id, clock = ports.database, ports.instance_id, ports.clock
    tools, documents = PostgresToolRepository(database), PostgresDocumentRepository(database)
    audit_log = PostgresAuditLog(database)
    workers = PostgresWorkerRepository(database, instance_id=instance_id)
    audit = AuditTrail(audit_log, clock.now)
    hub = WorkerHub(workers, audit, clock=clock, stopping=ports.stopping, options=limits.workers)
    catalog = Catalog(tools, sources={WORKER: hub, **ports.connectors}, helper=ports.helper)
    rules = Rules(
        repository=PostgresRuleRepository(database),
        catalog=catalog,
        runs=ports.ledger,
        audit=audit,
        ids=ports.ids,
        clock=clock,
    )
    admission = Admission(
        catalog=catalog,
        rules=rules,
        journal=ports.journal,
        limits=PostgresRateLimits(database),
        cache=ResultCache(clock.monotonic),
        audit=audit,
        observer=ports.observer,
        grants=PostgresGrantUses(database),
        answer=ports.runner.answer,
        store_calls_per_minute=limits.store_calls_per_minute,
    )
    completing = Completing(
        completions=PostgresCompletions(database, instance_id=instance_id),
        runs=ports.ledger,
        secrets=ports.secrets,
        audit=audit,
    )
    parts = AttemptParts(
        locks=PostgresResourceLocks(database, instance_id=instance_id, watch=ports.journal.watch),
        runner=ports.runner,
        secrets=ports.secrets,
        checkpoints=PostgresCheckpoints(database),
        retry=Retry(clock, transient=ANY, event="checkpoint.delayed"),
        admission=admission,
        clock=clock,
        completing=completing,
        public_url=ports.public_url,
    )
    executor = Executor(parts=parts, observer=ports.observer, stopping=ports.stopping, options=limits.executor)
    sources = Sources(
        repository=PostgresSourceRepository(database),
        tools=tools,
        catalog=catalog,
        connectors=ports.connectors,
        clock=clock,
    )
    checks = BatchCheck(admission, executor, audit)

    def add_to(server: RpcServer) -> None:
        execution = ExecutionServicer(catalog, checks, executor, audit, ports.answer_problem, documents)
        worker_servicer = WorkerServicer(hub, WorkerTools(tools, workers, catalog))
        server.add(add_ToolServiceServicer_to_server, ToolServicer(catalog))
        server.add(add_RuleServiceServicer_to_server, RuleServicer(rules))
        server.add(add_AuditServiceServicer_to_server, AuditServicer(audit_log))
        server.add(add_CompletionServiceServicer_to_server, CompletionServicer(completing))
        server.add(add_DocumentServiceServicer_to_server, DocumentServicer(documents))
        server.add(add_FileServiceServicer_to_server, FileServicer(ports.files, ports.ids))
        server.add(add_MemoryServiceServicer_to_server, MemoryServicer(PostgresMemoryRepository(database)))
        server.add(add_SourceServiceServicer_to_server, SourceServicer(sources, is_personal=limits.is_personal))
        server.add(add_WorkerServiceServicer_to_server, worker_servicer, drain_streams=True)
        server.add(add_ExecutionServiceServicer_to_server, execution, service_only=True, drain_streams=True)

    return ToolRegistry(catalog=catalog, rules=rules, hub=hub, completing=completing, executor=executor, add_to=add_to)
