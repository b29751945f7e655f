"""Converts ledger events to API messages."""

from __future__ import annotations

from typing import Final, assert_never

from pawl.chassis.rpc.translate import Exceptions, Translator, kinds_of
from pawl.event.v1 import event_pb2, schedule_pb2
from pawl.job_store.ledger.rpc import messages
from pawl.job_store.ledger.rules.events import (
    CallChanged,
    Event,
    MessageAdded,
    OperatorActed,
    OwnerEvent,
    RunChanged,
    StarterFired,
    ToolProgressed,
    ToppedUp,
)
from pawl.job_store.schedules.rules import FireRow

_WIRE: Final = Translator(lambda unknown: ValueError(f"unknown value {unknown.value}"))
_EVENT: Final = _WIRE.struct(
    Event, event_pb2.RunEvent, Exceptions(of_struct=("body",), of_message=kinds_of(event_pb2.RunEvent, "kind"))
)
_TOPPED_UP: Final = _WIRE.struct(ToppedUp, event_pb2.RunToppedUp)
_ACTED: Final = _WIRE.struct(OperatorActed, event_pb2.OperatorActed)
FIRE: Final = _WIRE.struct(
    FireRow, schedule_pb2.ScheduleFire, Exceptions(of_message=("run_state",), of_struct=("request_id",))
)
_FIRED: Final = _WIRE.struct(StarterFired, event_pb2.StarterFired, Exceptions(of_struct=("starter",)))


def encode_event(event: Event) -> bytes:
    """Return the encoded event, which is the same for every watcher."""
    body, entry, rest = event.body, _EVENT.write(event), b""
    match body:
        case OwnerEvent():
            # In protobuf, concatenated encodings merge into one message; the header comes first.
            rest = body.body
        case RunChanged():
            if body.from_state is not None:
                entry.run_changed.from_state = body.from_state.value  # type: ignore[assignment]
            entry.run_changed.run.CopyFrom(messages.run(body.run))
        case CallChanged():
            if body.from_state is not None:
                entry.call_changed.from_state = body.from_state.value  # type: ignore[assignment]
            entry.call_changed.call.CopyFrom(messages.call(body.call, result_bytes_max=messages.EVENT_RESULT_BYTES_MAX))
            entry.call_changed.duration_seconds = body.duration_seconds
        case MessageAdded():
            entry.message_added.message.CopyFrom(messages.message(body.message, body.user_id))
        case ToolProgressed():
            progress = entry.tool_progress
            progress.call_id = body.call.call_id
            progress.tool_name = body.call.tool_name
            progress.message = body.message
            if body.fraction is not None:
                progress.fraction = body.fraction
        case ToppedUp():
            entry.run_topped_up.CopyFrom(_TOPPED_UP.write(body))
        case OperatorActed():
            entry.operator_acted.CopyFrom(_ACTED.write(body))
        case StarterFired():
            entry.starter_fired.CopyFrom(_FIRED.write(body))
        case _:
            assert_never(body)
    return entry.SerializeToString() + rest
