"""Builds the job store: the ledger, its servicers and its loops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from pawl.agent.v1.agent_pb2_grpc import add_AgentServiceServicer_to_server
from pawl.agent.v1.agents_pb2_grpc import add_AgentRegistryServiceServicer_to_server
from pawl.agent.v1.conversation_pb2_grpc import add_ConversationServiceServicer_to_server
from pawl.agent.v1.declaration_pb2_grpc import add_DeclarationServiceServicer_to_server
from pawl.agent.v1.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from pawl.agent.v1.schedule_pb2_grpc import add_ScheduleServiceServicer_to_server
from pawl.agent.v1.trigger_pb2_grpc import add_TriggerServiceServicer_to_server
from pawl.agent.v1.usage_pb2_grpc import add_UsageServiceServicer_to_server
from pawl.agent.v1.workflow_pb2_grpc import add_WorkflowServiceServicer_to_server
from pawl.chassis.ids import IdSource
from pawl.chassis.process.clock import Clock
from pawl.identity.v1.key_pb2_grpc import add_KeyServiceServicer_to_server
from pawl.identity.v1.key_sync_pb2_grpc import add_KeySyncServiceServicer_to_server
from pawl.job.v1.agents_pb2_grpc import add_AgentLedgerServiceServicer_to_server
from pawl.job.v1.erasure_pb2_grpc import add_ErasureServiceServicer_to_server
from pawl.job.v1.ledger_pb2_grpc import add_LedgerServiceServicer_to_server
from pawl.job.v1.models_pb2_grpc import add_ModelServiceServicer_to_server
from pawl.job.v1.schedules_pb2_grpc import add_ScheduleLedgerServiceServicer_to_server
from pawl.job.v1.titles_pb2_grpc import add_TitleServiceServicer_to_server
from pawl.job.v1.triggers_pb2_grpc import add_TriggerLedgerServiceServicer_to_server
from pawl.job.v1.workflows_pb2_grpc import add_WorkflowLedgerServiceServicer_to_server
from pawl.job_store import sweeps
from pawl.job_store.agents.rpc import AgentLedgerServicer, AgentServicer, daily_tokens_max
from pawl.job_store.agents.store import PostgresAgents
from pawl.job_store.conversations.rpc import ConversationServicer
from pawl.job_store.conversations.store.conversations import PostgresConversations
from pawl.job_store.conversations.store.exports import PostgresExports
from pawl.job_store.conversations.store.search_index import PostgresSearchIndex
from pawl.job_store.conversations.store.titles import PostgresTitles
from pawl.job_store.conversations.title_rpc import TitleServicer
from pawl.job_store.declarations.rpc import DeclarationServicer
from pawl.job_store.declarations.store import PostgresDeclarations
from pawl.job_store.erasure.erasing import Erasing, JetStreamErasures
from pawl.job_store.erasure.rpc import ErasureServicer
from pawl.job_store.erasure.store.erasures import PostgresErasures
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.keys.keys import Keys
from pawl.job_store.keys.rpc import KeyServicer, KeySyncServicer
from pawl.job_store.keys.store import PostgresKeyRepository
from pawl.job_store.ledger.announcer import NatsAnnouncer
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.group_commit import GroupCommit
from pawl.job_store.ledger.ledger import Ledger
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.ports import Limits, LimitsOf, Ports
from pawl.job_store.ledger.rpc.budgets import Budgets
from pawl.job_store.ledger.rpc.servicer import LedgerServicer, ListServicer
from pawl.job_store.ledger.store.journal import PostgresJournal
from pawl.job_store.ledger.store.leases import PostgresLeases
from pawl.job_store.ledger.store.reads import PostgresReads
from pawl.job_store.ledger.store.situations import PostgresAttentionRepository
from pawl.job_store.ledger.store.upkeep import PostgresLedgerStats, PostgresOfferRepository
from pawl.job_store.ledger.store.usage import PostgresTokens
from pawl.job_store.lifecycle.store import PostgresOutbox
from pawl.job_store.lifecycle.stream import JetStreamLifecycle
from pawl.job_store.models.rpc import ModelServicer
from pawl.job_store.models.store import PostgresModels
from pawl.job_store.schedules.rpc import ScheduleLedgerServicer, ScheduleServicer
from pawl.job_store.schedules.schedules import Schedules
from pawl.job_store.schedules.store import PostgresSchedules
from pawl.job_store.store_settings.rpc import SettingsServicer
from pawl.job_store.store_settings.snapshot import SettingsSnapshot
from pawl.job_store.store_settings.store import PostgresSettings
from pawl.job_store.sweeps import Relay, RetentionPeriods
from pawl.job_store.triggers.rpc import TriggerLedgerServicer, TriggerServicer
from pawl.job_store.triggers.store import PostgresTriggers
from pawl.job_store.triggers.triggers import Triggers
from pawl.job_store.usage.rpc import UsageServicer
from pawl.job_store.usage.store import PostgresUsage
from pawl.job_store.versions.store import PostgresVersions
from pawl.job_store.workflows.rpc import WORKFLOW, WorkflowLedgerServicer, WorkflowServicer
from pawl.server.bus.connection import Bus
from pawl.server.db.database import Database
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.server import RpcServer
from pawl.settings.v1.settings_pb2_grpc import add_SettingsServiceServicer_to_server
from pawl.values import Feature

Loops: TypeAlias = dict[str, Callable[[], Awaitable[None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerParts:
    """A ledger that is not yet running. To run it, enter `group_commit` and start `loops`."""

    group_commit: GroupCommit
    ledger: Ledger
    loops: Loops

    @property
    def servicers(self) -> tuple[object, ...]:
        """Servicers for runs and conversations, without erasure."""
        return ConversationServicer(self.ledger), ListServicer(self.ledger), LedgerServicer(self.ledger)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStore(LedgerParts):
    keys: Keys
    settings: SettingsSnapshot
    add_to: Callable[[RpcServer], None]


def wire(
    ports: Ports,
    limits_of: LimitsOf,
    *,
    crashes_max: int,
    lifecycle_written: Callable[[], None] = lambda: None,
    one_store: bool = False,
) -> LedgerParts:
    group_commit = GroupCommit(
        ports.journal,
        ports.announcer,
        ports.meter,
        monotonic=ports.clock.monotonic,
        lifecycle_written=lifecycle_written,
        one_store=one_store,
    )
    ledger = Ledger(ports, group_commit, limits_of, crashes_max=crashes_max)
    loops: Loops = {
        "offers": partial(sweeps.offer_again, ledger, ports.clock),
        "clock": partial(sweeps.watch_clock, ports.leases, ports.clock),
        "quarantine": partial(sweeps.quarantine, ledger, ports.meter, ports.clock),
    }
    return LedgerParts(group_commit=group_commit, ledger=ledger, loops=loops)


def on_postgres(
    database: Database,
    bus: Bus,
    limits: Limits,
    periods: RetentionPeriods,
    *,
    clock: Clock,
    ids: IdSource,
    metrics: Metrics,
    keeps_lifecycle: bool,
    forced_off: Collection[Feature] = (),
    one_store: bool = False,
) -> JobStore:
    """Return the job store on PostgreSQL and NATS.

    See `PostgresJournal` for `keeps_lifecycle`, `AllSettings` for `forced_off`, and `GroupCommit` for `one_store`.
    """
    announcer, cache, meter = NatsAnnouncer(bus), RunCache(clock.monotonic), PrometheusMeter(metrics)
    settings = SettingsSnapshot(PostgresSettings(database), clock, limits, forced_off, announcer.work_ready)
    ports = Ports(
        journal=PostgresJournal(database, ids, cache, keeps_lifecycle=keeps_lifecycle, off=settings.off),
        leases=PostgresLeases(database, settings.slots, crashes_max=limits.crashes_max, one_store=one_store),
        reads=PostgresReads(database, cache),
        conversations=PostgresConversations(database),
        offer_repository=PostgresOfferRepository(database),
        attention_repository=PostgresAttentionRepository(database),
        announcer=announcer,
        meter=meter,
        clock=clock,
    )
    relay, limits_of = Relay(PostgresOutbox(database), JetStreamLifecycle(bus), meter), settings.limits_of
    parts = wire(ports, limits_of, crashes_max=limits.crashes_max, lifecycle_written=relay.wake, one_store=one_store)
    group_commit, ledger, exports = parts.group_commit, parts.ledger, PostgresExports(database)
    erasing, keys = _erasing(database, bus, ports, group_commit, ids), Keys(PostgresKeyRepository(database), clock, ids)
    schedules = Schedules(PostgresSchedules(database), group_commit, meter, ids)
    triggers = Triggers(PostgresTriggers(database), group_commit, meter, ids)
    loops: Loops = {
        "refusals": partial(sweeps.add_refusals, triggers, clock),
        "erasing": erasing.run,
        "off": partial(sweeps.cancel_where_off, settings, ledger, ids, clock),
        "on": partial(sweeps.start_turns_where_on, settings, ledger, clock),
        "relay": relay.run,
        "settings": settings.run,
        "retention": partial(sweeps.remove_expired, PostgresRetention(database), clock, periods, limits_of),
        "search": partial(sweeps.index_texts, PostgresSearchIndex(database), clock),
        "sizes": partial(sweeps.count_stored_bytes, settings, clock),
        "stats": partial(sweeps.collect_stats, PostgresLedgerStats(database, settings.slots), meter, clock),
    }

    def add_to(server: RpcServer) -> None:
        internal = partial(server.add, service_only=True)
        internal(add_LedgerServiceServicer_to_server, LedgerServicer(ledger, PostgresModels(database).pause_seconds))
        server.add_forwarded(add_ConversationServiceServicer_to_server, ConversationServicer(ledger, erasing, exports))
        server.add_forwarded(add_AgentServiceServicer_to_server, ListServicer(ledger))
        server.add_forwarded(add_OperatorServiceServicer_to_server, ListServicer(ledger))
        server.add(add_KeyServiceServicer_to_server, KeyServicer(keys))
        internal(add_KeySyncServiceServicer_to_server, KeySyncServicer(keys))
        server.add(add_SettingsServiceServicer_to_server, SettingsServicer(settings, PostgresTokens(database)))
        internal(add_ErasureServiceServicer_to_server, ErasureServicer(erasing))
        _add_resources(server, database, clock, settings, meter)
        _add_starters(server, schedules, triggers, limits_of)

    return JobStore(
        group_commit=group_commit,
        ledger=ledger,
        loops=parts.loops | loops,
        keys=keys,
        settings=settings,
        add_to=add_to,
    )


def _erasing(database: Database, bus: Bus, ports: Ports, group_commit: GroupCommit, ids: IdSource) -> Erasing:
    return Erasing(
        PostgresErasures(database),
        JetStreamErasures(bus) if bus.is_configured else None,
        group_commit,
        ports.conversations,
        ids,
        monotonic=ports.clock.monotonic,
    )


def _add_resources(
    server: RpcServer, database: Database, clock: Clock, settings: SettingsSnapshot, meter: PrometheusMeter
) -> None:
    internal = partial(server.add, service_only=True)
    agents = PostgresAgents(database)
    of_agent = partial(daily_tokens_max, agents)
    budgets = Budgets(PostgresTokens(database), settings.limits_of, of_agent, settings.refresh)
    internal(add_AgentLedgerServiceServicer_to_server, AgentLedgerServicer(agents, budgets, settings.limits_of))
    server.add_forwarded(add_AgentRegistryServiceServicer_to_server, AgentServicer(agents))
    server.add_forwarded(add_UsageServiceServicer_to_server, UsageServicer(PostgresUsage(database), clock))
    titles = PostgresTitles(database, budgets.of, settings.limits_of)
    internal(add_TitleServiceServicer_to_server, TitleServicer(titles))
    workflows = PostgresVersions(database, WORKFLOW)
    internal(add_WorkflowLedgerServiceServicer_to_server, WorkflowLedgerServicer(workflows))
    server.add_forwarded(add_WorkflowServiceServicer_to_server, WorkflowServicer(workflows))
    models = ModelServicer(PostgresModels(database), settings.limits_of, budgets, meter)
    internal(add_ModelServiceServicer_to_server, models)
    declarations = PostgresDeclarations(database)
    server.add_forwarded(add_DeclarationServiceServicer_to_server, DeclarationServicer(declarations))


def _add_starters(server: RpcServer, schedules: Schedules, triggers: Triggers, limits_of: LimitsOf) -> None:
    internal = partial(server.add, service_only=True)
    server.add_forwarded(add_ScheduleServiceServicer_to_server, ScheduleServicer(schedules))
    internal(add_ScheduleLedgerServiceServicer_to_server, ScheduleLedgerServicer(schedules, limits_of))
    server.add_forwarded(add_TriggerServiceServicer_to_server, TriggerServicer(triggers))
    internal(add_TriggerLedgerServiceServicer_to_server, TriggerLedgerServicer(triggers, limits_of))
