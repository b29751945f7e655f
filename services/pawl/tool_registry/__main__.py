"""The registry as a process: `python -m pawl.tool_registry`."""

from __future__ import annotations

import os
from typing import Any

import httpx2

from pawl.chassis.database import Database
from pawl.chassis.lifecycle import Stop, run_service
from pawl.chassis.service import Service
from pawl.chassis.settings import load
from pawl.tool.v1.audit_pb2_grpc import add_AuditServiceServicer_to_server
from pawl.tool.v1.document_pb2_grpc import add_DocumentServiceServicer_to_server
from pawl.tool.v1.execution_pb2_grpc import add_ExecutionServiceServicer_to_server
from pawl.tool.v1.rule_pb2_grpc import add_RuleServiceServicer_to_server
from pawl.tool.v1.source_pb2_grpc import add_SourceServiceServicer_to_server
from pawl.tool.v1.tool_pb2_grpc import add_ToolServiceServicer_to_server
from pawl.tool.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from pawl.tool_registry.adapters.files.folders import FileFolders
from pawl.tool_registry.adapters.http.egress import GuardedEgress
from pawl.tool_registry.adapters.http.egress_file import read_egress_file
from pawl.tool_registry.adapters.http.tools import HttpTools
from pawl.tool_registry.adapters.ledger import LedgerReads
from pawl.tool_registry.adapters.mail.smtp import OutboxFolder, SmtpMailer
from pawl.tool_registry.adapters.mcp.connector import McpConnector
from pawl.tool_registry.adapters.mcp.permission import Programs, read_programs_file
from pawl.tool_registry.adapters.metrics import RegistryMetrics
from pawl.tool_registry.adapters.postgres.audit import PostgresAuditLog
from pawl.tool_registry.adapters.postgres.documents import PostgresDocumentRepository
from pawl.tool_registry.adapters.postgres.journal import PostgresJournal
from pawl.tool_registry.adapters.postgres.locks import PostgresResourceLocks
from pawl.tool_registry.adapters.postgres.planning import PostgresPlanRepository
from pawl.tool_registry.adapters.postgres.rates import PostgresRateLimits
from pawl.tool_registry.adapters.postgres.rules import PostgresRuleRepository
from pawl.tool_registry.adapters.postgres.sources import PostgresSourceRepository
from pawl.tool_registry.adapters.postgres.tools import PostgresToolRepository
from pawl.tool_registry.adapters.postgres.workers import PostgresWorkerRepository
from pawl.tool_registry.adapters.process.helpers import Helpers
from pawl.tool_registry.adapters.process.runner import ProcessRunner
from pawl.tool_registry.adapters.python.modules import load_modules
from pawl.tool_registry.adapters.python.runner import PythonRunner
from pawl.tool_registry.adapters.secret_file import FileSecrets
from pawl.tool_registry.app.catalog.catalog import Catalog
from pawl.tool_registry.app.documents.documents import Documents
from pawl.tool_registry.app.execution.attempt import AttemptParts
from pawl.tool_registry.app.execution.executor import Executor
from pawl.tool_registry.app.policy.admission import Admission
from pawl.tool_registry.app.policy.audit import AuditTrail
from pawl.tool_registry.app.policy.result_cache import ResultCache
from pawl.tool_registry.app.policy.rules import Rules
from pawl.tool_registry.app.sources.ports import Connector
from pawl.tool_registry.app.sources.sources import Sources
from pawl.tool_registry.app.workers.tools import WorkerTools
from pawl.tool_registry.app.workers.workers import WorkerHub
from pawl.tool_registry.builtin.agents import agent_tools
from pawl.tool_registry.builtin.calculator import calculator_tools
from pawl.tool_registry.builtin.clock import clock_tools
from pawl.tool_registry.builtin.documents import document_tools
from pawl.tool_registry.builtin.files import file_tools
from pawl.tool_registry.builtin.mail import mail_tools
from pawl.tool_registry.builtin.planning import planning_tools
from pawl.tool_registry.builtin.question import question_tools
from pawl.tool_registry.builtin.stored_results import result_tools
from pawl.tool_registry.builtin.web import web_tools
from pawl.tool_registry.domain.files import FileLimits
from pawl.tool_registry.domain.mail_server import read_smtp_url
from pawl.tool_registry.domain.workers import SOURCE_KIND as WORKER
from pawl.tool_registry.rpc.audit_servicer import AuditServicer
from pawl.tool_registry.rpc.document_servicer import DocumentServicer
from pawl.tool_registry.rpc.execution_servicer import ExecutionServicer
from pawl.tool_registry.rpc.rule_servicer import RuleServicer
from pawl.tool_registry.rpc.source_servicer import SourceServicer
from pawl.tool_registry.rpc.tool_servicer import ToolServicer
from pawl.tool_registry.rpc.worker_servicer import WorkerServicer
from pawl.tool_registry.sdk.tool import Tool
from pawl.tool_registry.settings import ToolRegistrySettings, module_names


