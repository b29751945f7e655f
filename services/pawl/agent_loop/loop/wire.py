"""Converts between the loop's values and protobuf messages."""

from __future__ import annotations

from enum import Enum
from typing import Final

from pawl.agent_loop.loop.rules.call import ApprovalRequest, Call, CallResult
from pawl.agent_loop.loop.rules.fact import (
    AgentEnded,
    Cancel,
    Command,
    Completed,
    Decide,
    Event,
    OutputDelta,
    Pause,
    Progress,
    RaiseGoal,
    Resolve,
    RoundEnded,
    RoundRetrying,
    RoundStarted,
    Steer,
    ToolProgress,
    ToolResult,
    TopUp,
    Warned,
)
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.options import AskedOptions
from pawl.agent_loop.loop.rules.parts import Part
from pawl.agent_loop.loop.rules.run import (
    Delegation,
    FailureClass,
    Goal,
    Grant,
    Job,
    PinnedAgent,
    PinnedWorkflow,
    Run,
    RunOptions,
    Undo,
)
from pawl.agent_loop.loop.rules.tool import Tool
from pawl.chassis.rpc.translate import Exceptions, Translator, enum_defaults, kinds_of
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, event_pb2, goal_pb2, message_pb2, run_pb2, workflow_pb2
from pawl.job.v1 import ledger_pb2
from pawl.tool.v1 import tool_pb2
from pawl.values import EffectClass, ExecutionContext, JobReports, OfferFallback, QuestionKind, Series, Usage

_DEFAULTS: Final[dict[type[Enum], Enum]] = {
    **enum_defaults(RunOptions()),
    EffectClass: EffectClass.AT_MOST_ONCE,
    FailureClass: FailureClass.INTERNAL,
    OfferFallback: OfferFallback.FAIL,
    QuestionKind: QuestionKind.CLARIFICATION,
    JobReports: JobReports.EVERY,
}


def _result(message: call_pb2.Call) -> CallResult | None:
    """Return the result, a placeholder if the ledger omitted it, or None if the call is open."""
    if message.HasField("result"):
        return RESULT.read(message.result)
    if not message.result_omitted_bytes:
        return None
    size_bytes = message.result_omitted_bytes
    return CallResult(content_json=b"null", note=f"The result of {size_bytes} bytes is too large to repeat here.")


WIRE: Final = Translator(lambda unknown: ValueError(f"{unknown.value} is not a known value"), defaults=_DEFAULTS)
# For client requests: an unknown value raises InvalidField.
CLIENTS: Final = Translator(
    lambda unknown: InvalidField(f"{unknown.field} has an unknown value", field=unknown.field),
    defaults=enum_defaults(AskedOptions()),
)
_LIMITS_ASKED: Final = Exceptions(
    read={"limits": lambda message: {field.name: value for field, value in message.limits.ListFields()}},
    write={"limits": lambda asked: dict(asked.limits) or None},
)
# Reads the options that a client requests. Raises InvalidField for an unknown enum value.
asked_options: Final = CLIENTS.struct(AskedOptions, run_pb2.RunOptions, _LIMITS_ASKED, field="options").read

