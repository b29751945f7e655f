"""Clients of Pawl that do runs: so many at once, or so many a second whatever becomes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc
from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.event.v1 import run_pb2

from bench.subjects import QUESTION
from services.chassis.status import from_rpc_error

_DETAILS_KEY: Final = "grpc-status-details-bin"
_DEADLINE_SECONDS: Final = 120.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Whose run it is. A deployment without API keys believes what the client says."""

    store: str = "local"
    user: str = "me"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What says so on a call."""
        return (("pawl-store", self.store), ("pawl-user", self.user))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a request for a run, in seconds of the monotonic clock.

    `began` is when it was due. `answered` is when StartRun was acknowledged or refused, and `ended` when the client
    knew that the run had completed; None if it did not wait, or was refused as a watcher. `refusal` is the reason of a
    refusal, and `untyped CODE` where the error carried none.
    """

    place: Place
    began: float
    answered: float
    ended: float | None = None
    refusal: str = ""

    @property
    def acknowledged_seconds(self) -> float:
        """How long the answer to StartRun took, counted from when it was due."""
        return self.answered - self.began


def reason(error: grpc.aio.AioRpcError) -> str:
    """Return what programs branch on in an error, or its code if it carries no reason."""
    if any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return from_rpc_error(error).reason
    return f"untyped {error.code().name}"


async def start(agents: AgentServiceStub, place: Place, due: float) -> tuple[Outcome, str]:
    """Ask for a run; returns what became of that, and the id of the run, empty if it was refused."""
    try:
        answer = await agents.StartRun(
            agent_pb2.StartRunRequest(text=QUESTION), metadata=place.metadata, timeout=_DEADLINE_SECONDS
        )
    except grpc.aio.AioRpcError as error:
        return Outcome(place=place, began=due, answered=time.monotonic(), refusal=reason(error)), ""
    return Outcome(place=place, began=due, answered=time.monotonic()), answer.run.run_id


async def play(agents: AgentServiceStub, place: Place, due: float) -> Outcome:
    """Ask for a run and watch it to its end.

    Raises:
        RuntimeError: it was accepted and did not complete.
    """
    outcome, run_id = await start(agents, place, due)
    if not run_id:
        return outcome
    state = run_pb2.RUN_STATE_UNSPECIFIED
    try:
        watch = agents.WatchRun(agent_pb2.WatchRunRequest(run_id=run_id), metadata=place.metadata)
        async for answer in watch:
            if answer.event.HasField("run_changed"):
                state = answer.event.run_changed.run.state
    except grpc.aio.AioRpcError as error:
        return Outcome(place=place, began=due, answered=outcome.answered, refusal=f"watch: {reason(error)}")
    if state != run_pb2.RUN_STATE_COMPLETED:
        raise RuntimeError(f"{run_id} ended as {run_pb2.RunState.Name(state)}")
    return Outcome(place=place, began=due, answered=outcome.answered, ended=time.monotonic())


async def at_once(number: int, seconds: float, work: Callable[[float], Awaitable[T]]) -> list[T]:
    """Do the work `number` times at once and again as soon as one is done; none begins after `seconds`."""
    found: list[T] = []
    until = time.monotonic() + seconds

    async def worker() -> None:
        while (now := time.monotonic()) < until:
            found.append(await work(now))

    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(worker())
    return found


async def at_rate(rate: float, seconds: float, work: Callable[[int, float], Awaitable[T]]) -> list[T]:
    """Begin the work `rate` times a second, however long each takes; `work` gets its number and when it was due.

    Returns when all are done. Where this process cannot keep the rate, the delay counts as time that the work took.
    """
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(int(rate * seconds)):
            due = began + number / rate
            # A sleep of nothing lets the others on, so that no burst starves those under way.
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(group.create_task(_call(work, number, due)))
    return [task.result() for task in tasks]


async def _call(work: Callable[[int, float], Awaitable[T]], number: int, due: float) -> T:
    return await work(number, due)


def refusals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return how many were refused for each reason."""
    found: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.refusal:
            found[outcome.refusal] = found.get(outcome.refusal, 0) + 1
    return found
