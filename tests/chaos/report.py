"""The report of a game, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.chaos.history import Outcome
from tests.chaos.record import Record
from tests.simulation.record import call_state, run_state


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
