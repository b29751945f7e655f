"""Phases with quiet between them: after each, everything is up again and users are being answered."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence

from tests.chaos.faults import PHASES, Phase
from tests.chaos.history import Fault, Outcome
from tests.chaos.world import REPLICAS, SERVICES, World
from tests.poll import until

_ANSWERED_MIN = 5


def named(names: Sequence[str]) -> list[Phase]:
    """Return the phases of these names, in this order."""
    known = {phase.name: phase for phase in PHASES}
    if missing := [name for name in names if name not in known]:
        raise SystemExit(f"there is no phase {', '.join(missing)}; there are: {', '.join(known)}")
    return [known[name] for name in names]


def forever(seed: int) -> Iterator[Phase]:
    """Give all phases in an order by chance, and then again in another."""
    draw = random.Random(seed)
    for _ in itertools.count():
        yield from draw.sample(PHASES, len(PHASES))


async def trouble(world: World, phase: Phase, quiet_seconds: float) -> Fault:
    """Play one phase and wait until all is well again."""
    begin_time = time.time()
    skipped = phase.why_not(world)
    if not skipped:
        await phase.play(world)
    fault = Fault(name=phase.name, kind=phase.kind, begin_time=begin_time, end_time=time.time(), skipped=skipped)
    world.history.suffer(fault)
    if not skipped:
        await _quiet(world, quiet_seconds)
    return fault


async def _quiet(world: World, seconds: float) -> None:
    for name, replica in (*itertools.product(SERVICES, range(REPLICAS)), ("postgres", 0), ("nats", 0), ("model", 0)):
        await world.suite.wait_ready(name, replica)
    await asyncio.sleep(seconds)
    answered = _answered(world)

    async def goes_on() -> bool:
        return _answered(world) >= answered + _ANSWERED_MIN

    await until(goes_on)


def _answered(world: World) -> int:
    return sum(answer.outcome is Outcome.OK for answers in world.history.answers.values() for answer in answers)
