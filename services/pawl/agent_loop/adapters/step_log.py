"""The log of a run, as far as steps are made from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.domain.step_history import Called, Over, Said, StepChange, StepFact, Steps, Voided, Wrote
from pawl.chassis.translate import seconds
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, message_pb2
from pawl.values.run import ENDED


def take_in(steps: Steps, part: Sequence[event_pb2.RunEvent] | gap_pb2.Gap) -> tuple[StepChange, ...]:
    """Give a part of the log to steps; returns what it has changed."""
    if isinstance(part, gap_pb2.Gap):
        return _take_gap(steps, part)
    return steps.take(fact for event in part for fact in _facts(event))


def _facts(event: event_pb2.RunEvent) -> Iterator[StepFact]:
    time = seconds(event.time)
    match event.WhichOneof("kind"):
        case "output_delta":
            delta = event.output_delta
            text = delta.text or delta.refusal
            yield Wrote(round=delta.round, text=text, reasoning=delta.reasoning, asks=bool(delta.calls), time=time)
        case "round_retrying":
            yield Voided(round=event.round_retrying.round, time=time)
        case "message_added":
            yield _said(event.message_added.message)
        case "call_changed":
            yield _called(event.call_changed.call)
        case "run_changed" if event.run_changed.run.state in ENDED:
            yield Over(time=time)
        case _:
            pass


def _said(message: message_pb2.Message) -> Said:
    return Said(message=wire.MESSAGE.read(message), time=seconds(message.create_time))


def _called(call: call_pb2.Call) -> Called:
    return Called(call=wire.CALL.read(call), result_omitted_bytes=call.result_omitted_bytes)


def _take_gap(steps: Steps, gap: gap_pb2.Gap) -> tuple[StepChange, ...]:
    snapshot = gap.snapshot
    steps.skip_to([_said(message) for message in snapshot.messages], [_called(call) for call in snapshot.calls])
    return tuple(StepChange(step=step) for step in steps.all())
