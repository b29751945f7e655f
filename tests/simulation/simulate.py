"""Runs the simulation of one seed and checks its record."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import structlog

from pawl.agent_loop.loop.rules import job_program
from pawl.chassis.process import logs
from pawl.event.v1 import run_pb2
from pawl.server.process import log_setup
from tests.simulation import (
    agents,
    flows,
    goals,
    grants,
    jobs,
    process,
    senders,
    timers,
    usage,
)
from tests.simulation.chance import Chance
from tests.simulation.checkers import CHECKERS
from tests.simulation.front_end import FrontEnd, Reader
from tests.simulation.history import History
from tests.simulation.people import STORE, Approver, Operator, User
from tests.simulation.record import Record
from tests.simulation.schedules import schedules_are_played, triggers_are_played
from tests.simulation.world import DatabaseTrouble, Trouble, World
from tests.simulation.writers import talkers_of, writers_of

_QUIET_SECONDS = 3.0
_WAITS_FOR_CHILD = run_pb2.WAIT_KIND_AGENT
# Users stop waiting after 600 s; then the runs that wait for a turn reach their deadlines one after another.
_PATIENCE_SECONDS = 2000.0
# Log events of the code under test that must never occur.
_FAULTS = {
    "run.crashed",
    "run.cannot_be_failed",
    "ledger.operation_failed",
    "ledger.announcement_failed",
    "background.crashed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    seed: int
    violations: tuple[str, ...]
    trace_hash: str
    trace_lines: int
    faults: Counter[str]
    runs: int
    calls: int
    effects: int
    virtual_seconds: float


def simulate(
    seed: int, *, printed: Callable[[str], None] | None = None, has_triggers: bool = True, has_flows: bool = True
) -> Verdict:
    """Play a seed to its end and judge it.

    Without `has_triggers`, no events are sent. Without `has_flows`, there are no workflows and goals.

    The same seed produces the same trace in every process with the same PYTHONHASHSEED, whatever the object addresses
    are.
    """
    history = History(printed=printed)
    _listen(history)
    gc.disable()
    try:
        # Otherwise failing polls would outlast the simulation.
        with patch.object(job_program, "BACKOFF_SECONDS_MAX", 30.0):
            return process.run(_play(seed, history, has_triggers=has_triggers, has_flows=has_flows))
    finally:
        gc.enable()


async def _play(seed: int, history: History, *, has_triggers: bool, has_flows: bool) -> Verdict:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: _unhandled(history, context))
    chance = Chance(seed)
    world = World(chance, history)
    world.start()
    users, approvers = _users(world), [Approver(world, f"boss{number}") for number in range(2)]
    users += writers_of(users)
    trouble = asyncio.gather(Trouble(world).make(), DatabaseTrouble(world).make())
    starters: list[timers.Timer | senders.Sender | flows.Designer | goals.Pursuer] = (
        [timers.Timer(world, STORE)] if schedules_are_played(chance) else []
    )
    starters += [senders.Sender(world, STORE)] if has_triggers and triggers_are_played(chance) else []
    starters += [flows.Designer(world, STORE)] if has_flows and flows.are_played(chance) else []
    starters += [goals.Pursuer(world, STORE)] if has_flows and goals.are_played(chance) else []
    main_tasks = [loop.create_task(each.live()) for each in (*users, *starters)]
    actors = (
        *_others(users),
        *approvers,
        *talkers_of(users),
        Operator(world),
        grants.Owner(world),
        grants.Deployment(world),
    )
    background_tasks = [loop.create_task(other.live()) for other in actors]
    await trouble
    await asyncio.wait(main_tasks)
    for task in main_tasks:
        task.result()
    # A late copy of a rejected message may start a run that no user knows of; its deadline ends it.
    await asyncio.sleep(_QUIET_SECONDS)
    is_quiet = False
    end = 1000 + _PATIENCE_SECONDS
    last_end = end + history.set_back_seconds
    while not is_quiet and loop.time() < end:
        runs, is_open = len(world.tables.runs), _is_open(world)
        await asyncio.sleep(_QUIET_SECONDS)
        is_quiet = not is_open and not _is_open(world) and len(world.tables.runs) == runs
        if loop.time() < last_end and _are_due_later(world):
            end = loop.time() + _PATIENCE_SECONDS
    for task in background_tasks:
        task.cancel()
    await asyncio.gather(*background_tasks, return_exceptions=True)
    record = Record(world.tables, history)
    parts = (agents, jobs, flows, goals, grants, timers, usage, senders)
    for checker in itertools.chain(CHECKERS, *(part.CHECKERS for part in parts)):
        for text in checker(record):
            history.violation(checker.__name__, text)
    verdict = Verdict(
        seed=seed,
        violations=tuple(history.violations),
        trace_hash=history.trace_hash,
        trace_lines=history.lines,
        faults=chance.faults,
        runs=len(world.tables.runs),
        calls=len(world.tables.calls),
        effects=len(history.effects),
        virtual_seconds=loop.time() - 1000,
    )
    loop.set_exception_handler(lambda *_: None)
    world.finish()
    return verdict


def _users(world: World) -> list[User]:
    draw = world.chance.stream("users")
    return [User(world, f"user{number}", front_end=draw.random() < 0.5) for number in range(draw.choice([1, 1, 2, 3]))]


def _others(users: list[User]) -> list[FrontEnd | Reader]:
    others: list[FrontEnd | Reader] = [FrontEnd(user) for user in users if user._has_front_end]
    return others + [Reader(user) for user in users if user.draw.random() < 0.5]


def _is_open(world: World) -> bool:
    return any(not run.state.is_terminal for run in world.tables.runs.values())


def _are_due_later(world: World) -> bool:
    """Return whether every open run waits for a time that a clock set back has delayed."""
    runs = [run for run in world.tables.runs.values() if not run.state.is_terminal]
    return all(run.claim_at is not None or _WAITS_FOR_CHILD in run.waits for run in runs)


def _unhandled(history: History, context: dict[str, Any]) -> None:
    error = context.get("exception")
    history.violation("no_crash", f"{context.get('message')}: {error!r}")


def _listen(history: History) -> None:
    """Turn log events that must never occur into violations, and drop the rest."""

    def note(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if event["event"] in _FAULTS:
            error = event.get("exc_info")
            history.violation("no_crash", f"{event['event']}: {_described(error)}")
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.dev.set_exc_info, note],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )
    logs.route(log_setup.to_structlog)


def _described(error: object) -> str:
    found = sys.exc_info()[1] if error is True else error
    if not isinstance(found, BaseException):
        return str(found)
    frames = traceback.extract_tb(found.__traceback__)[-3:]
    where = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(found).__name__}: {found} ({where})"
