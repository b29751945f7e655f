"""Phases of faults with quiet time in between. After each phase, all processes run again and users get answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from tests import servers
from tests.chaos import clocks
from tests.chaos.history import Fault, Outcome
from tests.chaos.world import LEASE_SECONDS, REPLICAS, SERVICES, World
from tests.poll import until

WIPE = "wipe nats"
DEMOTE = "demote postgres"
_DEMOTED_SECONDS = 5.0
_ANSWERED_MIN = 5

Play = Callable[[World], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One fault. `why_not` returns why this machine cannot cause it, or an empty string."""

    name: str
    kind: str
    play: Play
    why_not: Callable[[World], str] = lambda _: ""


def signal_one(service: str, number: signal.Signals) -> Play:
    async def play(world: World) -> None:
        replica = world.draw.randrange(REPLICAS)
        world.signal(service, replica, number)
        await world.suite.wait_ready(service, replica)

    return play


def signal_all(services: tuple[str, ...], number: signal.Signals, *, embedded: tuple[str, ...] = ()) -> Play:
    async def play(world: World) -> None:
        names = [(service, replica) for service in services for replica in range(REPLICAS)]
        names += [(server, 0) for server in embedded]
        for name, replica in names:
            world.signal(name, replica, number)
        for name, replica in names:
            await world.suite.wait_ready(name, replica)

    return play


def freeze(service: str) -> Play:
    """Return a fault that stops one replica until other replicas have taken over its leases, and then resumes it."""

    async def play(world: World) -> None:
        replica = world.draw.randrange(REPLICAS)
        world.signal(service, replica, signal.SIGSTOP)
        await asyncio.sleep(LEASE_SECONDS + 2.0)
        world.signal(service, replica, signal.SIGCONT)
        await asyncio.sleep(1.0)

    return play


async def restart_postgres(world: World) -> None:
    """Restart PostgreSQL with a fast shutdown, which closes all connections and writes a checkpoint."""
    await servers.restart(world.suite, "postgres")


async def crash_postgres(world: World) -> None:
    """Crash PostgreSQL with an immediate shutdown, after which it recovers from its log."""
    world.signal("postgres", 0, signal.SIGQUIT)
    await world.suite.wait_ready("postgres")


async def demote_postgres(world: World) -> None:
    """Make PostgreSQL read-only for a while on open connections, as after a failover to a standby."""
    settings = world.folder / "data" / "postgres" / "postgresql.auto.conf"
    before = settings.read_text()
    for text, seconds in ((before + "default_transaction_read_only = on\n", _DEMOTED_SECONDS), (before, 0.0)):
        settings.write_text(text)
        if (process_id := world.suite.pid("postgres")) is not None:
            os.kill(process_id, signal.SIGHUP)
        await asyncio.sleep(seconds)


async def restart_nats(world: World) -> None:
    world.signal("nats", 0, signal.SIGTERM)
    await world.suite.wait_ready("nats")


async def miss_nats(world: World) -> None:
    await world.suite.stop_process("nats")
    await asyncio.sleep(4.0)
    await world.suite.start_process("nats")


async def wipe_nats(world: World) -> None:
    await servers.wipe_nats(world.suite)


_PHASE_SECONDS = 4.0
_TEXT = "This is an answer of some length, of which perhaps only a part will arrive."
_SLOWLY = {"chunk_delay": 0.1}
_WRONG_CALLS = [
    {"name": "read_meter", "arguments": '{"tag": "cut off'},
    {"name": "press_button", "arguments": '{"tag": 7, "seconds": "soon"}'},
    {"name": "no_such_tool", "arguments": "{}"},
]


def _fault(kind: str, **fields: Any) -> dict[str, Any]:
    return {"times": 1, "reply": {"text": _TEXT, **_SLOWLY, "fault": {"type": kind, **fields}}}


