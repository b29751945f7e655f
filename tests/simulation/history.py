"""What happened, as those outside saw it: the material of the checkers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# A run that cannot go on says the same for ever.
_VIOLATIONS_MAX = 50


@dataclass(slots=True, kw_only=True)
class Message:
    """A message that a user brought; `run_ids` are all answers that came."""

    user_id: str
    request_id: str
    conversation_id: str
    text: str
    policy: str
    run_ids: list[str] = field(default_factory=list)
    steered: bool = False
    plan: str = ""
    brings: int = 0
    """How many tools come with its run."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """A command that somebody sent; `outcomes` are all receipts that came, with when."""

    user_id: str
    command_id: str
    run_id: str
    kind: str
    call_id: str = ""
    content: bytes = b""
    digest: str = ""
    tokens: int = 0
    sent_at: float = 0.0
    grants: Any = None
    """The terms on which a series was granted with it; see `grants.Terms`."""
    outcomes: list[str] = field(default_factory=list)
    taken_at: float | None = None

    @property
    def taken(self) -> bool:
        return "ACCEPTED" in self.outcomes or "DUPLICATE" in self.outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """An effect of a tool in the outside world."""

    time: float
    call_id: str
    run_id: str
    user_id: str
    tool_name: str
    arguments_json: bytes
    begin: float
    """The time at which its call was let in."""
    version: int
    """The version of the tool that was in force then."""
    is_asked_for: bool
    """True if a rule asked for an approval then."""
    ruled_by: frozenset[str]
    """The runs and conversations whose rules the registry applies to the call."""


@dataclass(slots=True, kw_only=True)
class Served:
    """A call that the model took: what it cost, by the model's own count; `whole` if its answer was read to the end.

    `told` are the notices of jobs in its messages: whose, and of which iteration, 0 for its end.
    """

    plan: str
    round: tuple[str, int]
    began_at: float
    input_tokens: int
    output_tokens: int = 0
    whole: bool = False
    told: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An event that a watcher got."""

    watcher: str
    run_id: str
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """An event that a trigger has taken, as its sender was told, with the run that it had started by then."""

    trigger_id: str
    event_id: str
    run_id: str


@dataclass
class History:
    """Everything that is judged, and the trace that proves that a seed replays."""

    messages: list[Message] = field(default_factory=list)
    commands: list[Sent] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    delivered: list[Delivered] = field(default_factory=list)
    decided: set[tuple[str, str, str]] = field(default_factory=set)
    """Call, kind and person of the decisions in the audit chain; of a front-end call the state that it ended in."""
    owners: dict[tuple[str, int], str] = field(default_factory=dict)
    """The worker that has claimed a run, by that and the epoch."""
    people_wanted: dict[str, int] = field(default_factory=dict)
    """How many people must approve a gated call by the settings of each worker."""
    jumps: list[float] = field(default_factory=list)
    """When the database's clock jumped."""
    made_private: set[str] = field(default_factory=set)
    """The conversations that were shared for writing and are not, or were not for a while."""
    set_back_seconds: float = 0.0
    """How far it was set back in all: what is due comes that much later."""
    violations: list[str] = field(default_factory=list)
    printed: Callable[[str], None] | None = None
    _hash: Any = field(default_factory=hashlib.sha256)
    lines: int = 0

    def tell(self, line: str) -> None:
        """Add a line to the trace."""
        text = f"{asyncio.get_running_loop().time() - 1000:10.4f} {line}"
        self._hash.update(text.encode())
        self.lines += 1
        if self.printed is not None:
            self.printed(text)

    def violation(self, checker: str, text: str) -> None:
        """Add what a checker saw while the simulation ran."""
        if len(self.violations) < _VIOLATIONS_MAX:
            self.tell(f"VIOLATION {checker}: {text}")
            self.violations.append(f"{checker}: {text}")

    def unexpected(self, where: str, error: BaseException) -> None:
        """Add an exception that the code under test should not raise."""
        self.violation("no_crash", f"{where}: {type(error).__name__}: {error}")

    @property
    def trace_hash(self) -> str:
        return str(self._hash.hexdigest())
