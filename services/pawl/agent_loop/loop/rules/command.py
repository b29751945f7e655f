"""Commands: what others ask of a run. Their receipts are final when they are read here."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pawl.agent_loop.loop.rules.call import ByPerson, CallResult
from pawl.agent_loop.loop.rules.run import Run
from pawl.chassis.ids import CallId, CommandId
from pawl.values import CallResolution, DecisionKind, Series, StopCause


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """A front end returned a result."""

    call_id: CallId
    result: CallResult


class Decide(msgspec.Struct, frozen=True, kw_only=True):
    """A person decided about a call, or answered it."""

    call_id: CallId
    kind: DecisionKind
    arguments_json: bytes = b""
    edited_digest: str = ""
    reason: str = ""
    answer: str = ""
    edited_preview: str = ""
    for_series: bool = False
    """True if it is about the series of the call, too."""
    edited_series: Series | None = None


class Steer(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the user enters the run."""

    text: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody stops the run."""

    cause: StopCause
    reason: str = ""


class Resolve(msgspec.Struct, frozen=True, kw_only=True):
    """An operator says what became of a call; `content_json` goes with HAPPENED."""

    call_id: CallId
    resolution: CallResolution
    content_json: bytes = b""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A front end reports progress of a call. The ledger has told it; nothing follows from it."""


class TopUp(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody adds to the token budget."""

    tokens: int


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody pauses a job, or lets it go on."""

    resumes: bool = False


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody outside has completed a call: the registry knows how it ended."""

    call_id: CallId


class AgentEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The run that does a call has ended."""

    call_id: CallId
    run: Run


CommandKind: TypeAlias = (
    ToolResult | Decide | Steer | Cancel | Resolve | Progress | TopUp | Pause | Completed | AgentEnded
)


class Command(ByPerson, frozen=True, kw_only=True):
    """An entry of the inbox of a run."""

    command_id: CommandId
    time: float
    kind: CommandKind
