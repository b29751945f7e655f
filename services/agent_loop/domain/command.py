"""Commands: what others ask of a run. Their receipts are final when they are read here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from services.agent_loop.domain.call import CallResult, DecisionKind
from services.agent_loop.domain.run import StopCause


class CallResolution(StrEnum):
    """What an operator found out about a call in doubt."""

    HAPPENED = "HAPPENED"
    RUN_AGAIN = "RUN_AGAIN"
    TELL_MODEL = "TELL_MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """A front end returned a result."""

    call_id: str
    result: CallResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """A person decided about a call, or answered it."""

    call_id: str
    kind: DecisionKind
    arguments_json: bytes = b""
    edited_digest: str = ""
    reason: str = ""
    answer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steer:
    """A message of the user enters the run."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Somebody stops the run."""

    cause: StopCause
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolve:
    """An operator says what became of a call; `content_json` goes with HAPPENED."""

    call_id: str
    resolution: CallResolution
    content_json: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A front end reports progress of a call."""

    call_id: str
    fraction: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopUp:
    """Somebody adds to the token budget."""

    tokens: int


CommandKind: TypeAlias = ToolResult | Decide | Steer | Cancel | Resolve | Progress | TopUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An entry of the inbox of a run."""

    command_id: str
    user_id: str
    time: float
    kind: CommandKind
