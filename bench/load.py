"""Clients of Pawl that do runs: a fixed number concurrently, or at a fixed rate regardless of the outcomes."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import grpc

from bench.subjects import START
from pawl.agent.v1 import agent_pb2, agent_pb2_grpc
from pawl.chassis.rpc.status import from_rpc_error
from pawl.event.v1 import run_pb2

_DETAILS_KEY: Final = "grpc-status-details-bin"
_DEADLINE_SECONDS: Final = 120.0
T = TypeVar("T")
Stub: TypeAlias = "agent_pb2_grpc.AgentServiceAsyncStub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The store and user of a run, which the client specifies when it uses a suite's local key."""

    store: str = "local"
    user: str = "me"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("pawl-store", self.store), ("pawl-user", self.user))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a request for a run. Times are seconds of the monotonic clock.

    `began` is when the request was due, and `answered` is when StartRun was acknowledged (`accepted`) or refused.
    `ended` is when the client noticed that the run had completed, or None if it did not wait or the run did not
    complete. `refusal` is the reason of a refusal, `untyped CODE` for an error without a reason, or `ended as STATE`
    for a run that failed.
    """

    place: Owner
    began: float
    answered: float
    accepted: bool
    ended: float | None = None
    refusal: str = ""

    @property
    def is_typed(self) -> bool:
        """True if the refusal has a reason that a program can act on. False for a failed run."""
        return self.refusal.removeprefix("watch: ").isupper()

    @property
    def acknowledged_seconds(self) -> float:
        """The time from when the request was due to the response of StartRun."""
        return self.answered - self.began


def reason(error: grpc.aio.AioRpcError) -> str:
    """Return the reason of an error, or its code if it has no reason."""
    if any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return from_rpc_error(error).reason
    return f"untyped {error.code().name}"


async def start(agents: Stub, place: Owner, due: float) -> tuple[Outcome, str]:
    """Request a run. Return the outcome and the id of the run, which is empty if the request was refused."""
    try:
        answer = await agents.StartRun(START, metadata=place.metadata, timeout=_DEADLINE_SECONDS)
    except grpc.aio.AioRpcError as error:
        return Outcome(place=place, began=due, answered=time.monotonic(), accepted=False, refusal=reason(error)), ""
    return Outcome(place=place, began=due, answered=time.monotonic(), accepted=True), answer.run.run_id


async def play(agents: Stub, place: Owner, due: float) -> Outcome:
    """Request a run and watch it to its end."""
    outcome, run_id = await start(agents, place, due)
    if not run_id:
        return outcome
    state = run_pb2.RUN_STATE_UNSPECIFIED
    try:
        watch = agents.WatchRun(agent_pb2.WatchRunRequest(run_id=run_id), metadata=place.metadata)
        async for answer in watch:
            for event in answer.events:
                if event.HasField("run_changed"):
                    state = event.run_changed.run.state
    except grpc.aio.AioRpcError as error:
        return replace(outcome, refusal=f"watch: {reason(error)}")
    if state != run_pb2.RUN_STATE_COMPLETED:
        return replace(outcome, refusal=f"ended as {run_pb2.RunState.Name(state)}")
    return replace(outcome, ended=time.monotonic())


async def at_once(
    number: int, work: Callable[[float], Awaitable[T]], *, seconds: float = math.inf, count: int = sys.maxsize
) -> list[T]:
    """Run `number` calls of `work` at a time, until `count` have been started or `seconds` have passed.

    `work` receives its start time. Return when all started calls are done.
    """
    found: list[T] = []
    numbers = iter(range(count))
    until = time.monotonic() + seconds

    async def worker() -> None:
        for _ in numbers:
            if (now := time.monotonic()) >= until:
                return
            found.append(await work(now))

    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(worker())
    return found


async def at_rate(rate: float, seconds: float, work: Callable[[int, float], Awaitable[T]]) -> list[T]:
    """Start `work` `rate` times per second, regardless of its duration. It receives its number and its due time.

    Return when all calls are done. If this process cannot sustain the rate, the delay counts as part of the work.
    """
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(int(rate * seconds)):
            due = began + number / rate
            # Sleep even for 0 seconds, so that a burst does not starve running work.
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(group.create_task(_call(work, number, due)))
    return [task.result() for task in tasks]


async def _call(work: Callable[[int, float], Awaitable[T]], number: int, due: float) -> T:
    return await work(number, due)


def refusals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return the number of refused or incomplete runs by reason."""
    return dict(Counter(outcome.refusal for outcome in outcomes if outcome.refusal))


def durations(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the seconds that each completed run took from its due time."""
    return [outcome.ended - outcome.began for outcome in outcomes if outcome.ended is not None]


async def warm_up(agents: Stub, place: Callable[[int], Owner]) -> None:
    """Do some runs with low concurrency first, so that the costs of first use are not measured."""
    turns = iter(range(sys.maxsize))
    found = await at_once(8, lambda due: play(agents, place(next(turns)), due), count=64)
    if refused := refusals(found):
        raise RuntimeError(f"runs did not complete: {refused}")


async def peak(agents: Stub, place: Callable[[int], Owner], *, numbers: Sequence[int], seconds: float) -> float:
    """Return the highest rate of completed runs at any of these concurrency levels, each measured for `seconds`.

    Runs that end in the first fifth of this time, or after it, are not counted. `place` returns the owner of a run.
    """
    rates = []
    for number in numbers:
        began = time.monotonic()
        turns = iter(range(sys.maxsize))
        found = await at_once(number, lambda due: play(agents, place(next(turns)), due), seconds=seconds)  # noqa: B023
        counted = [o for o in found if o.ended is not None and seconds / 5 <= o.ended - began < seconds]
        rates.append(len(counted) / (seconds * 4 / 5))
    return max(rates)
