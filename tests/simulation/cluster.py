"""The services as simulated processes, wired like their `__main__` modules.

`kept_histories_match` checks that a history continued from a cached prefix equals the whole history at that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.live import BusEvents
from pawl.agent_loop.api.rounds import Rebuilding
from pawl.agent_loop.api.session_stream import SessionTimes
from pawl.agent_loop.loop.histories import LoadedHistory, history_of
from pawl.agent_loop.loop.ledger import WorkerLedgerClient
from pawl.agent_loop.loop.model_call import request_of
from pawl.agent_loop.loop.ports import Claim, Loaded
from pawl.agent_loop.loop.rules.history import ReasoningEcho
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.options import RunDefaults
from pawl.agent_loop.loop.run_tasks import WorkerDependencies
from pawl.agent_loop.loop.worker import Worker, WorkerLimits
from pawl.agent_loop.model.client import body_of
from pawl.agent_loop.schedules.rpc import ScheduleServicer as AgentLoopSchedules
from pawl.agent_loop.schedules.starting import Starting
from pawl.agent_loop.triggers.rpc import TriggerServicer as AgentLoopTriggers
from pawl.agent_loop.wiring import ClientSide, ClientTimes
from pawl.agent_loop.workflows.reading import Graphs
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import IdSource, WorkerId
from pawl.errors import TooLarge
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job.v1.schedules_pb2_grpc import ScheduleLedgerServiceStub
from pawl.job.v1.triggers_pb2_grpc import TriggerLedgerServiceStub
from pawl.job_store.ledger import reading
from pawl.job_store.ledger.announcer import NatsAnnouncer
from pawl.job_store.ledger.ports import Limits as JobStoreLimits
from pawl.job_store.ledger.rpc import parts
from pawl.job_store.ledger.rules import inbox
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.schedules.rpc import ScheduleLedgerServicer, ScheduleServicer
from pawl.job_store.schedules.schedules import Schedules
from pawl.job_store.triggers.rpc import TriggerLedgerServicer, TriggerServicer
from pawl.job_store.triggers.triggers import Triggers
from pawl.job_store.wiring import wire
from pawl.server.process.service import Background
from pawl.tool_registry.ledger import LedgerReads
from tests.fakes.loop_world import MemoryAgents
from tests.fakes.manual_clock import VirtualClock
from tests.fakes.workflows import MemoryWorkflows
from tests.simulation import registry
from tests.simulation.chance import Chance
from tests.simulation.history import History
from tests.simulation.job_store import Channel, Unmetered, answer, ports_on
from tests.simulation.model import SimulatedModel
from tests.simulation.network import Broker, Network, SimulatedBus
from tests.simulation.process import Process
from tests.simulation.schedules import MemorySchedules, MemoryTriggers, schedules_are_played, triggers_are_played
from tests.simulation.store import Database, Tables


class CheckedLedger(WorkerLedgerClient):
    def __init__(self, channel: Any, monotonic: Callable[[], float], record: History) -> None:
        super().__init__(channel, monotonic)
        self._record = record

    async def load(self, claim: Claim) -> Loaded:
        loaded = await super().load(claim)
        # The network may have duplicated the request.
        wholes = self._record.whole_loads.pop((claim.key.run_id, claim.epoch), [])
        found = LoadedHistory(messages=loaded.state.messages, calls=dict(loaded.state.calls))
        if found not in map(_history, wholes):
            self._record.violation("kept_histories_match", f"{claim.key.run_id} epoch {claim.epoch}")
        return loaded


def _history(loaded: reading.Loaded) -> LoadedHistory:
    whole = pb.LoadRunResponse()
    for part in parts.of_run(loaded):
        whole.MergeFrom(part)
    return history_of(whole)


# The definitions that all simulated stores have.
WORKFLOWS = MemoryWorkflows()
LIMITS = Limits(
    run_timeout_seconds=200.0,
    round_timeout_seconds=60.0,
    tool_timeout_seconds=5.0,
    approval_expiry_seconds=30.0,
    offer_deadline_seconds=25.0,
    answer_timeout_seconds=40.0,
    model_headers_timeout_seconds=10.0,
    model_idle_timeout_seconds=10.0,
    top_up_timeout_seconds=50.0,
)
INBOX = inbox.Limits(commands_max=8, bytes_max=16 * 1024)
STEP_BYTES_MAX = 6 * 1024
# Like gRPC, refuse larger messages. All three limits are smaller than in the product.
MESSAGE_BYTES_MAX = 42 * 1024

_TIMES = ClientTimes(
    sessions=SessionTimes(offer_lease_seconds=6.0, heartbeat_seconds=4.0, silence_max_seconds=12.0),
    poll_seconds=2.0,
    connected_poll_seconds=4.0,
)
_QUEUE_MAX = 3
_STORE_QUEUE_MAX = 6
_CRASHES_MAX = 3


class JobStore:
    def __init__(
        self,
        process: Process,
        tables: Tables,
        broker: Broker,
        *,
        chance: Chance,
        history: History,
        slots: SlotLimits,
    ) -> None:
        self.process = process
        self._limits = JobStoreLimits(
            crashes_max=_CRASHES_MAX, queue_max=_QUEUE_MAX, store_queue_max=_STORE_QUEUE_MAX, slots=slots, inbox=INBOX
        )
        self._database = Database(tables, chance, history, process.name)
        self._bus = SimulatedBus(broker, process)
        self._ids = IdSource(VirtualClock(), chance.stream("ids", process.name).getrandbits)
        self._servicers: Sequence[object] = ()
        self._of_schedules = MemorySchedules(Database(tables, chance, history, f"schedules of {process.name}"))
        self._of_triggers = MemoryTriggers(Database(tables, chance, history, f"triggers of {process.name}"))
        self._random_bytes = chance.stream("secrets", process.name).randbytes

    async def serve(self) -> None:
        announcer = NatsAnnouncer(self._bus)  # type: ignore[arg-type]  # the simulated bus has the methods that are used
        ports = ports_on(self._database, self._limits, ids=self._ids, announcer=announcer)
        parts = wire(ports, lambda _: self._limits, crashes_max=_CRASHES_MAX)
        async with parts.group_commit, Background() as background:
            for name, loop in parts.loops.items():
                background.start(name, loop)
            schedules = Schedules(self._of_schedules, parts.group_commit, Unmetered(), self._ids)
            of_events = Triggers(
                self._of_triggers, parts.group_commit, Unmetered(), self._ids, random_bytes=self._random_bytes
            )
            starters = (
                *(ScheduleServicer(schedules), ScheduleLedgerServicer(schedules, lambda _: self._limits)),
                *(TriggerServicer(of_events), TriggerLedgerServicer(of_events, lambda _: self._limits)),
            )
            self._servicers = (*parts.servicers, *starters)
            await asyncio.Event().wait()

    async def answer(self, method: str, request: Any, user: Principal | None) -> list[Any]:
        while not self._servicers:
            await asyncio.sleep(0.001)
        return await answer(self._servicers, method, request, user)


class Replicas:
    def __init__(self, network: Network, replicas: Sequence[JobStore], pick: Callable[[int], int]) -> None:
        self._network = network
        self._replicas = replicas
        self._pick = pick

    async def call(self, method: str, request: Any, user: Principal | None) -> list[Any]:
        alive = [replica for replica in self._replicas if replica.process.alive] or self._replicas
        replica = alive[self._pick(len(alive))]
        if request.ByteSize() > MESSAGE_BYTES_MAX:
            raise TooLarge(f"{method} of {request.ByteSize()} bytes")
        return await self._network.call(replica.process, method, lambda: replica.answer(method, request, user))


class AgentLoop:
    def __init__(
        self,
        process: Process,
        *,
        job_stores: Sequence[JobStore],
        registries: Sequence[registry.Server],
        model: SimulatedModel,
        broker: Broker,
        chance: Chance,
        history: History,
        approvals_required: int,
    ) -> None:
        self.process, self.history = process, history
        draw = chance.stream("agent", process.name)
        clock, ids = VirtualClock(), IdSource(VirtualClock(), chance.stream("ids", process.name).getrandbits)
        network = Network(chance, history, process.name)
        channel: Any = Channel(Replicas(network, job_stores, draw.randrange).call)
        registry_client = registry.Client(network, registries)
        bus: Any = SimulatedBus(broker, process)
        dependencies = WorkerDependencies(
            ledger=CheckedLedger(channel, clock.monotonic, history),
            agents=MemoryAgents(),
            graphs=Graphs(WORKFLOWS),
            registry=registry_client,
            model=model,
            clock=clock,
            ids=ids,
            random=draw.random,
            meter=Unmetered(),
            default_model="model",
            step_bytes_max=STEP_BYTES_MAX,
            approvals_required=approvals_required,
        )
        limits = WorkerLimits(lease_seconds=6.0, renew_seconds=2.0, poll_seconds=1.5)
        self.worker = Worker(WorkerId(ids.new("wrk")), dependencies, limits)
        history.approvals_required[self.worker.worker_id] = approvals_required
        self.ledger = PublicLedger(channel, self.worker.wake, self.worker.background_steps)
        self.reads = LedgerReads(channel)
        self.clients = ClientSide(
            ledger=self.ledger,
            live=BusEvents(bus),
            agents=MemoryAgents(),
            registry=registry_client,
            clock=clock,
            ids=ids,
            defaults=RunDefaults(model="model", limits=LIMITS, approvals_required=approvals_required),
            rebuilding=Rebuilding(partial(request_of, default_model="model", echo=ReasoningEcho.AUTO), body_of),
            times=_TIMES,
        )
        self._add_starters(chance, history, job_stores)
        self._fires = schedules_are_played(chance)
        self._is_triggered = triggers_are_played(chance)
        self._bus = bus
        self.stop = asyncio.Event()

    def _add_starters(self, chance: Chance, history: History, job_stores: Sequence[JobStore]) -> None:
        name, clock = self.process.name, VirtualClock()
        # A separate network, so that it does not change the random stream of seeds without triggers and schedules.
        network = Network(chance, history, f"schedules of {name}")
        draw = chance.stream("schedules", name)
        channel: Any = Channel(Replicas(network, job_stores, draw.randrange).call)
        self.forward_of_schedules = PublicLedger(channel).forward
        self.schedules = AgentLoopSchedules(
            ScheduleLedgerServiceStub(channel),
            starting=Starting(self.clients.messages, self.clients.workflow_starting, lambda _: False),
            clock=clock,
            forward=self.clients.forward,
        )
        channel = Channel(Replicas(Network(chance, history, f"triggers of {name}"), job_stores, draw.randrange).call)
        self.forward_of_triggers = PublicLedger(channel).forward
        self.triggers = AgentLoopTriggers(
            TriggerLedgerServiceStub(channel),
            starting=Starting(self.clients.messages, self.clients.workflow_starting, lambda _: False),
            clock=clock,
            ids=IdSource(clock, chance.stream("event ids", name).getrandbits),
            forward=self.clients.forward,
        )

    async def serve(self) -> None:
        """Serve until `stop` is set, then release the runs."""
        worker = self.worker
        await worker.listen(self._bus)
        async with self.clients.watches, Background() as background:
            background.start("claims", worker.claim_forever)
            background.start("leases", worker.renew_forever)
            background.start("fence", worker.fence_forever)
            if self._fires:
                background.start("schedules", self.schedules.fire_forever)
            if self._is_triggered:
                background.start("triggers", self.triggers.fire_forever)
            await self.stop.wait()
            await worker.hand_over()
