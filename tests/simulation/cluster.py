"""The suite as processes of a simulation, put together as their `__main__` modules do it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pawl.agent_loop.adapters.live import BusEvents
from pawl.agent_loop.adapters.public_ledger import PublicLedger
from pawl.agent_loop.adapters.schedule_ledger import ScheduleLedgerClient
from pawl.agent_loop.adapters.trigger_ledger import TriggerLedgerClient
from pawl.agent_loop.adapters.wakeups import BusWakeups
from pawl.agent_loop.adapters.worker_ledger import WorkerLedgerClient
from pawl.agent_loop.app.public_values import MailboxView, MailPlace
from pawl.agent_loop.app.run_tasks import WorkerDependencies
from pawl.agent_loop.app.schedules import Schedules as AgentLoopSchedules
from pawl.agent_loop.app.session_stream import SessionTimes
from pawl.agent_loop.app.starting import Starting
from pawl.agent_loop.app.triggers import Triggers as AgentLoopTriggers
from pawl.agent_loop.app.worker import Worker, WorkerLimits
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.options import RunDefaults
from pawl.agent_loop.wiring import ClientSide, ClientTimes
from pawl.chassis.auth import Principal
from pawl.chassis.ids import IdSource, WorkerId
from pawl.chassis.lifecycle import Background
from pawl.errors import MailboxUnreachable, TooLarge
from pawl.job_store.adapters.announcer import NatsAnnouncer
from pawl.job_store.app.ports import Limits as JobStoreLimits
from pawl.job_store.app.schedules import Schedules
from pawl.job_store.app.triggers import Triggers
from pawl.job_store.domain import inbox
from pawl.job_store.domain.places import PlaceLimits
from pawl.job_store.rpc.schedule_servicer import ScheduleLedgerServicer
from pawl.job_store.rpc.servicer import LedgerServicer
from pawl.job_store.rpc.trigger_servicer import TriggerLedgerServicer
from pawl.job_store.wiring import wire
from tests.fakes.agents import MemoryAgents
from tests.fakes.checker import FakeChecker
from tests.fakes.virtual_time import VirtualClock
from tests.simulation import registry, triggers
from tests.simulation.bus import Broker, SimulatedBus
from tests.simulation.chance import Chance
from tests.simulation.history import History
from tests.simulation.job_store import Channel, Unmetered, answer, ports_on
from tests.simulation.model import SimulatedModel
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.schedules import MemorySchedules, are_played
from tests.simulation.store import Database, Tables
from tests.simulation.triggers import MemoryTriggers

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
MESSAGE_BYTES_MAX = 42 * 1024
"""What is larger is refused by the server, as by gRPC. All three are as much smaller than in the product."""

_TIMES = ClientTimes(
    sessions=SessionTimes(offer_lease_seconds=6.0, heartbeat_seconds=4.0, silence_max_seconds=12.0),
    poll_seconds=2.0,
    connected_poll_seconds=4.0,
)
_QUEUE_MAX = 3
_STORE_QUEUE_MAX = 6
_CRASHES_MAX = 3


class NoMailboxes:
    """See `starting_ports.MailboxReader`: there is none."""

    async def read_mailbox(
        self, caller: Principal, mailbox: object, place: MailPlace, *, mails_max: int, documents_prefix: str = ""
    ) -> MailboxView:
        raise MailboxUnreachable("there is no mailbox")


class JobStore:
    """One process of job-store."""

    def __init__(
        self,
        process: Process,
        tables: Tables,
        broker: Broker,
        *,
        chance: Chance,
        history: History,
        places: PlaceLimits,
    ) -> None:
        self.process = process
        self._limits = JobStoreLimits(
            crashes_max=_CRASHES_MAX, queue_max=_QUEUE_MAX, store_queue_max=_STORE_QUEUE_MAX, places=places, inbox=INBOX
        )
        self._database = Database(tables, chance, history, process.name)
        self._bus = SimulatedBus(broker, process)
        self._ids = IdSource(VirtualClock(), chance.stream("ids", process.name).getrandbits)
        self._servicer: LedgerServicer | None = None
        self._schedules: ScheduleLedgerServicer | None = None
        self._triggers: TriggerLedgerServicer | None = None
        self._of_schedules = MemorySchedules(Database(tables, chance, history, f"schedules of {process.name}"))
        self._of_triggers = MemoryTriggers(Database(tables, chance, history, f"triggers of {process.name}"))
        self._random_bytes = chance.stream("secrets", process.name).randbytes

    async def serve(self) -> None:
        """Serve until the process ends."""
        announcer = NatsAnnouncer(self._bus)  # type: ignore[arg-type]  # the part of a bus that it uses
        ports = ports_on(self._database, self._limits, ids=self._ids, announcer=announcer)
        parts = wire(ports, self._limits)
        async with parts.group_commit, Background() as background:
            for name, loop in parts.loops.items():
                background.start(name, loop)
            schedules = Schedules(self._of_schedules, parts.group_commit, Unmetered(), self._ids)
            self._schedules = ScheduleLedgerServicer(schedules, self._limits)
            of_events = Triggers(
                self._of_triggers, parts.group_commit, Unmetered(), self._ids, random_bytes=self._random_bytes
            )
            self._triggers = TriggerLedgerServicer(of_events, self._limits)
            self._servicer = parts.servicer
            await asyncio.Event().wait()

    async def answer(self, method: str, request: Any) -> list[Any]:
        """Serve one request; returns all responses."""
        while self._servicer is None:
            await asyncio.sleep(0.001)
        servicers = (self._servicer, self._schedules, self._triggers)
        return await answer(next(each for each in servicers if hasattr(each, method)), method, request)


class Replicas:
    """The way to whichever job-store there is."""

    def __init__(self, network: Network, replicas: Sequence[JobStore], pick: Callable[[int], int]) -> None:
        self._network = network
        self._replicas = replicas
        self._pick = pick

    async def call(self, method: str, request: Any) -> list[Any]:
        alive = [replica for replica in self._replicas if replica.process.alive] or self._replicas
        replica = alive[self._pick(len(alive))]
        if request.ByteSize() > MESSAGE_BYTES_MAX:
            raise TooLarge(f"{method} of {request.ByteSize()} bytes")
        return await self._network.call(replica.process, method, lambda: replica.answer(method, request))


class AgentLoop:
    """One process of agent-loop: its worker, and what serves clients."""

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
        people_wanted: int,
    ) -> None:
        self.process = process
        self.history = history
        draw = chance.stream("agent", process.name)
        clock, ids = VirtualClock(), IdSource(VirtualClock(), chance.stream("ids", process.name).getrandbits)
        network = Network(chance, history, process.name)
        channel: Any = Channel(Replicas(network, job_stores, draw.randrange).call)
        registry_client = registry.Client(network, registries)
        bus: Any = SimulatedBus(broker, process)
        dependencies = WorkerDependencies(
            ledger=WorkerLedgerClient(channel),
            agents=MemoryAgents(),
            registry=registry_client,
            model=model,
            clock=clock,
            ids=ids,
            random=draw.random,
            meter=Unmetered(),
            default_model="model",
            step_bytes_max=STEP_BYTES_MAX,
            approvals_required=people_wanted,
        )
        limits = WorkerLimits(lease_seconds=6.0, renew_seconds=2.0, poll_seconds=1.5)
        self.worker = Worker(WorkerId(ids.new("wrk")), dependencies, limits)
        history.people_wanted[self.worker.worker_id] = people_wanted
        self.ledger = PublicLedger(channel, self.worker.wake)
        self.clients = ClientSide(
            ledger=self.ledger,
            live=BusEvents(bus),
            agents=MemoryAgents(),
            checker=registry_client,
            tools=FakeChecker(),
            documents=FakeChecker(),
            clock=clock,
            ids=ids,
            defaults=RunDefaults(model="model", limits=LIMITS, approvals_required=people_wanted),
            times=_TIMES,
        )
        # They have a network of their own, so that seeds without them play as if there were none.
        network = Network(chance, history, f"schedules of {process.name}")
        draw = chance.stream("schedules", process.name)
        self.schedules = AgentLoopSchedules(
            ledger=ScheduleLedgerClient(Channel(Replicas(network, job_stores, draw.randrange).call)),  # type: ignore[arg-type]  # as above
            starting=Starting(self.clients.messages, lambda _: False),
            clock=clock,
        )
        network = Network(chance, history, f"triggers of {process.name}")
        self.triggers = AgentLoopTriggers(
            ledger=TriggerLedgerClient(Channel(Replicas(network, job_stores, draw.randrange).call)),  # type: ignore[arg-type]  # as above
            reader=NoMailboxes(),
            starting=Starting(self.clients.messages, lambda _: False),
            clock=clock,
            ids=IdSource(VirtualClock(), chance.stream("event ids", process.name).getrandbits),
        )
        self._fires = are_played(chance)
        self._is_triggered = triggers.are_played(chance)
        self._wakeups = BusWakeups(bus)
        self.stop = asyncio.Event()

    async def serve(self) -> None:
        """Serve until `stop`, then hand the runs over."""
        worker = self.worker
        await worker.listen(self._wakeups)
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
