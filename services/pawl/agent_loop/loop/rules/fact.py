"""The outcomes of this process's work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec
from msgspec import field

from pawl.agent_loop.agents.rules import AgentVersion
from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.background import Wish
from pawl.agent_loop.loop.rules.call import ByPerson, Call, CallResult
from pawl.agent_loop.loop.rules.run import PinnedTool, Run, RunFailure
from pawl.agent_loop.loop.rules.tool import ExecutionResult, Stopped, Verdict
from pawl.agent_loop.model.request import Problem
from pawl.agent_loop.undo.rules import UndoPlan
from pawl.chassis.ids import CallId, CommandId
from pawl.values import CallResolution, DecisionKind, Series, StopCause, Usage


class ToolsPinned(msgspec.Struct, frozen=True, kw_only=True):
    """The run can begin: the registry said which tools it may use, and from `cursor` its program goes on."""

    tools: tuple[PinnedTool, ...]
    left_out: int = 0
    """The number left out, because a run can have no more."""
    cursor: UndoPlan | None = None


class RunRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The run cannot begin."""

    failure: RunFailure


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """Output of the open model call that the log has: the first and the last seq; 0 if none."""

    first_seq: int = 0
    last_seq: int = 0


class OutputChecked(msgspec.Struct, frozen=True, kw_only=True):
    """An answer beside the response format of its run: the JSON of one that fits, or everything that is wrong."""

    output_json: bytes = b""
    faults: tuple[str, ...] = ()


class ModelAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """The model answered; its calls as drafted, and the verdict on each that may be run.

    `output` is None where no form of the answer was asked for, or it is not what the run may end with.
    """

    answer: ModelAnswer
    calls: tuple[Call, ...] = ()
    verdicts: Mapping[CallId, Verdict] = field(default_factory=dict)
    output: OutputChecked | None = None
    wishes: Mapping[CallId, Wish] = field(default_factory=dict)
    """The calls that are to run in the background."""
    shown: Shown = field(default_factory=Shown)


class ModelFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The model call failed after it had written `answer`; `jitter` is from 0 to 1.

    `tokens_needed`: it was not made, because so many tokens are more than what is left. `quota_end_time`: it was not
    made, because the agent has used up its tokens of the day that ends then.
    """

    error: Problem
    answer: ModelAnswer
    jitter: float
    tokens_needed: int = 0
    quota_end_time: float | None = None
    shown: Shown = field(default_factory=Shown)


class ModelCut(msgspec.Struct, frozen=True, kw_only=True):
    """The model call was stopped after it had written `answer`; `failure` is why, if the run is to fail for it."""

    answer: ModelAnswer
    shown: Shown = field(default_factory=Shown)
    failure: RunFailure | None = None


class CallExecuted(msgspec.Struct, frozen=True, kw_only=True):
    """An execution ended."""

    call_id: CallId
    ended: ExecutionResult


class CallStopped(msgspec.Struct, frozen=True, kw_only=True):
    """The cancellation of an execution was answered."""

    call_id: CallId
    answer: Stopped


class FallbackChecked(msgspec.Struct, frozen=True, kw_only=True):
    """The registry judged the backend tool that shall replace a call's front end."""

    call_id: CallId
    verdict: Verdict


class AgentRead(msgspec.Struct, frozen=True, kw_only=True):
    """The agent that a call gives a task to: None unless it is there and one of `delegates`.

    Those are the ones to which the agent of the run may give tasks.
    """

    call_id: CallId
    delegates: tuple[str, ...] = ()
    agent: AgentVersion | None = None


class CallsRead(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that the program has named, as they are."""

    calls: tuple[Call, ...]


class CallChecked(msgspec.Struct, frozen=True, kw_only=True):
    """The registry judged a call that the program has proposed."""

    call: Call
    verdict: Verdict


Fact: TypeAlias = (
    ToolsPinned
    | RunRefused
    | ModelAnswered
    | ModelFailed
    | ModelCut
    | CallExecuted
    | CallStopped
    | FallbackChecked
    | AgentRead
    | CallsRead
    | CallChecked
)


TAKEOVER: Final = "TAKEOVER"
"""Reason of RoundRetrying when the worker that made the call is gone."""


class RoundStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The model is being called."""

    round: int
    model_attempt: int
    model: str
    without_tools: bool = False
    summary: bool = False


class RoundRetrying(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt failed and the next one, of `model`, follows; output from `void_from_seq` on is void.

    `usage` is what the failed one used.
    """

    round: int
    model_attempt: int
    reason: str
    message: str
    delay_seconds: float = 0.0
    void_from_seq: int = 0
    usage: Usage = field(default_factory=Usage)
    model: str = ""


class RoundEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The model call ended."""

    round: int
    model_attempt: int
    finish_reason: str
    usage: Usage


class CallFragment(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a call that the model is writing, for display."""

    index: int
    tool_name: str = ""
    arguments_text: str = ""


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A coalesced piece of the model's output."""

    round: int
    model_attempt: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallFragment, ...] = ()
    refusal: str = ""


class ToolProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A running tool reports progress; `fraction` is from 0 to 1."""

    call_id: CallId
    tool_name: str
    fraction: float | None = None
    message: str = ""


class Warned(msgspec.Struct, frozen=True, kw_only=True):
    """A remark on the run: a reason for programs, a message for people."""

    reason: str
    message: str


OwnerEvent: TypeAlias = RoundStarted | RoundRetrying | RoundEnded | OutputDelta | ToolProgress | Warned


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
    """A request to stop the run."""

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
    """An addition to the token budget."""

    tokens: int


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A request to pause or resume a job."""

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
