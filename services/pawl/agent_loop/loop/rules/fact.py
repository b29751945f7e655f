"""Facts (outcomes of this worker's tasks), events and commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec
from msgspec import field

from pawl import values
from pawl.agent_loop.agents.rules import AgentVersion, RateReached, TokenBudget
from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.background import RequestedTerms
from pawl.agent_loop.loop.rules.call import ByPerson, Call, CallResult
from pawl.agent_loop.loop.rules.run import PinnedTool, Run, RunFailure
from pawl.agent_loop.loop.rules.tool import ExecutionResult, Stopped, Verdict
from pawl.agent_loop.model.request import Problem
from pawl.agent_loop.undo.rules import UndoPlan
from pawl.agent_loop.workflows.graph import Graph
from pawl.chassis.ids import CallId, CommandId, RunId
from pawl.values import CallResolution, DecisionKind, Series, StopCause, Usage


class ToolsPinned(msgspec.Struct, frozen=True, kw_only=True):
    """The registry has returned the run's tools, so the run can start. `cursor` is the program's initial cursor."""

    tools: tuple[PinnedTool, ...]
    # Tools beyond a run's maximum.
    left_out: int = 0
    cursor: UndoPlan | None = None


class ProgramRead(msgspec.Struct, frozen=True, kw_only=True):
    """The definition that the run executes. `tools` is None if the run had already pinned its tools."""

    graph: Graph
    tools: tuple[PinnedTool, ...] | None = None


class RunRefused(msgspec.Struct, frozen=True, kw_only=True):
    failure: RunFailure


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """The first and last seq of the open model call's output in the log. Both are 0 if there is no output."""

    first_seq: int = 0
    last_seq: int = 0


class OutputChecked(msgspec.Struct, frozen=True, kw_only=True):
    """The result of validating an answer against the response format: its JSON if it conforms, or all its faults."""

    output_json: bytes = b""
    faults: tuple[str, ...] = ()


class ModelAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """The model has answered. Contains the drafted calls, and the verdicts on the calls that the registry checked.

    `output` is None if there is no response format or the run cannot end with this answer.
    """

    answer: ModelAnswer
    calls: tuple[Call, ...] = ()
    verdicts: Mapping[CallId, Verdict] = field(default_factory=dict)
    output: OutputChecked | None = None
    # The calls to run in the background.
    terms: Mapping[CallId, RequestedTerms] = field(default_factory=dict)
    shown: Shown = field(default_factory=Shown)
    # Set if the call counts against limits (ModelCall.model_call_id). So in the other ends of a call.
    model_call_id: str = ""


class ModelFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The model call failed after `answer`. `jitter` is between 0 and 1.

    `tokens_needed` is set if the call was not made because too few tokens are left. `used_up` is the used-up budget, if
    that is why the call was not made.
    """

    error: Problem
    answer: ModelAnswer
    jitter: float
    tokens_needed: int = 0
    used_up: TokenBudget | RateReached | None = None
    shown: Shown = field(default_factory=Shown)
    model_call_id: str = ""


class ModelCut(msgspec.Struct, frozen=True, kw_only=True):
    """The model call was cancelled after `answer`. `failure` is set if the run must fail."""

    answer: ModelAnswer
    shown: Shown = field(default_factory=Shown)
    failure: RunFailure | None = None
    model_call_id: str = ""


class CallExecuted(msgspec.Struct, frozen=True, kw_only=True):
    call_id: CallId
    ended: ExecutionResult


class CallStopped(msgspec.Struct, frozen=True, kw_only=True):
    call_id: CallId
    answer: Stopped


class FallbackChecked(msgspec.Struct, frozen=True, kw_only=True):
    call_id: CallId
    verdict: Verdict


class AgentRead(msgspec.Struct, frozen=True, kw_only=True):
    """The agent that a call delegates to. `agent` is None unless the agent exists and is in `delegates`.

    `delegates` are the agents that the run's agent may delegate to. If a workflow carries out the call, only
    `workflow_version` is set.
    """

    call_id: CallId
    delegates: tuple[str, ...] = ()
    agent: AgentVersion | None = None
    workflow_version: int = 0


class CallsRead(msgspec.Struct, frozen=True, kw_only=True):
    """Calls requested with ReadCalls. If `run_id` is set, they are the last calls of that run."""

    calls: tuple[Call, ...]
    run_id: RunId = RunId("")


class CallChecked(msgspec.Struct, frozen=True, kw_only=True):
    call: Call
    verdict: Verdict


class ToolProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A progress report from a running tool. It is an event and, in a job, also a fact. `fraction` is between 0 and 1.

    `has_checkpoint` means that the tool has stored a checkpoint since the last progress report.
    """

    call_id: CallId
    tool_name: str
    fraction: float | None = None
    message: str = ""
    has_checkpoint: bool = False

    @classmethod
    def of(cls, call: Call, latest: values.Progress, unshown: ToolProgress | None) -> ToolProgress:
        """Return a call's latest progress report. It replaces `unshown`, which no step has reported yet."""
        return cls(
            call_id=call.call_id,
            tool_name=call.tool_name,
            fraction=latest.fraction,
            message=latest.message,
            has_checkpoint=latest.has_checkpoint or (unshown is not None and unshown.has_checkpoint),
        )