USAGE: Final = WIRE.struct(Usage, run_pb2.Usage)
JOB: Final = WIRE.struct(Job, run_pb2.Job)
SERIES: Final = WIRE.struct(Series, call_pb2.Series)
WIRE.struct(Grant, call_pb2.Grant, Exceptions(of_message=("uses",)))
UNDO: Final = WIRE.struct(Undo, run_pb2.Undo)
WORKFLOW: Final = WIRE.struct(PinnedWorkflow, workflow_pb2.PinnedWorkflow)
LIMITS: Final = WIRE.struct(Limits, run_pb2.RunLimits)
OPTIONS: Final = WIRE.struct(RunOptions, run_pb2.RunOptions)
ASKED: Final = WIRE.struct(AskedOptions, run_pb2.RunOptions, _LIMITS_ASKED)
AGENT: Final = WIRE.struct(PinnedAgent, run_pb2.PinnedAgent)
GOAL: Final = WIRE.struct(Goal, goal_pb2.Goal)
WIRE.struct(Delegation, ledger_pb2.Delegation)
RUN: Final = WIRE.struct(
    Run,
    run_pb2.Run,
    Exceptions(
        of_message=(
            "epoch",
            "create_time",
            "start_time",
            "end_time",
            "pending_calls",
            "active_calls",
            "attention",
            "crash_count",
            "token_budget",
            "queue_position",
            "waiting",
            "update_time",
            "progress_time",
            "call_counts",
            "child_run_ids",
            "labels",
            "trimmed_rounds",
            "trimmed_failures",
            "lowered_limits",
        )
    ),
)
PART: Final = WIRE.struct(Part, message_pb2.Part)
MESSAGE: Final = WIRE.struct(
    Message,
    message_pb2.Message,
    # The ledger assigns ids, numbers and times.
    Exceptions(
        unwritten=("run_id", "number", "user_id"),
        of_message=("message_id", "conversation_id", "create_time"),
    ),
)
RESULT: Final = WIRE.struct(CallResult, call_pb2.CallResult)
WIRE.struct(
    ApprovalRequest,
    call_pb2.ApprovalRequest,
    Exceptions(
        read={"approvals_required": lambda message: max(1, message.approvals_required)},
        unwritten=("decision", "approvals", "earlier_approvals"),
    ),
)
CALL: Final = WIRE.struct(
    Call,
    call_pb2.Call,
    Exceptions(
        read={"result": _result},
        # The ledger knows the call's owner and leaseholder, and sets the times.
        unwritten=("store_id", "conversation_id", "run_id", "offer", "create_time", "start_time", "end_time"),
        of_message=("user_id", "result_omitted_bytes"),
    ),
)
# A tool that the client supplied with the run.
OWN_TOOL: Final = WIRE.struct(
    Tool,
    tool_pb2.OwnTool,
    Exceptions(
        read={
            "name": lambda message: message.definition.name,
            "version": lambda _: 1,
            "description": lambda message: message.definition.description,
            "arguments_schema_json": lambda message: message.definition.arguments_schema_json,
            "fallback_tool_name": lambda message: message.definition.fallback_tool_name,
            "context": lambda _: ExecutionContext.FRONTEND,
            "own_definition": lambda message: message.definition.SerializeToString(),
        },
        write={"definition": lambda tool: tool_pb2.ToolDefinition.FromString(tool.own_definition)},
    ),
)


WIRE.struct(ToolProgress, event_pb2.ToolProgress, Exceptions(of_struct=("has_checkpoint",)))
EVENT: Final = WIRE.one_of(
    event_pb2.RunEvent,
    "kind",
    {
        "round_started": RoundStarted,
        "round_retrying": RoundRetrying,
        "round_ended": RoundEnded,
        "output_delta": OutputDelta,
        "tool_progress": ToolProgress,
        "warning": Warned,
    },
    # Only the ledger sets these.
    without=(
        *("run_changed", "message_added", "call_changed", "operator_acted", "run_topped_up"),
        *("starter_paused", "starter_fired"),
    ),
)

WIRE.struct(ToolResult, ledger_pb2.ToolResultCommand, Exceptions(of_message=("client_id", "offer_epoch")))
WIRE.struct(Decide, ledger_pb2.DecisionCommand, Exceptions(of_message=("digest",)))
WIRE.struct(
    Progress,
    ledger_pb2.ProgressCommand,
    Exceptions(of_message=("call_id", "fraction", "message", "client_id", "offer_epoch")),
)
WIRE.struct(RaiseGoal, ledger_pb2.RaiseGoalCommand)
KIND: Final = WIRE.one_of(
    ledger_pb2.Command,
    "kind",
    {
        "tool_result": ToolResult,
        "decision": Decide,
        "steer": Steer,
        "cancel": Cancel,
        "resolve": Resolve,
        "progress": Progress,
        "top_up": TopUp,
        "pause": Pause,
        "raise_goal": RaiseGoal,
        "event": Event,
        "completed": Completed,
        "agent_ended": AgentEnded,
    },
    without=("redrive",),  # Only the ledger handles it.
)
COMMAND: Final = WIRE.struct(
    Command, ledger_pb2.Command, Exceptions(read={"kind": KIND.read}, of_message=kinds_of(ledger_pb2.Command, "kind"))
)
