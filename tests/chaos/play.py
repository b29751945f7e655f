"""Plays a whole game: starts the suite, causes load and faults, and judges the record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import clocks, faults, logs
from tests.chaos.checkers import every_run_end_is_notified, judge
from tests.chaos.history import Kind
from tests.chaos.record import Record, read, read_notifications
from tests.chaos.report import Report, report
from tests.chaos.world import World, load, running

# Operations that each minute must bring on average for the game to count; ten times as many are usual.
LEAST: Mapping[Kind, int] = {
    Kind.START: 15,
    Kind.SEND: 1,
    Kind.STEER: 1,
    Kind.INTERRUPT: 1,
    Kind.RESULT: 5,
    Kind.APPROVE: 3,
    Kind.ANSWER: 1,
    Kind.CANCEL: 1,
}

_NOTIFICATION_ROUNDS_MAX = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """The parameters of a game. With `seconds`, phases start until this time has passed."""

    seed: int
    phases: Iterable[faults.Phase]
    seconds: float | None = None
    quiet_seconds: float = 3.0
    pace_seconds: float = 1.0
    settle_seconds: float = 240.0
    # Whether to prepare for wrong clocks, where the machine permits it.
    machine_faults: bool = False
    # How many operations of a kind must have been acknowledged for the game to count.
    least: Mapping[Kind, int] = field(default_factory=dict)


async def play(
    game: Game,
    folder: Path,
    tell: Callable[[str], None] = lambda _: None,
    extra: Mapping[str, Mapping[str, str]] | None = None,
) -> Report:
    """Play in an empty folder, which keeps all files; return the report. `extra` adds variables for services."""
    begun = time.monotonic()
    extra = clocks.prepare(folder) if game.machine_faults else extra
    async with running(folder, game.seed, extra) as world:
        async with load(world, pace_seconds=game.pace_seconds, settle_seconds=game.settle_seconds):
            await asyncio.sleep(game.quiet_seconds)
            for phase in _until(game, begun):
                fault = await faults.trouble(world, phase, game.quiet_seconds)
                tell(f"{time.monotonic() - begun:6.0f} s  {fault.name}{': ' * bool(fault.skipped)}{fault.skipped}")
            tell(f"{time.monotonic() - begun:6.0f} s  quiet, until every run has ended")
        tell(f"{time.monotonic() - begun:6.0f} s  reading the ledger")
        record = await _told(world)
    record.process_logs = logs.scan(folder / "data" / "logs")
    violations = [*judge(record), *too_little(record, game.least)]
    return report(record, seed=game.seed, seconds=time.monotonic() - begun, violations=violations, folder=folder)


async def _told(world: World) -> Record:
    """Read the record, once every run end was notified or the wait is over."""
    record = await read(world)
    for _ in range(_NOTIFICATION_ROUNDS_MAX):
        if not any(every_run_end_is_notified(record)):
            break
        await asyncio.sleep(1.0)
        await read_notifications(world, record)
    return record


def _until(game: Game, begun: float) -> Iterator[faults.Phase]:
    for phase in game.phases:
        if game.seconds is not None and time.monotonic() - begun > game.seconds:
            return
        yield phase


def too_little(record: Record, least: Mapping[Kind, int]) -> Iterator[str]:
    """Yield a violation for each kind with too few successful operations, so that the game does not count."""
    for kind, count in least.items():
        taken = sum(bool(record.history.taken(o)) for o in record.history.operations if o.kind is kind)
        if taken < count:
            yield f"enough_succeeded: {taken} operations of kind {kind} were acknowledged, and {count} should have been"