Fact: TypeAlias = (
    ToolsPinned
    | ProgramRead
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
    | ToolProgress
)


# Reason of RoundRetrying after the call's worker died.
TAKEOVER: Final = "TAKEOVER"


class RoundStarted(msgspec.Struct, frozen=True, kw_only=True):
    round: int
    model_attempt: int
    model: str
    without_tools: bool = False
    summary: bool = False


class RoundRetrying(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt failed, and the next one uses `model`. Output from `void_from_seq` on is void.

    `usage` is the failed attempt's usage.
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
    round: int
    model_attempt: int
    finish_reason: str
    usage: Usage
    request_sha256: str = ""
    output_tokens_max: int = 0


class CallFragment(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    tool_name: str = ""
    arguments_text: str = ""


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    round: int
    model_attempt: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallFragment, ...] = ()
    refusal: str = ""


class Warned(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    message: str


OwnerEvent: TypeAlias = RoundStarted | RoundRetrying | RoundEnded | OutputDelta | ToolProgress | Warned


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    call_id: CallId
    result: CallResult


class Decide(msgspec.Struct, frozen=True, kw_only=True):
    call_id: CallId
    kind: DecisionKind
    arguments_json: bytes = b""
    edited_digest: str = ""
    reason: str = ""
    answer: str = ""
    edited_preview: str = ""
    # True if the decision covers the call's series.
    for_series: bool = False
    edited_series: Series | None = None


class Steer(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    cause: StopCause
    reason: str = ""


class Resolve(msgspec.Struct, frozen=True, kw_only=True):
    """An operator resolved a call. `content_json` is set only with HAPPENED."""

    call_id: CallId
    resolution: CallResolution
    content_json: bytes = b""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A front end reported progress on a call. The ledger has already published it, so the run ignores it."""


class TopUp(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int


class RaiseGoal(msgspec.Struct, frozen=True, kw_only=True):
    """Raise a goal's limits: add attempts, postpone its deadline, and add tokens to its budget."""

    attempts: int = 0
    deadline_time: float | None = None
    tokens: int = 0


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    resumes: bool = False


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event for the run's program. Empty bytes mean null."""

    name: str
    payload_json: bytes = b""


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """A call was completed externally. The registry knows its result."""

    call_id: CallId


class AgentEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The run that carried out a call has ended. `job_ids` are the open jobs that reported to it."""

    call_id: CallId
    run: Run
    job_ids: tuple[RunId, ...] = ()


CommandKind: TypeAlias = (
    ToolResult
    | Decide
    | Steer
    | Cancel
    | Resolve
    | Progress
    | TopUp
    | RaiseGoal
    | Pause
    | Event
    | Completed
    | AgentEnded
)


class Command(ByPerson, frozen=True, kw_only=True):
    command_id: CommandId
    time: float
    kind: CommandKind
