"""Events that the owner of a run supplies, and commands that it reads, from and to messages of the contract."""

from __future__ import annotations

from typing import assert_never

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.domain.call import DecisionKind
from pawl.agent_loop.domain.command import (
    AgentEnded,
    CallResolution,
    Cancel,
    Command,
    CommandKind,
    Decide,
    Progress,
    Resolve,
    Steer,
    ToolResult,
    TopUp,
)
from pawl.agent_loop.domain.event import (
    OutputDelta,
    OwnerEvent,
    RoundEnded,
    RoundRetrying,
    RoundStarted,
    ToolProgress,
    Warned,
)
from pawl.agent_loop.domain.loop_state import NewerVersion
from pawl.agent_loop.domain.run import RunState
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.job.v1 import ledger_pb2


def event_message(event: OwnerEvent) -> event_pb2.RunEvent:
    """Return an event as the contract words it; the ledger fills in the rest."""
    match event:
        case RoundStarted():
            return event_pb2.RunEvent(
                round_started=event_pb2.RoundStarted(
                    round=event.round,
                    model_attempt=event.model_attempt,
                    model=event.model,
                    without_tools=event.without_tools,
                    summary=event.summary,
                )
            )
        case RoundRetrying():
            return event_pb2.RunEvent(
                round_retrying=event_pb2.RoundRetrying(
                    round=event.round,
                    model_attempt=event.model_attempt,
                    reason=event.reason,
                    message=event.message,
                    delay_seconds=event.delay_seconds,
                    void_from_seq=event.void_from_seq,
                    usage=wire.usage_message(event.usage),
                )
            )
        case RoundEnded():
            return event_pb2.RunEvent(
                round_ended=event_pb2.RoundEnded(
                    round=event.round,
                    model_attempt=event.model_attempt,
                    finish_reason=event.finish_reason,
                    usage=wire.usage_message(event.usage),
                )
            )
        case OutputDelta():
            return event_pb2.RunEvent(output_delta=_output_delta(event))
        case ToolProgress():
            return event_pb2.RunEvent(
                tool_progress=event_pb2.ToolProgress(
                    call_id=event.call_id, tool_name=event.tool_name, fraction=event.fraction, message=event.message
                )
            )
        case Warned():
            return event_pb2.RunEvent(warning=event_pb2.Warning(reason=event.reason, message=event.message))
        case _:
            assert_never(event)


def _output_delta(event: OutputDelta) -> event_pb2.OutputDelta:
    return event_pb2.OutputDelta(
        round=event.round,
        model_attempt=event.model_attempt,
        text=event.text,
        reasoning=event.reasoning,
        refusal=event.refusal,
        calls=[
            event_pb2.CallFragment(index=part.index, tool_name=part.tool_name, arguments_text=part.arguments_text)
            for part in event.calls
        ],
    )


def command(message: ledger_pb2.Command) -> Command:
    """Return a command as the loop sees it.

    Raises:
        NewerVersion: its kind is not known to this version.
    """
    return Command(
        command_id=message.command_id,
        user_id=message.user_id,
        time=wire.seconds(message.time),
        kind=_command_kind(message),
    )


def _command_kind(message: ledger_pb2.Command) -> CommandKind:
    match message.WhichOneof("kind"):
        case "tool_result":
            return ToolResult(call_id=message.tool_result.call_id, result=wire.result(message.tool_result.result))
        case "decision":
            decision = message.decision
            return Decide(
                call_id=decision.call_id,
                kind=wire.named(DecisionKind, call_pb2.DecisionKind, "DECISION_KIND_", decision.kind),
                arguments_json=decision.arguments_json,
                edited_digest=decision.edited_digest,
                reason=decision.reason,
                answer=decision.answer,
                edited_preview=decision.edited_preview,
            )
        case "steer":
            return Steer(text=message.steer.text)
        case "cancel":
            return Cancel(cause=wire.stop_cause(message.cancel.cause), reason=message.cancel.reason)
        case "resolve":
            resolve = message.resolve
            return Resolve(
                call_id=resolve.call_id,
                resolution=wire.named(
                    CallResolution, ledger_pb2.CallResolution, "CALL_RESOLUTION_", resolve.resolution
                ),
                content_json=resolve.content_json,
            )
        case "progress":
            progress = message.progress
            fraction = progress.fraction if progress.HasField("fraction") else None
            return Progress(call_id=progress.call_id, fraction=fraction, message=progress.message)
        case "top_up":
            return TopUp(tokens=message.top_up.tokens)
        case "agent_ended":
            return _agent_ended(message.agent_ended)
        case kind:
            raise NewerVersion(f"a command of kind {kind} is not known to this version")


def _agent_ended(message: ledger_pb2.AgentEndedCommand) -> AgentEnded:
    run = message.run
    return AgentEnded(
        call_id=message.call_id,
        run_id=run.run_id,
        state=wire.named(RunState, run_pb2.RunState, "RUN_STATE_", run.state, default=RunState.FAILED),
        usage=wire.usage(run.usage),
        output_text=run.output_text,
        failure=wire.failure(run.failure) if run.HasField("failure") else None,
    )
