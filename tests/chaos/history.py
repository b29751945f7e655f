"""The history of what clients did and saw, and the effects on the outside world.

The history is append-only and in order, in memory and on disk. The outside world is a file with one line per effect,
which no crash of Pawl can undo. The order of the lines is the order of the effects of all processes, because each line
is written by one append.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

Kind = StrEnum(
    "Kind",
    "START SEND STEER INTERRUPT RESULT APPROVE EDIT REJECT ANSWER RESOLVE CANCEL TRESPASS WORKFLOW GOAL",
)
MESSAGES = frozenset({Kind.START, Kind.SEND, Kind.STEER, Kind.INTERRUPT})
STARTS = MESSAGES | {Kind.WORKFLOW, Kind.GOAL}


class Outcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A client request with all its attempts. `content` is its text, result or arguments."""

    number: int
    kind: Kind
    store_id: str
    user_id: str
    request_id: str
    time: float
    conversation_id: str = ""
    run_id: str = ""
    call_id: str = ""
    content: str = ""
    # Number of calls granted for a series; empty without a grant.
    series: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    number: int
    time: float
    outcome: Outcome
    status: str = ""
    run_id: str = ""
    conversation_id: str = ""
    run_state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    watcher: str
    run_id: str
    seq: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    name: str
    kind: str
    begin_time: float
    end_time: float
    skipped: str = ""


@dataclass
class History:
    """All entries. If there is a path, each entry is also appended to that file immediately, as a line of JSON."""

    path: Path | None = None
    operations: list[Operation] = field(default_factory=list)
    answers: dict[int, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    seen: list[Seen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    signals: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    _file: BinaryIO | None = None

    def invoke(self, kind: Kind, *, store_id: str, user_id: str, request_id: str, **about: str) -> Operation:
        operation = Operation(
            number=len(self.operations) + 1,
            kind=kind,
            store_id=store_id,
            user_id=user_id,
            request_id=request_id,
            time=time.time(),
            **about,
        )
        self.operations.append(operation)
        self._write("operation", operation)
        return operation

    def answer(self, operation: Operation, outcome: Outcome, status: str = "", **run: str) -> None:
        answer = Answer(number=operation.number, time=time.time(), outcome=outcome, status=status, **run)
        self.answers[operation.number].append(answer)
        self._write("answer", answer)

    def see(self, seen: Seen) -> None:
        self.seen.append(seen)
        self._write("seen", seen)

    def suffer(self, fault: Fault) -> None:
        self.faults.append(fault)
        self._write("fault", fault)

    def complain(self, text: str) -> None:
        """Record something that no client should ever receive."""
        self.complaints.append(text)
        self._write("complaint", text)

    def taken(self, operation: Operation) -> list[Answer]:
        return [
            answer
            for answer in self.answers.get(operation.number, [])
            if answer.outcome is Outcome.OK and answer.status in {"", "ACCEPTED", "DUPLICATE"}
        ]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, entry: object) -> None:
        if self.path is None:
            return
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        self._file.write(msgspec.json.encode({kind: entry}) + b"\n")


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One effect, as a line of the file. `bars` marks an answer that a call did not happen, which prevents its effect.

    The `time` in the file is from a monotonic clock, because some faults shift the others.
    """

    time: float
    pid: int
    tool_name: str
    key: str
    run_id: str
    store_id: str
    user_id: str
    arguments: dict[str, Any]
    seen_bytes: int
    bars: bool = False


class EffectFile:
    """The file of effects, which any number of processes may use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, effect: Effect) -> int:
        line = msgspec.json.encode(effect) + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
            return os.lseek(descriptor, 0, os.SEEK_CUR) - len(line)
        finally:
            os.close(descriptor)

    def bar(self, question: Effect) -> Effect | None:
        """Return the effect with the key of `question`, or prevent this effect for the future and return None."""
        place = self.append(question)
        return next(
            (
                effect
                for begin, effect in self._lines()
                if begin < place and effect.key == question.key and not effect.bars
            ),
            None,
        )

    def is_void(self, effect: Effect, place: int) -> bool:
        """Return whether the effect at this offset is void because it follows an answer that it did not happen."""
        bars = [begin for begin, line in self._lines() if line.key == effect.key and line.bars]
        return any(effect.seen_bytes <= begin < place for begin in bars)

    def happened(self) -> list[Effect]:
        boot_time = time.time() - time.monotonic()
        bars: dict[str, list[int]] = {}
        effects: list[Effect] = []
        for begin, line in self._lines():
            if line.bars:
                bars.setdefault(line.key, []).append(begin)
            elif not any(line.seen_bytes <= bar for bar in bars.get(line.key, [])):
                effects.append(msgspec.structs.replace(line, time=boot_time + line.time))
        return effects

    def _lines(self) -> Iterator[tuple[int, Effect]]:
        place = 0
        for line in self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []:
            yield place, msgspec.json.decode(line, type=Effect)
            place += len(line)


def effect(path: EffectFile, tool_name: str, context: Any, arguments: dict[str, Any], *, bars: bool = False) -> Effect:
    return Effect(
        time=time.monotonic(),
        pid=os.getpid(),
        tool_name=tool_name,
        key=context.idempotency_key,
        run_id=context.run_id,
        store_id=context.store_id,
        user_id=context.user_id,
        arguments=arguments,
        seen_bytes=path.size_bytes,
        bars=bars,
    )


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
