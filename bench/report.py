"""The table of a comparison, and its figures as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from bench.__main__ import Measured

RESULTS = Path(__file__).parent / "results"


def write(subjects: Sequence[Measured], *, runs: int, at_once: int) -> Path:
    """Write all figures, a number per repetition; returns the file."""
    now = datetime.now(UTC)
    machine = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    result = {
        "time": now.isoformat(timespec="seconds"),
        "machine": machine,
        "runs": runs,
        "at_once": at_once,
        "subjects": list(map(asdict, subjects)),
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{now:%Y-%m-%d}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return file


def show(subjects: Sequence[Measured], *, at_once: int) -> None:
    """Print medians with the smallest and largest value of the repetitions."""
    console = Console()
    base = next((s for s in subjects if s.name.startswith("hand")), None)
    base_cpu = statistics.median(base.cpu_milliseconds) if base else 0.0
    table = Table("", "CPU a run, ms", "of hand-written", f"runs a second, {at_once} at once", "one alone, ms")
    for subject in subjects:
        ratio = f"{statistics.median(subject.cpu_milliseconds) / base_cpu:.2f}" if base_cpu else ""
        table.add_row(
            subject.name,
            spread(subject.cpu_milliseconds),
            ratio,
            spread(subject.runs_per_second),
            spread(subject.alone_milliseconds),
        )
    console.print(table)
    for subject in subjects:
        parts = {name: statistics.median(cpu[name] for cpu in subject.cpu) for name in subject.cpu[0]}
        if len(parts) > 1:
            console.print(f"{subject.name}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in parts.items()))


def spread(values: Sequence[float]) -> str:
    """Return the median, and the range in brackets."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