# Faults of the model server: each request of a phase fails once, and its retry succeeds.
_STEPS: Mapping[str, dict[str, Any]] = {
    "429": _fault("status", status=429, retry_after=1),
    "500": _fault("status", status=500, body="<html>"),
    "hang before headers": _fault("hang", after_chunks=0),
    "hang": _fault("hang", after_chunks=3),
    "reset": _fault("reset", after_chunks=3),
    "drop": _fault("drop", after_chunks=2),
    "truncate": _fault("truncate", after_chunks=3),
    "garble": _fault("garble", after_chunks=2),
    "error in stream": _fault("error_object", after_chunks=2),
    "empty stream": _fault("empty_stream"),
    "wrong calls": {"when": {"round": 0}, "reply": {"tool_calls": _WRONG_CALLS, "finish_reason": "tool_calls"}},
}


def _play(step: dict[str, Any]) -> Play:
    async def play(world: World) -> None:
        await _tell(world, [step])
        await asyncio.sleep(_PHASE_SECONDS)
        await _tell(world, [])

    return play


async def _tell(world: World, steps: list[dict[str, Any]]) -> None:
    base_url = (world.suite.endpoints.model_base_url or "").removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=base_url, timeout=60.0) as http:
        (await http.post("/_pawl/script", json={"steps": steps})).raise_for_status()


_OF_THE_MODEL: Mapping[str, Play] = {name: _play(step) for name, step in _STEPS.items()}


def _killing(service: str) -> tuple[Phase, ...]:
    return (
        Phase(name=f"kill {service}", kind="kill", play=signal_one(service, signal.SIGKILL)),
        Phase(name=f"terminate {service}", kind="terminate", play=signal_one(service, signal.SIGTERM)),
        Phase(name=f"kill both {service}", kind="kill", play=signal_all((service,), signal.SIGKILL)),
        Phase(name=f"terminate both {service}", kind="terminate", play=signal_all((service,), signal.SIGTERM)),
        Phase(name=f"freeze {service}", kind="freeze", play=freeze(service)),
    )


PHASES: tuple[Phase, ...] = (
    *(phase for service in SERVICES for phase in _killing(service)),
    Phase(
        name="kill everything",
        kind="kill",
        play=signal_all(SERVICES, signal.SIGKILL, embedded=("postgres", "nats", "model")),
    ),
    Phase(name="restart postgres", kind="postgres", play=restart_postgres),
    Phase(name="crash postgres", kind="postgres", play=crash_postgres),
    Phase(name="kill postgres", kind="postgres", play=signal_all((), signal.SIGKILL, embedded=("postgres",))),
    Phase(name=DEMOTE, kind="postgres", play=demote_postgres),
    Phase(name="restart nats", kind="nats", play=restart_nats),
    Phase(name="kill nats", kind="nats", play=signal_all((), signal.SIGKILL, embedded=("nats",))),
    Phase(name="miss nats", kind="nats", play=miss_nats),
    Phase(name=WIPE, kind="nats", play=wipe_nats),
    Phase(name="kill model", kind="model", play=signal_all((), signal.SIGKILL, embedded=("model",))),
    *(Phase(name=f"model {name}", kind="model", play=play) for name, play in _OF_THE_MODEL.items()),
    Phase(name="shift clock", kind="clock", play=clocks.shift, why_not=clocks.why_not),
)

# Phases of `make test-long`: a quick one of each kind.
SHORT: tuple[str, ...] = (
    "kill everything",
    "model garble",
    "freeze agent-loop",
    DEMOTE,
    "terminate both agent-loop",
    "miss nats",
    "kill both job-store",
)


def named(names: Sequence[str]) -> list[Phase]:
    known = {phase.name: phase for phase in PHASES}
    if missing := [name for name in names if name not in known]:
        raise SystemExit(f"unknown phase {', '.join(missing)}; there are: {', '.join(known)}")
    return [known[name] for name in names]


def forever(seed: int) -> Iterator[Phase]:
    draw = random.Random(seed)
    for _ in itertools.count():
        yield from draw.sample(PHASES, len(PHASES))


async def trouble(world: World, phase: Phase, quiet_seconds: float) -> Fault:
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
    await until(lambda: _answered(world) >= answered + _ANSWERED_MIN)


def _answered(world: World) -> int:
    return sum(answer.outcome is Outcome.OK for answers in world.history.answers.values() for answer in answers)
