"""Entry point of the registry: `python -m pawl.tool_registry`."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import httpx2

from pawl.chassis.ids import StoreId
from pawl.server.db.database import Database
from pawl.server.db.erasures import ErasurePart, ErasureWork
from pawl.server.egress.client import GuardedEgress, read_egress_file
from pawl.server.egress.mail import read_smtp_url
from pawl.server.identity.key_sync import KeySyncClient
from pawl.server.process.service import Service, run_service
from pawl.server.process.settings import load
from pawl.tool_registry.builtin.agents import agent_tools
from pawl.tool_registry.builtin.calculator import calculator_tools
from pawl.tool_registry.builtin.clock import clock_tools
from pawl.tool_registry.builtin.files.folders import FileFolders
from pawl.tool_registry.builtin.files.rules import FileLimits
from pawl.tool_registry.builtin.files.tools import file_tools
from pawl.tool_registry.builtin.jobs import job_tools
from pawl.tool_registry.builtin.mail.tools import OutboxFolder, SmtpMailer, mail_tools
from pawl.tool_registry.builtin.people import people_tools
from pawl.tool_registry.builtin.planning.store import PostgresPlanRepository
from pawl.tool_registry.builtin.planning.tools import planning_tools
from pawl.tool_registry.builtin.question import question_tools
from pawl.tool_registry.builtin.stored_results import result_tools
from pawl.tool_registry.builtin.web.tools import web_tools
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from pawl.tool_registry.documents.tools import document_tools
from pawl.tool_registry.execution.executor import ExecutorOptions
from pawl.tool_registry.execution.store.erasures import PostgresErasures
from pawl.tool_registry.execution.store.journal import PostgresExecutionJournal
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.memory.store import PostgresMemoryRepository
from pawl.tool_registry.memory.tools import memory_tools
from pawl.tool_registry.metrics import RegistryMetrics
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.settings import ToolRegistrySettings, module_names
from pawl.tool_registry.sources.http.tools import HttpTools
from pawl.tool_registry.sources.mcp.connector import McpConnector
from pawl.tool_registry.sources.mcp.permission import Programs, read_programs_file
from pawl.tool_registry.sources.process.helpers import Helpers
from pawl.tool_registry.sources.process.runner import ProcessRunner
from pawl.tool_registry.sources.python.modules import DeploymentTools
from pawl.tool_registry.sources.python.runner import PythonRunner
from pawl.tool_registry.sources.store import PostgresSourceRepository
from pawl.tool_registry.sources.worker.workers import WorkerOptions
from pawl.tool_registry.wiring import Limits, Ports, wire
from pawl.tools.sdk.tool import Tool

if TYPE_CHECKING:  # The chassis must be imported before gRPC.
    import grpc


async def main(stop: asyncio.Event) -> None:
    settings = load(ToolRegistrySettings)
    async with Service("tool_registry", settings) as service:
        database = await service.open_database()
        await service.create_schema(database, "tool_registry", append_only=("audit",))
        threads = await service.enter(PythonRunner(threads_max=16))
        processes = await service.enter(ProcessRunner(threads, processes_max=4))
        secrets = FileSecrets.read(settings.tool_secrets_file)
        egress = GuardedEgress(read_egress_file(settings.egress_file))
        helpers = await service.enter(Helpers())
        mcp = await service.enter(_mcp(service, settings, database, secrets, egress=egress, helpers=helpers))
        job_store = await service.open_channel("job_store", settings.job_store_address, optional=True)
        ledger = LedgerReads(job_store)
        metrics = RegistryMetrics(service.metrics)

        files = FileFolders(settings.data / "files", FileLimits(), service.clock.now)
        await asyncio.to_thread(files.delete_interrupted)

        # A later process with the same name must not make old journal entries look active.
        instance_id = service.ids.new(service.instance_id)
        ports = Ports(
            database=database,
            instance_id=instance_id,
            journal=PostgresExecutionJournal(
                database, instance_id=instance_id, lease_seconds=settings.execution_lease_seconds
            ),
            ledger=ledger,
            runner=processes,
            secrets=secrets,
            files=files,
            helper=helpers,
            connectors={"mcp": mcp, "http": HttpTools(egress, helpers)},
            answer_problem=mcp.answer_problem,
            observer=metrics,
            clock=service.clock,
            ids=service.ids,
            stopping=stop.wait,
            public_url=settings.public_url,
        )
        lease_seconds = settings.execution_lease_seconds
        limits = Limits(
            executor=ExecutorOptions(lease_seconds=lease_seconds, renew_seconds=min(1.0, lease_seconds / 4)),
            workers=WorkerOptions(),
            store_calls_per_minute=settings.store_calls_per_minute,
            is_personal=_is_personal(settings),
        )
        registry = wire(ports, limits)
        metrics.watch(
            running=lambda: registry.executor.running_count,
            threads_busy=lambda: threads.threads_busy,
            processes_busy=lambda: processes.processes_busy,
        )
        await service.enter(registry.hub)
        own = _builtin_tools(
            service, settings, database=database, ledger=ledger, egress=egress, helpers=helpers, files=files
        )
        await registry.catalog.load("builtin", own)
        deployed = DeploymentTools(registry.catalog, module_names(settings.tools))
        await deployed.load()
        service.background.start("reloads", deployed.reload_forever)
        await service.enter(registry.completing)
        await service.enter(registry.executor)
        service.background.start("erasures", _erasures(service, database, job_store, files).run)
        server = service.rpc_server(KeySyncClient(job_store))
        registry.add_to(server)
        await service.serve(server, stop)


def _builtin_tools(
    service: Service,
    settings: ToolRegistrySettings,
    *,
    database: Database,
    ledger: LedgerReads,
    egress: GuardedEgress,
    helpers: Helpers,
    files: FileFolders,
) -> list[Tool[..., Any]]:
    url = settings.smtp_url
    mailer = SmtpMailer(read_smtp_url(url.get_secret_value())) if url else OutboxFolder(settings.data / "outbox")
    documents = PostgresDocumentRepository(database)
    return [
        *clock_tools(service.clock),
        *calculator_tools(),
        *planning_tools(PostgresPlanRepository(database), service.ids),
        *document_tools(documents),
        *memory_tools(PostgresMemoryRepository(database)),
        *file_tools(files),
        *mail_tools(mailer, documents, ledger, service.clock, sender=settings.mail_from),
        *people_tools(documents),
        *question_tools(),
        *agent_tools(),
        *result_tools(ledger),
        *job_tools(ledger, service.clock),
        *web_tools(egress, helpers),
    ]


def _erasures(service: Service, database: Database, job_store: grpc.aio.Channel, files: FileFolders) -> ErasureWork:
    """Return the worker that erases conversations.

    It first erases the conversations' rows, then the file tools' records of past calls.
    """
    rows = PostgresErasures(database)

    async def erase(part: ErasurePart) -> None:
        await rows.erase(part)
        await asyncio.to_thread(files.forget, StoreId(part.store_id), part.call_ids)

    return ErasureWork(job_store, erase, service.clock)


def _is_personal(settings: ToolRegistrySettings) -> bool:
    """Return whether stores may add any local program as a tool source."""
    return settings.is_personal and settings.mcp_programs_file is None


def _mcp(
    service: Service,
    settings: ToolRegistrySettings,
    database: Database,
    secrets: FileSecrets,
    *,
    egress: GuardedEgress,
    helpers: Helpers,
) -> McpConnector:
    """Return the connector for MCP servers. The egress rules apply to servers reached over HTTP.

    A personal deployment without a programs file may run any program, but confined programs can never access private
    paths.
    """
    rules = None if _is_personal(settings) else read_programs_file(settings.mcp_programs_file)
    private = settings.private_paths(os.environ)
    return McpConnector(
        find=PostgresSourceRepository(database).get,
        secrets=secrets,
        clock=service.clock,
        programs=Programs(rules=rules, private=private, is_confined=not settings.mcp_unconfined),
        helper=helpers,
        http=lambda store_id: httpx2.AsyncClient(
            transport=egress.transport(store_id, with_secrets=True), trust_env=False
        ),
    )


if __name__ == "__main__":
    run_service(main)