async def main(stop: Stop) -> None:
    """Serve until `stop`."""
    settings = load(ToolRegistrySettings)
    async with Service("tool_registry", settings) as service:
        database = await service.open_database()
        await database.migrate("tool_registry", "pawl.tool_registry.adapters.sql.migrations")
        # An entry of the journal must not look alive because a later process has the same name.
        instance_id = service.ids.new(settings.instance_id)
        journal = PostgresJournal(database, instance_id=instance_id, lease_seconds=settings.execution_lease_seconds)
        threads = PythonRunner(threads_max=settings.tool_threads_max)
        runner = await service.enter(ProcessRunner(threads, processes_max=settings.tool_processes_max))
        secrets = FileSecrets.read(settings.tool_secrets_file)
        egress = GuardedEgress(read_egress_file(settings.egress_file))

        helpers = await service.enter(Helpers())
        known, attached = PostgresToolRepository(database), PostgresWorkerRepository(database, instance_id=instance_id)
        audit_log = PostgresAuditLog(database)
        audit = AuditTrail(audit_log, service.clock.now)
        hub = WorkerHub(attached, audit, clock=service.clock, stopping=stop.wait, options=settings.worker_options)
        await service.enter(hub)
        connected = PostgresSourceRepository(database)
        mcp, kinds = await _connectors(service, settings, connected, secrets, egress=egress, helpers=helpers)
        catalog = Catalog(known, sources={WORKER: hub, **kinds}, helper=helpers)
        ledger = LedgerReads(await service.open_channel("job_store", settings.job_store_address, optional=True))
        own = _builtin_tools(service, settings, database=database, ledger=ledger, egress=egress, helpers=helpers)
        await catalog.load("builtin", own)
        for module in load_modules(module_names(settings.tools)):
            await catalog.load(f"module:{module.name}", module.tools)

        metrics = RegistryMetrics(service.metrics)
        known_rules = PostgresRuleRepository(database)
        rules = Rules(known_rules, catalog, runs=ledger, audit=audit, ids=service.ids, clock=service.clock)
        admission = Admission(
            catalog=catalog,
            rules=rules,
            journal=journal,
            limits=PostgresRateLimits(database),
            cache=ResultCache(service.clock.monotonic),
            audit=audit,
            observer=metrics,
            store_calls_per_minute=settings.store_calls_per_minute,
        )
        parts = AttemptParts(
            locks=PostgresResourceLocks(database, instance_id=instance_id, watch=journal.watch),
            runner=runner,
            secrets=secrets,
            admission=admission,
            clock=service.clock,
        )
        executor = Executor(parts=parts, observer=metrics, stopping=stop.wait, options=settings.executor_options)
        metrics.watch(
            running=lambda: executor.running_count,
            threads_busy=lambda: threads.threads_busy,
            processes_busy=lambda: runner.processes_busy,
        )
        await service.enter(executor)

        server = service.rpc_server()
        execution = ExecutionServicer(catalog, admission, executor, audit, mcp.misfit)
        sources = Sources(store=connected, repository=known, catalog=catalog, connectors=kinds, clock=service.clock)
        workers = WorkerServicer(hub, WorkerTools(known, attached, catalog))
        server.add(add_ToolServiceServicer_to_server, ToolServicer(catalog))
        server.add(add_RuleServiceServicer_to_server, RuleServicer(rules))
        server.add(add_AuditServiceServicer_to_server, AuditServicer(audit_log))
        documents = Documents(PostgresDocumentRepository(database))
        server.add(add_DocumentServiceServicer_to_server, DocumentServicer(documents))
        server.add(add_SourceServiceServicer_to_server, SourceServicer(sources))
        server.add(add_WorkerServiceServicer_to_server, workers, drain_streams=True)
        server.add(add_ExecutionServiceServicer_to_server, execution, service_only=True, drain_streams=True)
        await service.serve(server, stop)


def _builtin_tools(
    service: Service,
    settings: ToolRegistrySettings,
    *,
    database: Database,
    ledger: LedgerReads,
    egress: GuardedEgress,
    helpers: Helpers,
) -> list[Tool[..., Any]]:
    """Return the tools that come along."""
    url = settings.smtp_url
    mailer = SmtpMailer(read_smtp_url(url.get_secret_value())) if url else OutboxFolder(settings.outbox_dir)
    file_limits = FileLimits(file_bytes_max=settings.file_bytes_max, store_bytes_max=settings.files_bytes_max)
    return [
        *clock_tools(service.clock),
        *calculator_tools(),
        *planning_tools(PostgresPlanRepository(database), service.ids),
        *document_tools(PostgresDocumentRepository(database)),
        *file_tools(FileFolders(settings.files_dir, file_limits, service.clock.now)),
        *mail_tools(mailer, service.clock, sender=settings.mail_from),
        *question_tools(),
        *agent_tools(),
        *result_tools(ledger),
        *web_tools(egress, helpers),
    ]


def _programs(settings: ToolRegistrySettings) -> Programs:
    """Return what programs may do: anything but reach what is private, where all of it is one user's."""
    is_ones_own = settings.api_keys_file is None and settings.mcp_programs_file is None
    rules = None if is_ones_own else read_programs_file(settings.mcp_programs_file)
    return Programs(rules=rules, private=settings.private_places(os.environ), is_confined=not settings.mcp_unconfined)


async def _connectors(
    service: Service,
    settings: ToolRegistrySettings,
    store: PostgresSourceRepository,
    secrets: FileSecrets,
    *,
    egress: GuardedEgress,
    helpers: Helpers,
) -> tuple[McpConnector, dict[str, Connector]]:
    """Return what connects each kind of source, MCP servers first. All of them go out under the egress rules."""
    mcp = McpConnector(
        find=store.source,
        secrets=secrets,
        clock=service.clock,
        programs=_programs(settings),
        helper=helpers,
        http=lambda store_id: httpx2.AsyncClient(
            transport=egress.transport(store_id, with_secrets=True), trust_env=False
        ),
    )
    return await service.enter(mcp), {"mcp": mcp, "http": HttpTools(egress, helpers)}


if __name__ == "__main__":
    run_service(main)
