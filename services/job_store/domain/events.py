"""Entries of the log of a run, as values. What they look like on the wire is not the ledger's matter."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from services.job_store.domain.rows import CallRow, MessageRow, RunRow
from services.job_store.domain.states import CallState, OperatorAct, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanged:
    """The run changed its state or what it waits for, or was created (`from_state` None)."""

    from_state: RunState | None
    run: RunRow


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChanged:
    """A call changed its state or its holder, or was created (`from_state` None)."""

    from_state: CallState | None
    call: CallRow
    duration_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageAdded:
    """A message was appended to the conversation."""

    message: MessageRow


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolProgressed:
    """A client says how far it is with a call."""

    call: CallRow
    fraction: float | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToppedUp:
    """Somebody added to the token budget, which is larger now."""

    tokens: int
    token_budget: int
    user_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerEvent:
    """What the owner of the run supplies: output, rounds, progress, warnings."""

    type: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorActed:
    """An operator did something about the run; `call_id` goes with RESOLVED."""

    user_id: str
    act: OperatorAct
    call_id: str = ""
    reason: str = ""


Happening: TypeAlias = RunChanged | CallChanged | MessageAdded | ToolProgressed | OwnerEvent | OperatorActed | ToppedUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One entry of the log of a run. `attempt` is the epoch of the worker that wrote it, 0 if none did."""

    store_id: str
    conversation_id: str
    run_id: str
    seq: int
    time: datetime
    attempt: int
    event_id: str
    type: str
    happening: Happening
