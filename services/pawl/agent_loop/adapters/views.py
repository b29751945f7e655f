"""The parts of the contract's messages that the public use cases look at."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from google.protobuf.message import Message

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.app.public_values import CallView, LeaseAnswer, LogGap, LoggedEvent, Reply, RunView
from pawl.chassis.ids import DEFAULT_AGENT
from pawl.chassis.translate import Exceptions
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, run_pb2
from pawl.job.v1 import ledger_pb2


def _unseen(message: type[Message], view: type[Any]) -> set[str]:
    return set(message.DESCRIPTOR.fields_by_name) - {field.name for field in fields(view)}


call_view: Final = wire.WIRE.struct(
    CallView,
    call_pb2.Call,
    Exceptions(
        read={
            "series": lambda call: wire.SERIES.read(call.approval.series) if call.approval.HasField("series") else None,
            "approval_digest": lambda call: call.approval.digest,
            "approval_count": lambda call: len(call.approval.approvals),
            "document": lambda call: call,
            "answer_schema_json": lambda call: call.question.answer_schema_json,
        },
        of_message=_unseen(call_pb2.Call, CallView),
    ),
).read
"""Return the view of a call."""
run_view: Final = wire.WIRE.struct(
    RunView,
    run_pb2.Run,
    Exceptions(
        read={
            "tokens_used": lambda run: run.usage.input_tokens + run.usage.output_tokens,
            "document": lambda run: run,
            "approvals_required": lambda run: run.options.approvals_required,
            "agent_name": lambda run: run.agent.name or DEFAULT_AGENT,
        },
        of_struct=("brought_tools",),
        of_message=_unseen(run_pb2.Run, RunView),
    ),
).read
"""Return the view of a run."""
reply: Final = wire.WIRE.struct(Reply, ledger_pb2.SendCommandResponse).read
"""Return the answer to a command."""
lease_answer: Final = wire.WIRE.struct(LeaseAnswer, ledger_pb2.LeaseOfferResponse).read
"""Return the answer to who asks for an offered call."""


def logged_event(event: event_pb2.RunEvent) -> LoggedEvent:
    """Return the view of an event."""
    kind = event.WhichOneof("kind")
    return LoggedEvent(
        seq=event.seq,
        size_bytes=event.ByteSize(),
        run_state=wire.RUN_STATES.read(event.run_changed.run.state) if kind == "run_changed" else None,
        call=call_view(event.call_changed.call) if kind == "call_changed" else None,
        document=event,
    )


def log_gap(gap: gap_pb2.Gap) -> LogGap:
    """Return the view of a gap."""
    return LogGap(to_seq=gap.to_seq, document=gap)
