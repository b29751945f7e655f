"""The parts of the contract's messages that the public use cases look at."""

from __future__ import annotations

from typing import Final

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.app.public_values import CallView, LogGap, LoggedEvent, RunView
from pawl.agent_loop.domain.call import CallState
from pawl.agent_loop.domain.run import RunState
from pawl.chassis.translate import seconds
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, run_pb2

_wire: Final = wire.translator({CallState: CallState.PROPOSED, RunState: RunState.QUEUED})
_CALL_STATES: Final = _wire.enum(CallState, call_pb2.CallState)
_RUN_STATES: Final = _wire.enum(RunState, run_pb2.RunState)


def call_view(call: call_pb2.Call) -> CallView:
    """Return the view of a call."""
    return CallView(
        run_id=call.run_id,
        call_id=call.call_id,
        conversation_id=call.conversation_id,
        tool_name=call.tool_name,
        tool_version=call.tool_version,
        state=_CALL_STATES.read(call.state),
        holder_client_id=call.offer.client_id,
        offer_epoch=call.offer.offer_epoch,
        offer_expire_time=seconds(call.offer.expire_time),
        user_id=call.user_id,
        approval_digest=call.approval.digest,
        approval_count=len(call.approval.approvals),
        deadline_time=seconds(call.deadline_time),
        document=call,
        answer_schema_json=call.question.answer_schema_json,
    )


def run_view(run: run_pb2.Run) -> RunView:
    """Return the view of a run."""
    return RunView(
        run_id=run.run_id,
        conversation_id=run.conversation_id,
        user_id=run.user_id,
        state=_RUN_STATES.read(run.state),
        last_seq=run.last_seq,
        undo=wire.UNDO.read(run.undo) if run.HasField("undo") else None,
        pending_calls=tuple(call_view(call) for call in run.pending_calls),
        token_budget=run.token_budget,
        tokens_used=run.usage.input_tokens + run.usage.output_tokens,
        document=run,
        user_roles=frozenset(run.user_roles),
        credential_id=run.credential_id,
        delegate_user_id=run.delegate_user_id,
        approvals_required=run.options.approvals_required,
    )


def logged_event(event: event_pb2.RunEvent) -> LoggedEvent:
    """Return the view of an event."""
    kind = event.WhichOneof("kind")
    return LoggedEvent(
        seq=event.seq,
        size_bytes=event.ByteSize(),
        run_state=_RUN_STATES.members.get(event.run_changed.run.state) if kind == "run_changed" else None,
        call=call_view(event.call_changed.call) if kind == "call_changed" else None,
        document=event,
    )


def log_gap(gap: gap_pb2.Gap) -> LogGap:
    """Return the view of a gap."""
    return LogGap(to_seq=gap.to_seq, document=gap)
