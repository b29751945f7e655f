"""Decisions made by `decide` and by programs.

Planning applies each decision and decides again, unless the decision ends the plan. Decisions that start work have
`names`. A decision does not start work whose name is already in use.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec

from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.run import RunFailure
from pawl.agent_loop.loop.rules.state import READ, START, check_of, stop_of
from pawl.agent_loop.workflows.cursor import WorkflowCursor
from pawl.chassis.ids import CallId, RunId
from pawl.values import RunState, WaitKind


class Settle(msgspec.Struct, frozen=True, kw_only=True):
    """Settle or change these calls because a deadline passed or the run is ending.

    `is_part` is set if all changes together are too large for one step. The changes in this decision must then be
    committed first.
    """

    calls: tuple[Call, ...]
    is_part: bool = False


class Decline(msgspec.Struct, frozen=True, kw_only=True):
    """Continue this call's tool without an answer to its question."""

    call_id: CallId


class EnterSteers(msgspec.Struct, frozen=True, kw_only=True):
    """Append the user's waiting messages."""


class Fail(msgspec.Struct, frozen=True, kw_only=True):
    """Mark the run as failing. All its work is stopped before it ends as FAILED."""

    failure: RunFailure


class PinTools(msgspec.Struct, frozen=True, kw_only=True):
    names: ClassVar = (START,)


class ReadProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Read the definition that the run executes, and pin its tools if the run has not started."""

    names: ClassVar = (START,)


class PlanUndo(msgspec.Struct, frozen=True, kw_only=True):
    names: ClassVar = (START,)


class ReadCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Read calls that the program needs but the claim did not load.

    With `run_id`, read the last calls of a child run, as evidence for a judge.
    """

    call_ids: tuple[CallId, ...] = ()
    run_id: RunId = RunId("")

    names: ClassVar = (READ,)


class ReadAgent(msgspec.Struct, frozen=True, kw_only=True):
    """Read the agent, or the workflow, that a call delegates to. Version 0 means the newest."""

    call_id: CallId
    name: str
    is_workflow: bool = False
    version: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.call_id,)


class Propose(msgspec.Struct, frozen=True, kw_only=True):
    """Draft calls in state PROPOSED, have the registry check them, and start them.

    The calls belong to the current round, or to a later round, which then starts with its first call.
    """

    calls: tuple[Call, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(check_of(call.call_id) for call in self.calls)


class Advance(msgspec.Struct, frozen=True, kw_only=True):
    """Store the program's cursor, and add calls that the registry need not check.

    If `output_json` is set, it and `output_text` become the run's output. `events_taken` counts the events that the
    program no longer needs.
    """

    cursor: WorkflowCursor
    calls: tuple[Call, ...] = ()
    output_json: bytes | None = None
    output_text: str = ""
    events_taken: int = 0


class TellProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Report the progress of a job's call to the job's conversation."""


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """Commit that a parked run is running again, because a parked run cannot complete directly."""


class CallModel(msgspec.Struct, frozen=True, kw_only=True):
    """Announce a model call. No call or other model call may be open.

    If `summarise_to_number` is not 0, the call summarises the messages up to that number. `is_last` means that the
    round limit has been reached.
    """

    round: int
    without_tools: bool = False
    is_last: bool = False
    summarise_to_number: int = 0


class TakeOver(msgspec.Struct, frozen=True, kw_only=True):
    """Announce a new attempt at the open model call after its worker died."""


class StartModel(msgspec.Struct, frozen=True, kw_only=True):
    delay_seconds: float


class Execute(msgspec.Struct, frozen=True, kw_only=True):
    """Commit the intent to run these calls, then run them."""

    call_ids: tuple[CallId, ...]


class Delegate(msgspec.Struct, frozen=True, kw_only=True):
    """Create the child run that carries out this call, in the same step."""

    call_id: CallId


class CheckFallback(msgspec.Struct, frozen=True, kw_only=True):
    """Have the registry check the backend tool that replaces a front-end call."""

    call_id: CallId

    @property
    def names(self) -> tuple[str, ...]:
        return (check_of(self.call_id),)


class StopModel(msgspec.Struct, frozen=True, kw_only=True):
    """Cancel the model's stream. Keep the output received so far."""


class StopCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Cancel these executions wherever they are running."""

    call_ids: tuple[CallId, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(stop_of, self.call_ids))


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Wait until running work reports or a certain time is reached.

    If a program returns a Wait, no new work starts until a call changes, a command arrives or the time is reached. Open
    work continues. `waits` lists reasons for waiting other than calls and the time.
    """

    until: float | None
    waits: tuple[WaitKind, ...] = ()


class Park(msgspec.Struct, frozen=True, kw_only=True):
    """Release the run as WAITING or NEEDS_ATTENTION until a command arrives or a certain time is reached."""

    state: RunState
    waits: tuple[WaitKind, ...]
    wake_time: float | None


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    state: RunState
    failure: RunFailure | None = None


Decision: TypeAlias = (
    Settle
    | Decline
    | EnterSteers
    | Fail
    | PinTools
    | ReadProgram
    | PlanUndo
    | ReadAgent
    | ReadCalls
    | Propose
    | Advance
    | TellProgress
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
