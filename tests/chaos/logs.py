"""Checks the logs of all processes for entries that no fault excuses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_SERVICES = ("agent-loop*.log*", "job-store*.log*", "notifier*.log*", "tool-registry*.log*", "model.log*")
# "last error: UNKNOWN" is how gRPC words a refused connection, in the text of UNAVAILABLE.
_WRONG = re.compile(
    r"Traceback|never awaited|never retrieved|(?<![A-Z_])(?<!last error: )UNKNOWN(?![A-Z_])"
    r"|\"level\": ?\"critical\"|StatusCode\.INTERNAL|\"code\": ?\"INTERNAL\""
)
# gRPC reports broken connections with any code; the service treats them as UNAVAILABLE.
_BROKEN = re.compile(r"\"event\": ?\"(rpc\.unreachable|health\.lost)\"")
_REFUSED = re.compile(r"\"event\": ?\"chat\.refused\"")
_LINE_MAX = 400


@dataclass(slots=True)
class Scan:
    lines: int = 0
    complaints: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def scan(folder: Path) -> Scan:
    found = Scan()
    for path in (path for pattern in _SERVICES for path in sorted(folder.glob(pattern))):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                found.lines += 1
                where = f"{path.name}:{number}: {line.strip()[:_LINE_MAX]}"
                if _REFUSED.search(line):
                    found.refusals.append(where)
                elif _WRONG.search(line) and not _BROKEN.search(line):
                    found.complaints.append(where)
    return found
