"""What the loop does next: the answers of `decide`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.agent_loop.domain.call import Call
from services.agent_loop.domain.run import RunFailure, RunState, WaitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Change these calls at once: a deadline passed, or the run is ending. Then decide again."""

    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterSteers:
    """Append the waiting messages of the user. Then decide again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Stop all work, then end the run FAILED. Then decide again."""

    failure: RunFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class PinTools:
    """Ask the registry which tools the run may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallModel:
    """Announce a model call. Then decide again.

    `summarise_to_number` is 0 unless the call writes a summary of the messages
    up to that number.
    """

    round: int
    without_tools: bool = False
    summarise_to_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """Announce that the open model call, whose worker is gone, is made again. Then decide again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartModel:
    """Make the announced model call, after this time."""

    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """Make the intent to run these calls durable, then run them. Then decide again."""

    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFallback:
    """Ask the registry about the backend tool that shall replace a call's front end. Then decide again."""

    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopModel:
    """Cut the model's stream off; what it wrote is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCalls:
    """Cancel these executions wherever they run. Then decide again."""

    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to do until work that is under way reports, or until this time."""

    until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """Let go of the run until a command comes, or until this time. WAITING or NEEDS_ATTENTION."""

    state: RunState
    waits: tuple[WaitKind, ...]
    wake_time: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the run."""

    state: RunState
    failure: RunFailure | None = None


Decision: TypeAlias = (
    Settle
    | EnterSteers
    | Fail
    | PinTools
    | CallModel
    | TakeOver
    | StartModel
    | Execute
    | CheckFallback
    | StopModel
    | StopCalls
    | Wait
    | Park
    | Finish
)
