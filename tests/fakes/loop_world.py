"""One agent loop without processes: the real drive and worker with an in-memory ledger, registry and model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from pawl.agent_loop.loop.drive import Drive, DriveEnd
from pawl.agent_loop.loop.ports import Claim
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.fact import Decide, ToolResult
from pawl.agent_loop.loop.rules.run import RunFailure
from pawl.agent_loop.loop.rules.tool import Verdict
from pawl.agent_loop.loop.run_tasks import WorkerDependencies
from pawl.agent_loop.loop.worker import Worker, WorkerLimits
from pawl.chassis.ids import RunKey, WorkerId
from pawl.errors import LeaseLost, RunEnded
from pawl.values import ENDED, CallState, DecisionKind, Usage
from tests.fakes.agents import MemoryAgents
from tests.fakes.ledger import MemoryLedger
from tests.fakes.model import FakeModel, Script
from tests.fakes.registry import FakeRegistry
from tests.fakes.virtual_time import VirtualClock

LEASE_SECONDS = 10.0


@dataclass
class CountingMeter:
    left: list[str] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    held: int = 0

    def model_called(self, outcome: str, usage: Usage) -> None: ...

    def call_executed(self, outcome: str) -> None:
        self.executed.append(outcome)

    def runs_held(self, count: int) -> None:
        self.held = count

    def run_left(self, how: str) -> None:
        self.left.append(how)


class World:
    """The parts of one test; create it inside a virtual loop."""

    def __init__(
        self, verdicts: dict[str, Verdict], scripts: list[Script], *, seconds: float = 1.0, crashes_max: int = 3
    ) -> None:
        self.clock = VirtualClock()
        self.ledger = MemoryLedger(crashes_max=crashes_max)
        self.agents = MemoryAgents()
        self.registry = FakeRegistry(verdicts, seconds=seconds)
        self.model = FakeModel(scripts)
        self.meter = CountingMeter()
        self.dependencies = WorkerDependencies(
            ledger=self.ledger,
            agents=self.agents,
            registry=self.registry,
            model=self.model,
            clock=self.clock,
            ids=self.ledger.ids,
            random=lambda: 0.5,
            meter=self.meter,
            default_model="model",
        )

    async def claim(self, worker_id: str = "worker") -> Claim:
        while True:
            claims, _ = await self.ledger.claim(WorkerId(worker_id), runs_max=1, lease_seconds=LEASE_SECONDS)
            if claims:
                return next(iter(claims))
            await asyncio.sleep(1.0)

    async def drive(self, worker_id: str = "worker") -> DriveEnd:
        return await Drive(await self.claim(worker_id), self.dependencies).run()

    def worker(
        self,
        worker_id: str = "worker",
        new_drive: Callable[[Claim], Drive] | None = None,
        ending_drive: Callable[[Claim], Drive] | None = None,
        limits: WorkerLimits = WorkerLimits(),  # noqa: B008  # it is frozen
    ) -> Worker:
        def drive(claim: Claim, dependencies: WorkerDependencies, failure: RunFailure | None) -> Drive:
            own = new_drive if failure is None else ending_drive
            return own(claim) if own else Drive(claim, dependencies, failure)

        return Worker(WorkerId(worker_id), self.dependencies, limits, drive)

    async def respond(self, key: RunKey) -> None:
        for call in self.ledger.calls(key):
            await self._respond_to(key, call)

    async def finish(self, key: RunKey) -> None:
        for _ in range(50):
            if self.ledger.run(key).state in ENDED:
                return
            with contextlib.suppress(LeaseLost, RunEnded):
                await self.drive()
            await self.respond(key)
        raise AssertionError(f"the run does not end: {self.ledger.run(key)}")

    async def _respond_to(self, key: RunKey, call: Call) -> None:
        match call.state:
            case CallState.AWAITING_APPROVAL:
                await self.ledger.send(key, Decide(call_id=call.call_id, kind=DecisionKind.APPROVE))
            case CallState.ASKED:
                await self.ledger.send(key, Decide(call_id=call.call_id, kind=DecisionKind.ANSWER, answer="blue"))
            case CallState.OFFERED:
                result = CallResult(content_json=b'"shown"')
                await self.ledger.send(key, ToolResult(call_id=call.call_id, result=result))
            case _:
                pass
