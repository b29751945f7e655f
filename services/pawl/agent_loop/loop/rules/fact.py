"""The outcomes of this process's work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from msgspec import field

from pawl.agent_loop.agents.rules import AgentVersion
from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.background import Wish
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.run import PinnedTool, RunFailure
from pawl.agent_loop.loop.rules.tool import ExecutionResult, Stopped, Verdict
from pawl.agent_loop.model.request import Problem
from pawl.agent_loop.undo.rules import UndoPlan
from pawl.chassis.ids import CallId


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
