"""What a game came to: a table for people, JSON for documents."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.chaos.history import Kind, Outcome
from tests.chaos.record import Record
from tests.simulation.record import call_state, run_state

FILE_NAME = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Counts of everything, and what was wrong."""

    seed: int
    seconds: float
    faults: dict[str, int]
    signals: dict[str, int]
    phases: list[str]
    skipped: dict[str, str]
    operations: dict[str, dict[str, int]]
    attempts: int
    runs: dict[str, int]
    takeovers: int
    calls: dict[str, int]
    effects: dict[str, int]
    events: int
    events_seen: int
    notifications: int
    log_lines: int
    violations: list[str]


def report(record: Record, *, seed: int, seconds: float, violations: list[str], folder: Path) -> Report:
    """Count, and write it beside the logs."""
    history = record.history
    played = [fault for fault in history.faults if not fault.skipped]
    found = Report(
        seed=seed,
        seconds=round(seconds, 1),
        faults=dict(Counter(fault.kind for fault in played)),
        signals=dict(history.signals),
        phases=[fault.name for fault in played],
        skipped={fault.name: fault.skipped for fault in history.faults if fault.skipped},
        operations=_operations(record),
        attempts=sum(len(answers) for answers in history.answers.values()),
        runs=dict(Counter(run_state(run.state) for run in record.runs.values())),
        takeovers=sum(max(run.epoch - 1, 0) for run in record.runs.values()),
        calls=dict(Counter(call_state(call.state) for call in record.calls.values())),
        effects=dict(Counter(effect.tool_name for effect in record.effects)),
        events=sum(len(log) for log in record.logs.values()),
        events_seen=len(history.seen),
        notifications=sum(len(told) for told in record.notifications.values()),
        log_lines=record.process_logs.lines,
        violations=violations,
    )
    (folder / FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return found


def _operations(record: Record) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {kind.value: Counter() for kind in Kind}
    for operation in record.history.operations:
        answers = record.history.answers[operation.number]
        if record.history.taken(operation):
            outcome = "acknowledged"
        elif any(answer.outcome is Outcome.REFUSED for answer in answers):
            outcome = "refused"
        else:
            outcome = "too late" if any(answer.outcome is Outcome.OK for answer in answers) else "unanswered"
        found[operation.kind.value][outcome] += 1
    return {kind: dict(counts) for kind, counts in found.items()}


def show(found: Report, console: Console) -> None:
    """Print the tables, and every violation."""
    columns = ("acknowledged", "too late", "refused", "unanswered")
    operations = Table(title="Operations", title_justify="left")
    for column in ("kind", *columns):
        operations.add_column(column, justify="left" if column == "kind" else "right")
    for kind, counts in found.operations.items():
        operations.add_row(kind, *(str(counts.get(column, 0)) for column in columns))
    console.print(operations)
    rest = Table(title="Everything else", title_justify="left", show_header=False)
    for name, counts in (
        ("faults", found.faults),
        ("signals", found.signals),
        ("runs", found.runs),
        ("calls", found.calls),
        ("effects", found.effects),
    ):
        rest.add_row(name, f"{sum(counts.values())}", ", ".join(f"{key} {value}" for key, value in counts.items()))
    rest.add_row("takeovers", str(found.takeovers), "times another worker went on with a run")
    rest.add_row("events", str(found.events), f"{found.events_seen} seen by watchers, each compared with the log")
    rest.add_row("notifications", str(found.notifications), "")
    rest.add_row("log lines", str(found.log_lines), "of the services and the model, each scanned")
    rest.add_row("requests", str(found.attempts), "attempts of the operations above")
    rest.add_row("seconds", str(found.seconds), f"seed {found.seed}")
    for name, why in found.skipped.items():
        rest.add_row("not played", name, why)
    console.print(rest)
    for violation in found.violations:
        console.print(f"WRONG  {violation}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(found.violations)} violations", highlight=False)
