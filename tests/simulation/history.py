"""What happened in a simulation, as seen from outside the services. The checkers judge it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pawl.job_store.ledger.reading import Loaded

# A run that cannot continue repeats the same violation forever.
_VIOLATIONS_MAX = 50


@dataclass(slots=True, kw_only=True)
class Message:
    user_id: str
    request_id: str
    conversation_id: str
    text: str
    policy: str
    run_ids: list[str] = field(default_factory=list)
    steered: bool = False
    plan: str = ""
    # Number of tools that come with its run.
    tool_count: int = 0


@dataclass(slots=True, kw_only=True)
class Sent:
    """A command with the outcomes of all its receipts."""

    user_id: str
    command_id: str
    run_id: str
    kind: str
    call_id: str = ""
    content: bytes = b""
    tokens: int = 0
    sent_at: float = 0.0
    # Terms of the series granted with it; see `grants.Terms`.
    grants: Any = None
    outcomes: list[str] = field(default_factory=list)
    accepted_at: float | None = None

    @property
    def taken(self) -> bool:
        return "ACCEPTED" in self.outcomes or "DUPLICATE" in self.outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    time: float
    call_id: str
    run_id: str
    user_id: str
    tool_name: str
    arguments_json: bytes
    # Time at which the registry accepted the call.
    begin: float
    # The current tool version at that time.
    version: int
    # True if a rule required approval at that time.
    requires_approval: bool
    # Runs and conversations whose rules the registry applies to the call.
    ruled_by: frozenset[str]


@dataclass(slots=True, kw_only=True)
class Served:
    """A model call and its usage. `whole` is true if the client read the whole answer.

    `told` lists the job notices in its messages as pairs of run and iteration; iteration 0 is the end of the job.
    """

    plan: str
    round: tuple[str, int]
    started_at: float
    input_tokens: int
    output_tokens: int = 0
    whole: bool = False
    told: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    watcher: str
    run_id: str
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    trigger_id: str
    event_id: str
    run_id: str


@dataclass
class History:
    """The collected history, and a hash of its trace that shows whether two runs of a seed are equal."""

    messages: list[Message] = field(default_factory=list)
    commands: list[Sent] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    delivered: list[Delivered] = field(default_factory=list)
    # Call, kind and person of each decision in the audit chain; for a front-end call, its final state.
    decided: set[tuple[str, str, str]] = field(default_factory=set)
    # Worker that claimed a run, by run and epoch.
    owners: dict[tuple[str, int], str] = field(default_factory=dict)
    # Approvals required for a gated call, by worker.
    approvals_required: dict[str, int] = field(default_factory=dict)
    # Times at which the database clock jumped.
    jumps: list[float] = field(default_factory=list)
    # Conversations that were made private, at least for a while, after they had been shared for writing.
    made_private: set[str] = field(default_factory=set)
    # Total time by which the clock was set back. Due times are delayed by the same time.
    set_back_seconds: float = 0.0
    # What a worker would have loaded without a kept history, by run and epoch.
    whole_loads: defaultdict[tuple[str, int], list[Loaded]] = field(default_factory=lambda: defaultdict(list))
    violations: list[str] = field(default_factory=list)
    printed: Callable[[str], None] | None = None
    _hash: Any = field(default_factory=hashlib.sha256)
    lines: int = 0

    def tell(self, line: str) -> None:
        text = f"{asyncio.get_running_loop().time() - 1000:10.4f} {line}"
        self._hash.update(text.encode())
        self.lines += 1
        if self.printed is not None:
            self.printed(text)

    def violation(self, checker: str, text: str) -> None:
        if len(self.violations) < _VIOLATIONS_MAX:
            self.tell(f"VIOLATION {checker}: {text}")
            self.violations.append(f"{checker}: {text}")

    def unexpected(self, where: str, error: BaseException) -> None:
        self.violation("no_crash", f"{where}: {type(error).__name__}: {error}")

    @property
    def trace_hash(self) -> str:
        return str(self._hash.hexdigest())
