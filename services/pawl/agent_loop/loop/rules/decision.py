"""The next steps of the loop: the answers of `decide`, and of the programs that it asks.

Decisions that are work beside the drive have `names`: while a name is under way, that work is not begun again.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec

from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.run import RunFailure
from pawl.agent_loop.loop.rules.state import BEGIN, READ, check_of, stop_of
from pawl.chassis.ids import CallId
from pawl.values import RunState, WaitKind


class Settle(msgspec.Struct, frozen=True, kw_only=True):
    """Change these calls at once: a deadline passed, or the run is ending. Then decide again.

    With `is_part`, after that is durable: all of them would be too much for one step.
    """

    calls: tuple[Call, ...]
    is_part: bool = False


class Decline(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody answers what the tool of this call asks: it goes on without. Then decide again."""

    call_id: CallId


class EnterSteers(msgspec.Struct, frozen=True, kw_only=True):
    """Append the waiting messages of the user. Then decide again."""


class Fail(msgspec.Struct, frozen=True, kw_only=True):
    """Stop all work, then end the run FAILED. Then decide again."""

    failure: RunFailure


class PinTools(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the registry which tools the run may use. A beginning of a program."""

    names: ClassVar = (BEGIN,)


class PlanUndo(msgspec.Struct, frozen=True, kw_only=True):
    """Find out what an undo takes back, and which tools that needs. A beginning of a program."""

    names: ClassVar = (BEGIN,)


class ReadCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Read calls that the program names and the claim did not load. Then decide again."""

    call_ids: tuple[CallId, ...]

    names: ClassVar = (READ,)


class ReadAgent(msgspec.Struct, frozen=True, kw_only=True):
    """Read the agent that a call gives a task to. Then decide again."""

    call_id: CallId
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the call."""
        return (self.call_id,)


class Propose(msgspec.Struct, frozen=True, kw_only=True):
    """Have the registry check calls that the program has drafted, PROPOSED, and begin them. Then decide again.

    The calls have a round that is not before the current one; a later one begins with the first of its calls.
    """

    calls: tuple[Call, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the checks."""
        return tuple(check_of(call.call_id) for call in self.calls)


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """Make it durable that a parked run goes on. Then decide again: it cannot complete from where it was."""


class CallModel(msgspec.Struct, frozen=True, kw_only=True):
    """Announce a model call. Then decide again. Nothing of the run may be open.

    `summarise_to_number` is 0 unless the call writes a summary of the messages
    up to that number. With `is_last` the limit of rounds has been reached.
    """

    round: int
    without_tools: bool = False
    is_last: bool = False
    summarise_to_number: int = 0


class TakeOver(msgspec.Struct, frozen=True, kw_only=True):
    """Announce that the open model call, whose worker is gone, is made again. Then decide again."""


class StartModel(msgspec.Struct, frozen=True, kw_only=True):
    """Make the announced model call, after this time."""

    delay_seconds: float


class Execute(msgspec.Struct, frozen=True, kw_only=True):
    """Make the intent to run these calls durable, then run them. Then decide again."""

    call_ids: tuple[CallId, ...]


class Delegate(msgspec.Struct, frozen=True, kw_only=True):
    """Create the run that does this call, with the step that says so. Then decide again."""

    call_id: CallId


class CheckFallback(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the registry about the backend tool that shall replace a call's front end. Then decide again."""

    call_id: CallId

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the check."""
        return (check_of(self.call_id),)


class StopModel(msgspec.Struct, frozen=True, kw_only=True):
    """Cut the model's stream off; what it wrote is kept."""


class StopCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Cancel these executions wherever they run. Then decide again."""

    call_ids: tuple[CallId, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the cancellations."""
        return tuple(map(stop_of, self.call_ids))


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to do until work that is under way reports, or until this time.

    Of a program: nothing more follows until a call changes, a command comes, or this time; `waits` are what it waits
    for besides its calls, if it is not the time.
    """

    until: float | None
    waits: tuple[WaitKind, ...] = ()


class Park(msgspec.Struct, frozen=True, kw_only=True):
    """Let go of the run until a command comes, or until this time. WAITING or NEEDS_ATTENTION."""

    state: RunState
    waits: tuple[WaitKind, ...]
    wake_time: float | None


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """End the run."""

    state: RunState
    failure: RunFailure | None = None


Decision: TypeAlias = (
    Settle
    | Decline
    | EnterSteers
    | Fail
    | PinTools
    | PlanUndo
    | ReadAgent
    | ReadCalls
    | Propose
    | Resume
    | CallModel
    | TakeOver
    | StartModel
    | Execute
    | Delegate
    | CheckFallback
    | StopModel
    | StopCalls
    | Wait
    | Park
    | Finish
)
