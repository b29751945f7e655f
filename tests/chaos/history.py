"""The history of what clients did and saw, in order; append-only, in memory and on disk."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import msgspec


class Kind(StrEnum):
    START = "start"
    SEND = "send"
    STEER = "steer"
    INTERRUPT = "interrupt"
    RESULT = "result"
    APPROVE = "approve"
    EDIT = "edit"
    REJECT = "reject"
    ANSWER = "answer"
    RESOLVE = "resolve"
    CANCEL = "cancel"
    TRESPASS = "trespass"


MESSAGES = frozenset({Kind.START, Kind.SEND, Kind.STEER, Kind.INTERRUPT})


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
        """Record something that no client should ever see."""
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
