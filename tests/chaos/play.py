"""Runs one chaos test (a game): starts the suite, causes load and faults, judges the record, and reports."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.chaos import clocks, faults, history
from tests.chaos.checkers import every_run_end_is_notified, judge
from tests.chaos.history import Kind, Outcome
from tests.chaos.world import Record, World, load, read, read_notifications, running
from tests.simulation.record import call_state, run_state

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
) -> Report:
    """Play in an empty folder, in which all files stay, and return the report."""
    begun = time.monotonic()
    extra = clocks.prepare(folder) if game.machine_faults else None
    async with running(folder, game.seed, extra) as world:
        async with load(world, pace_seconds=game.pace_seconds, settle_seconds=game.settle_seconds):
            await asyncio.sleep(game.quiet_seconds)
            for phase in _until(game, begun):
                fault = await faults.trouble(world, phase, game.quiet_seconds)
                tell(f"{time.monotonic() - begun:6.0f} s  {fault.name}{': ' * bool(fault.skipped)}{fault.skipped}")
            tell(f"{time.monotonic() - begun:6.0f} s  quiet, until every run has ended")
        tell(f"{time.monotonic() - begun:6.0f} s  reading the ledger")
        record = await _told(world)
    record.process_logs = history.scan(folder / "data" / "logs")
    violations = [*judge(record), *too_little(record, game.least)]
    return report(record, seed=game.seed, seconds=time.monotonic() - begun, violations=violations, folder=folder)


async def _told(world: World) -> Record:
    """Read the record once the ends of all runs were notified, or after a time limit."""
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
    """Yield a violation for each kind of operation that succeeded less often than `least` requires."""
    for kind, count in least.items():
        taken = sum(bool(record.history.taken(o)) for o in record.history.operations if o.kind is kind)
        if taken < count:
            yield f"enough_succeeded: {taken} operations of kind {kind} were acknowledged, and {count} should have been"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    seed: int
    seconds: float
    phases: list[str]
    skipped: dict[str, str]
    takeovers: int
    counts: dict[str, Mapping[str, int]]
    operations: dict[str, dict[str, int]]
    violations: list[str]

    def __str__(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()


def report(record: Record, *, seed: int, seconds: float, violations: list[str], folder: Path) -> Report:
    history = record.history
    played = [fault for fault in history.faults if not fault.skipped]
    operations: dict[str, Counter[str]] = {}
    for operation in history.operations:
        outcomes = {answer.outcome for answer in history.answers[operation.number]}
        outcome = "unanswered"
        if history.taken(operation):
            outcome = "acknowledged"
        elif outcomes - {Outcome.UNKNOWN}:
            outcome = "refused" if Outcome.REFUSED in outcomes else "too late"
        operations.setdefault(operation.kind, Counter())[outcome] += 1
    found = Report(
        seed=seed,
        seconds=round(seconds, 1),
        phases=[fault.name for fault in played],
        skipped={fault.name: fault.skipped for fault in history.faults if fault.skipped},
        takeovers=sum(max(run.epoch - 1, 0) for run in record.runs.values()),
        counts={
            "faults": Counter(fault.kind for fault in played),
            "signals": history.signals,
            "runs": Counter(run_state(run.state) for run in record.runs.values()),
            "calls": Counter(call_state(call.state) for call in record.calls.values()),
            "effects": Counter(effect.tool_name for effect in record.effects),
            "read": {
                "requests": sum(map(len, history.answers.values())),
                "events": sum(map(len, record.logs.values())),
                "events seen by watchers": len(history.seen),
                "notifications": sum(map(len, record.notifications.values())),
                "log lines": record.process_logs.lines,
            },
        },
        operations=operations,  # type: ignore[arg-type]  # counters are dicts
        violations=violations,
    )
    (folder / "report.json").write_text(f"{found}\n", encoding="utf-8")
    return found
