"""All processes of one simulation, and the faults that affect them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RequestId, RunId, StoreId, UserId
from pawl.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    DependencyUnavailable,
    Internal,
    Overloaded,
    PawlError,
    Unavailable,
)
from pawl.job_store.ledger.rules.slots import SlotLimits
from tests.simulation import registry
from tests.simulation.chance import Chance
from tests.simulation.cluster import AgentLoop, JobStore
from tests.simulation.history import History
from tests.simulation.model import SimulatedModel
from tests.simulation.network import Broker, Network
from tests.simulation.process import Process
from tests.simulation.store import Tables

T = TypeVar("T")

CHAOS_SECONDS = 15.0
_PAUSE_SECONDS = 0.3
_STOP_SECONDS = 3.0
RETRIED = (Unavailable, DeadlineExceeded, Cancelled, Overloaded, Aborted, Internal)


@dataclass
class World:
    chance: Chance
    history: History
    tables: Tables = field(default_factory=Tables)
    agents: list[AgentLoop] = field(default_factory=list)
    job_stores: list[JobStore] = field(default_factory=list)
    registries: list[registry.Server] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    broker: Broker = field(init=False)
    journal: registry.Journal = field(init=False)
    model: SimulatedModel = field(init=False)
    slots: SlotLimits = field(init=False)
    # `approvals_required` of new agent-loops.
    approvals_required: int = 1
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.broker = Broker(self.chance)
        self.journal = registry.Journal(self.chance, self.history, progress_of=self._progress_of)
        self.model = SimulatedModel(self.chance, self.history)
        self.slots = SlotLimits(per_store=self.chance.stream("places").choice([1, 2, 20]), per_user=5)

    def _progress_of(self, run_id: str) -> int | None:
        rows = (row for key, row in self.tables.runs.items() if key.run_id == run_id)
        return next((row.last_seq for row in rows if not row.state.is_terminal), None)

    def start(self) -> None:
        draw = self.chance.stream("world")
        for _ in range(draw.choice([1, 1, 2])):
            self.start_job_store()
        self.start_registry()
        for _ in range(draw.choice([1, 2, 2, 3])):
            self.start_agent()

    def start_job_store(self) -> None:
        process = self._process("store")
        store = JobStore(process, self.tables, self.broker, chance=self.chance, history=self.history, slots=self.slots)
        self.job_stores.append(store)
        store.process.spawn(store.serve())

    def start_registry(self) -> None:
        self.registries.append(registry.Server(self._process("registry"), self.journal))

    def start_agent(self) -> None:
        process = self._process("agent")
        agent = AgentLoop(
            process,
            job_stores=self.job_stores,
            registries=self.registries,
            model=self.model,
            broker=self.broker,
            chance=self.chance,
            history=self.history,
            approvals_required=self.approvals_required,
        )
        self.agents.append(agent)
        process.spawn(agent.serve())

    def replace_agent(self, agent: AgentLoop) -> None:
        """Send SIGTERM to an agent-loop and start another. The old process releases its runs and exits."""
        self.history.tell(f"stop {agent.process.name}")
        agent.stop.set()
        self.start_agent()
        asyncio.get_running_loop().call_later(_STOP_SECONDS, self._gone, agent.process)

    def _gone(self, process: Process) -> None:
        self.history.tell(f"gone {process.name}")
        process.kill()

    def some_agent(self, draw: random.Random) -> AgentLoop:
        """Return an agent-loop as a load balancer would choose it, preferably one that is running."""
        alive = [agent for agent in self.agents if agent.process.alive]
        return draw.choice(alive or self.agents)

    async def insist(
        self, network: Network, draw: random.Random, what: str, work: Callable[[AgentLoop], Awaitable[T]]
    ) -> T:
        """Repeat a request to any agent-loop until one of them answers.

        Raises:
            PawlError: the error that an agent-loop returned.
        """
        while True:
            agent = self.some_agent(draw)
            try:
                return await network.call(agent.process, what, lambda agent=agent: work(agent))  # type: ignore[misc]
            except RETRIED:
                await asyncio.sleep(_PAUSE_SECONDS * (0.5 + draw.random()))

    def finish(self) -> None:
        for process in self.processes:
            process.finish()

    def _process(self, kind: str) -> Process:
        process = Process(f"{kind}-{next(self._numbers)}")
        self.processes.append(process)
        self.history.tell(f"start {process.name}")
        return process


class Member:
    """A user without a front end, who repeats requests until they are answered."""

    def __init__(self, world: World, store_id: StoreId, user_id: str, role: str = "member") -> None:
        self._world, self._store_id = world, store_id
        self._caller = Principal(store_id=store_id, user_id=UserId(user_id), roles=frozenset({role}))
        self._draw = world.chance.stream(user_id)
        self._network = Network(world.chance, world.history, user_id)

    async def _ask(self, what: str, work: Callable[[AgentLoop], Awaitable[Any]]) -> Any:
        """Return the answer, or None if the request was refused."""
        try:
            return await self._world.insist(self._network, self._draw, what, work)
        except PawlError as error:
            self._world.history.tell(f"{what} refused: {error.reason}")
            return None

    async def _cancel(self, run_id: RunId) -> None:
        request_id = RequestId(f"cancel-{run_id}")
        await self._ask("cancel", lambda agent: agent.clients.inbox.cancel(self._caller, request_id, run_id, ""))


class Trouble:
    def __init__(self, world: World) -> None:
        self._world = world
        self._draw = world.chance.stream("trouble")

    async def make(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + CHAOS_SECONDS
        while loop.time() < end:
            await asyncio.sleep(self._draw.expovariate(1 / 2.5))
            await self._one()
        self._stop_faults()

    async def _one(self) -> None:
        draw, strikes = self._draw, self._world.chance.strikes
        agent = draw.choice([agent for agent in self._world.agents if agent.process.alive])
        seconds = draw.choice([0.5, 2.0, 8.0, 15.0]) * (0.5 + draw.random())
        if strikes(draw, "agent-loop killed", 0.15):
            self._tell(f"kill {agent.process.name}")
            agent.process.kill()
            self._world.start_agent()
        if strikes(draw, "agent-loop frozen", 0.15):
            self._freeze(agent.process, seconds)
        if strikes(draw, "agent-loop stopped", 0.1) and agent.process.alive:
            self._world.replace_agent(agent)
        if strikes(draw, "job-store killed", 0.1):
            store = draw.choice([store for store in self._world.job_stores if store.process.alive])
            self._tell(f"kill {store.process.name}")
            store.process.kill()
            self._world.start_job_store()
        if strikes(draw, "job-store frozen", 0.1):
            store = draw.choice([store for store in self._world.job_stores if store.process.alive])
            self._freeze(store.process, seconds)
        if strikes(draw, "registry killed", 0.15):
            self._kill_registry()
        if strikes(draw, "bus away", 0.1) and not self._world.broker.absent:
            self._tell("bus away")
            self._world.broker.absent = True
            asyncio.get_running_loop().call_later(seconds, self._bus_back)

    def _freeze(self, process: Process, seconds: float) -> None:
        if not process.alive:
            return
        self._tell(f"freeze {process.name} for {seconds:.2f}")
        process.freeze()
        asyncio.get_running_loop().call_later(seconds, self._thaw, process)

    def _thaw(self, process: Process) -> None:
        if process.frozen:
            self._tell(f"thaw {process.name}")
            process.thaw()

    def _kill_registry(self) -> None:
        server = self._world.registries[-1]
        self._tell(f"kill {server.process.name}")
        server.process.kill()
        server.died_at = asyncio.get_running_loop().time()
        self._world.start_registry()

    def _bus_back(self) -> None:
        self._tell("bus back")
        self._world.broker.absent = False

    def _stop_faults(self) -> None:
        self._tell("peace")
        self._world.chance.calm = True
        self._world.broker.absent = False
        for process in self._world.processes:
            self._thaw(process)

    def _tell(self, line: str) -> None:
        self._world.history.tell(line)


_JUMPS_SECONDS = (-1000.0, -130.0, -20.0, 20.0, 130.0, 250.0, 1000.0)
_READ_ONLY_SECONDS = (0.5, 2.0, 5.0, 15.0)


class DatabaseTrouble:
    """Faults of the database server: clock jumps, and read-only periods after a failover.

    Causes them for a while, then leaves a working server. Its clock is not set back.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._server = world.tables.server
        self._draw = world.chance.stream("database trouble")
        # Adapters that do not recognise one of these errors treat it as an unexpected error.
        self._server.refusal = self._draw.choice([Internal, DependencyUnavailable])

    async def make(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + CHAOS_SECONDS
        while loop.time() < end:
            await asyncio.sleep(self._draw.expovariate(1 / 2.5))
            await self._one(end - loop.time())
        self._server.read_only = False

    async def _one(self, left: float) -> None:
        strikes, draw = self._world.chance.strikes, self._draw
        jump, seconds = draw.choice(_JUMPS_SECONDS), draw.choice(_READ_ONLY_SECONDS) * draw.random()
        if strikes(draw, "database clock jumped", 0.2):
            self._world.history.tell(f"database clock jumps by {jump:g}")
            self._server.ahead_seconds += jump
            self._world.history.set_back_seconds += max(0.0, -jump)
            self._world.history.jumps.append(asyncio.get_running_loop().time())
        if strikes(draw, "database read-only", 0.1):
            self._world.history.tell(f"database is read-only for {seconds:.2f}")
            self._server.read_only = True
            await asyncio.sleep(max(0.0, min(seconds, left)))
            self._server.read_only = False
