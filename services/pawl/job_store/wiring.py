"""The job store put together: ports in, its ledger, its servicer and its loops out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from pawl.agent.v1.agent_pb2_grpc import add_AgentServiceServicer_to_server
from pawl.agent.v1.agents_pb2_grpc import add_AgentRegistryServiceServicer_to_server
from pawl.agent.v1.conversation_pb2_grpc import add_ConversationServiceServicer_to_server
from pawl.agent.v1.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from pawl.agent.v1.schedule_pb2_grpc import add_ScheduleServiceServicer_to_server
from pawl.agent.v1.trigger_pb2_grpc import add_TriggerServiceServicer_to_server
from pawl.chassis.bus.connection import Bus
from pawl.chassis.db.database import Database
from pawl.chassis.ids import IdSource
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.metrics import Metrics
from pawl.chassis.rpc.server import RpcServer
from pawl.identity.v1.key_pb2_grpc import add_KeyServiceServicer_to_server
from pawl.identity.v1.key_sync_pb2_grpc import add_KeySyncServiceServicer_to_server
from pawl.job.v1.agents_pb2_grpc import add_AgentLedgerServiceServicer_to_server
from pawl.job.v1.erasure_pb2_grpc import add_ErasureServiceServicer_to_server
from pawl.job.v1.ledger_pb2_grpc import add_LedgerServiceServicer_to_server
from pawl.job.v1.schedules_pb2_grpc import add_ScheduleLedgerServiceServicer_to_server
from pawl.job.v1.titles_pb2_grpc import add_TitleServiceServicer_to_server
from pawl.job.v1.triggers_pb2_grpc import add_TriggerLedgerServiceServicer_to_server
from pawl.job_store import sweeps
from pawl.job_store.agents.agents import Agents
from pawl.job_store.agents.rpc import AgentLedgerServicer, AgentServicer, daily_tokens_max
from pawl.job_store.agents.store import PostgresAgents
from pawl.job_store.conversations.rpc import ConversationServicer
from pawl.job_store.conversations.store.conversations import PostgresConversations
from pawl.job_store.conversations.store.search_index import PostgresSearchIndex
from pawl.job_store.conversations.store.titles import PostgresTitles
from pawl.job_store.conversations.title_rpc import TitleServicer, said
from pawl.job_store.erasure.erasing import Erasing
from pawl.job_store.erasure.log import JetStreamErasures
from pawl.job_store.erasure.rpc import ErasureServicer, call_kind
from pawl.job_store.erasure.store.erasures import PostgresErasures
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.keys.keys import Keys
from pawl.job_store.keys.rpc import KeyServicer, KeySyncServicer
from pawl.job_store.keys.store import PostgresKeyRepository
from pawl.job_store.ledger.announcer import NatsAnnouncer
from pawl.job_store.ledger.group_commit import GroupCommit
from pawl.job_store.ledger.ledger import Ledger
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.ports import Limits, Ports
from pawl.job_store.ledger.rpc.events import encode_event
from pawl.job_store.ledger.rpc.messages import LOST, head_of, text_of, usage_of
from pawl.job_store.ledger.rpc.operations import CANCEL
from pawl.job_store.ledger.rpc.servicer import LedgerServicer, ListServicer
from pawl.job_store.ledger.store.attention import PostgresAttentionRepository
from pawl.job_store.ledger.store.journal import PostgresJournal
from pawl.job_store.ledger.store.leases import PostgresLeases
from pawl.job_store.ledger.store.reads import PostgresReads
from pawl.job_store.ledger.store.upkeep import PostgresLedgerStats, PostgresOfferRepository
from pawl.job_store.ledger.store.usage import PostgresUsage
from pawl.job_store.lifecycle.store import PostgresOutbox
from pawl.job_store.lifecycle.stream import JetStreamLifecycle
from pawl.job_store.schedules.rpc import ScheduleLedgerServicer, ScheduleServicer
from pawl.job_store.schedules.schedules import Schedules
from pawl.job_store.schedules.store import PostgresSchedules
from pawl.job_store.sweeps import ClockSweep, QuarantineSweep, Relay, RetentionPeriods, RetentionSweep
from pawl.job_store.triggers.rpc import TriggerLedgerServicer, TriggerServicer
from pawl.job_store.triggers.store import PostgresTriggers
from pawl.job_store.triggers.triggers import Triggers


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """The outside of what keeps a database small and its subscribers informed."""

    outbox: PostgresOutbox
    stream: JetStreamLifecycle
    retention: PostgresRetention
    search: PostgresSearchIndex
    stats: PostgresLedgerStats
    periods: RetentionPeriods
    schedules: PostgresSchedules
    triggers: PostgresTriggers
    erasures: PostgresErasures
    erasure_log: JetStreamErasures | None
    """None without a NATS."""
    ids: IdSource


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStore:
    """A job store that is not running yet: enter `group_commit`, start `loops`, add the servicers to a server."""

    group_commit: GroupCommit
    ledger: Ledger
    servicer: LedgerServicer
    conversations: ConversationServicer
    lists: ListServicer
    keys: Keys | None
    """None for one of runs alone."""
    agents: Agents | None
    """As `keys`."""
    erasing: Erasing | None
    """None without upkeep."""
    schedules: Schedules | None
    """As `erasing`."""
    triggers: Triggers | None
    """As `erasing`."""
    loops: Mapping[str, Callable[[], Awaitable[None]]]
    titles: PostgresTitles | None = None
    """As `keys`."""

    @property
    def servicers(self) -> tuple[object, ...]:
        """What serves runs and conversations."""
        return self.conversations, self.lists, self.servicer

    def add_to(self, server: RpcServer) -> None:
        """Have a server answer for it."""
        server.add(add_LedgerServiceServicer_to_server, self.servicer, service_only=True)
        server.add_forwarded(add_ConversationServiceServicer_to_server, self.conversations)
        server.add_forwarded(add_AgentServiceServicer_to_server, self.lists)
        server.add_forwarded(add_OperatorServiceServicer_to_server, self.lists)
        if self.keys is not None:
            server.add(add_KeyServiceServicer_to_server, KeyServicer(self.keys))
            server.add(add_KeySyncServiceServicer_to_server, KeySyncServicer(self.keys), service_only=True)
        if self.agents is not None:
            server.add(add_AgentLedgerServiceServicer_to_server, AgentLedgerServicer(self.agents), service_only=True)
            server.add_forwarded(add_AgentRegistryServiceServicer_to_server, AgentServicer(self.agents))
        if self.titles is not None:
            server.add(add_TitleServiceServicer_to_server, TitleServicer(self.titles), service_only=True)
        if self.erasing is not None:
            server.add(add_ErasureServiceServicer_to_server, ErasureServicer(self.erasing), service_only=True)
        if self.schedules is not None:
            server.add_forwarded(add_ScheduleServiceServicer_to_server, ScheduleServicer(self.schedules))
            servicer = ScheduleLedgerServicer(self.schedules, self.ledger.limits)
            server.add(add_ScheduleLedgerServiceServicer_to_server, servicer, service_only=True)
        if self.triggers is not None:
            server.add_forwarded(add_TriggerServiceServicer_to_server, TriggerServicer(self.triggers))
            events = TriggerLedgerServicer(self.triggers, self.ledger.limits)
            server.add(add_TriggerLedgerServiceServicer_to_server, events, service_only=True)


def wire(
    ports: Ports,
    limits: Limits,
    upkeep: Upkeep | None = None,
    keys: Keys | None = None,
    agents: Agents | None = None,
    *,
    titles: PostgresTitles | None = None,
) -> JobStore:
    """Return a job store over these ports; without `upkeep` its loops leave the database as it is."""
    relay = Relay(upkeep.outbox, upkeep.stream, ports.meter) if upkeep else None
    group_commit = GroupCommit(
        ports.journal,
        ports.announcer,
        ports.meter,
        monotonic=ports.clock.monotonic,
        lifecycle_written=relay.wake if relay else lambda: None,
    )
    ledger = Ledger(ports, group_commit, limits, head_of, lost=LOST)
    loops: dict[str, Callable[[], Awaitable[None]]] = {
        "offers": partial(sweeps.offer_again, ledger, ports.clock),
        "clock": ClockSweep(ports.due_times, ports.clock).run,
        "quarantine": QuarantineSweep(ledger, ports.meter, ports.clock).run,
    }
    erasing = schedules = triggers = None
    if relay and upkeep:
        erasing = Erasing(
            upkeep.erasures,
            upkeep.erasure_log,
            group_commit,
            ports.conversations,
            upkeep.ids,
            monotonic=ports.clock.monotonic,
            cancel=CANCEL,
        )
        schedules = Schedules(upkeep.schedules, group_commit, ports.meter, upkeep.ids)
        triggers = Triggers(upkeep.triggers, group_commit, ports.meter, upkeep.ids)
        loops["refusals"] = partial(sweeps.add_refusals, triggers, ports.clock)
        loops["erasing"] = erasing.run
        loops["relay"] = relay.run
        loops["retention"] = RetentionSweep(upkeep.retention, ports.clock, upkeep.periods).run
        loops["search"] = partial(sweeps.take_in_texts, upkeep.search, ports.clock)
        loops["stats"] = partial(sweeps.collect_stats, upkeep.stats, ports.meter, ports.clock)
    return JobStore(
        group_commit=group_commit,
        ledger=ledger,
        servicer=LedgerServicer(ledger),
        conversations=ConversationServicer(ledger, erasing),
        lists=ListServicer(ledger),
        keys=keys,
        agents=agents,
        erasing=erasing,
        schedules=schedules,
        triggers=triggers,
        loops=loops,
        titles=titles,
    )


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
) -> JobStore:
    """Return the job store on PostgreSQL and NATS. See `PostgresJournal` for `keeps_lifecycle`."""
    leases = PostgresLeases(database, limits.places, crashes_max=limits.crashes_max)
    ports = Ports(
        journal=PostgresJournal(database, ids, encode_event, usage_of, keeps_lifecycle=keeps_lifecycle),
        leases=leases,
        due_times=leases,
        reads=PostgresReads(database),
        conversations=PostgresConversations(database),
        offer_repository=PostgresOfferRepository(database),
        attention_repository=PostgresAttentionRepository(database),
        announcer=NatsAnnouncer(bus),
        meter=PrometheusMeter(metrics),
        clock=clock,
    )
    upkeep = Upkeep(
        outbox=PostgresOutbox(database),
        stream=JetStreamLifecycle(bus),
        retention=PostgresRetention(database),
        search=PostgresSearchIndex(database, text_of),
        stats=PostgresLedgerStats(database, limits.places),
        periods=periods,
        schedules=PostgresSchedules(database),
        triggers=PostgresTriggers(database),
        erasures=PostgresErasures(database, call_kind),
        erasure_log=JetStreamErasures(bus) if bus.is_configured else None,
        ids=ids,
    )
    keys = Keys(PostgresKeyRepository(database), clock, ids)
    agents = Agents(PostgresAgents(database), PostgresUsage(database), daily_tokens_max)
    return wire(ports, limits, upkeep, keys, agents, titles=PostgresTitles(database, said, agents.quota))
