"""The steps of a run, derived only from its log.

The same log always results in the same steps. Step ids are derived from rounds and call ids. The model adds one message
per round, so a message's round follows from the earlier messages. Some messages, such as an undo report, follow calls
that they did not request. Each of these messages gets its own round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import steps_pb2 as pb
from pawl.agent.v1.steps_pb2 import Step, StepChange
from pawl.event.v1 import call_pb2
from pawl.event.v1.call_pb2 import Call
from pawl.event.v1.event_pb2 import OutputDelta, RunEvent
from pawl.event.v1.gap_pb2 import Gap
from pawl.event.v1.message_pb2 import ROLE_ASSISTANT, Message
from pawl.values import ENDED, SETTLED

_STATUS: Final = {
    call_pb2.CALL_STATE_PROPOSED: pb.STEP_STATUS_ACTIVE,
    call_pb2.CALL_STATE_RUNNABLE: pb.STEP_STATUS_ACTIVE,
    call_pb2.CALL_STATE_RUNNING: pb.STEP_STATUS_ACTIVE,
    call_pb2.CALL_STATE_DELEGATED: pb.STEP_STATUS_ACTIVE,
    call_pb2.CALL_STATE_AWAITING_APPROVAL: pb.STEP_STATUS_WAITING,
    call_pb2.CALL_STATE_OFFERED: pb.STEP_STATUS_WAITING,
    call_pb2.CALL_STATE_ASKED: pb.STEP_STATUS_WAITING,
    call_pb2.CALL_STATE_SUCCEEDED: pb.STEP_STATUS_DONE,
    call_pb2.CALL_STATE_DETACHED: pb.STEP_STATUS_DONE,
    call_pb2.CALL_STATE_FAILED: pb.STEP_STATUS_FAILED,
    call_pb2.CALL_STATE_OUTCOME_UNKNOWN: pb.STEP_STATUS_FAILED,
    call_pb2.CALL_STATE_REJECTED: pb.STEP_STATUS_STOPPED,
    call_pb2.CALL_STATE_EXPIRED: pb.STEP_STATUS_STOPPED,
    call_pb2.CALL_STATE_CANCELLED: pb.STEP_STATUS_STOPPED,
}
_ORDER: Final = {
    pb.STEP_TYPE_REASONING: 0,
    pb.STEP_TYPE_PLANNING: 1,
    pb.STEP_TYPE_ANSWER: 1,
    pb.STEP_TYPE_TOOL_CALL: 2,
    pb.STEP_TYPE_QUESTION: 2,
    pb.STEP_TYPE_RESULT: 3,
}


class Steps:
    """The steps of one run. Pass it the log in order. Not safe for concurrent use."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._indexes: dict[str, int] = {}
        self._last_message_round = 0
        self._last_call_round = 0
        self._round_of_call: dict[str, int] = {}

    def all(self) -> Sequence[Step]:
        """Return the current steps by round. Within a round, reasoning comes first, then text, then calls."""
        shown = (step for step in self._steps.values() if step.status != pb.STEP_STATUS_VOID)
        return sorted(shown, key=self._sort_key)

    def take(self, events: Iterable[RunEvent]) -> Sequence[StepChange]:
        """Apply events. Return each changed step once, in order."""
        before = self._steps.copy()
        for event in events:
            self._take(event)
        changed = [step for step_id, step in self._steps.items() if before.get(step_id) != step]
        return [_change(before.get(step.step_id), step) for step in sorted(changed, key=self._sort_key)]

    def take_gap(self, gap: Gap) -> Sequence[StepChange]:
        """Apply the messages and calls of a run that has ended, instead of its log. Return all steps."""
        messages, calls = gap.snapshot.messages, gap.snapshot.calls
        self._round_of_call = {call.call_id: call.round for call in calls}
        followed = {call_id for message in messages for call_id in message.call_ids}
        # Calls without a message come before the message that reports on them.
        self._last_call_round = max((call.round for call in calls if call.call_id not in followed), default=0)
        for message in messages:
            self._on_message(message)
        for call in calls:
            self._on_call(call)
        return [StepChange(step=step) for step in self.all()]

    def _take(self, event: RunEvent) -> None:
        match event.WhichOneof("kind"):
            case "output_delta":
                self._on_output(event.output_delta, event.time)
            case "round_retrying":
                self._void(event.round_retrying.round, event.time)
            case "message_added":
                self._on_message(event.message_added.message)
            case "call_changed":
                self._on_call(event.call_changed.call)
            case "run_changed" if event.run_changed.run.state in ENDED:
                self._on_end(event.time)
            case _:
                pass

    def _put(self, step: Step) -> None:
        self._steps[step.step_id] = step

    def _on_output(self, delta: OutputDelta, time: Timestamp) -> None:
        if delta.reasoning:
            self._append(_reasoning_id(delta.round), pb.STEP_TYPE_REASONING, delta.round, delta.reasoning, time)
        text_id, text = _text_id(delta.round), delta.text or delta.refusal
        if text:
            self._append(text_id, pb.STEP_TYPE_ANSWER, delta.round, text, time)
        text_step = self._steps.get(text_id)
        if delta.calls and text_step is not None and text_step.status == pb.STEP_STATUS_ACTIVE:
            self._put(_changed(text_step, type=pb.STEP_TYPE_PLANNING, time=time))

    def _append(
        self, step_id: str, kind: pb.StepType.ValueType, round_number: int, added: str, time: Timestamp
    ) -> None:
        old = self._steps.get(step_id)
        if old is None or old.status != pb.STEP_STATUS_ACTIVE:
            active = pb.STEP_STATUS_ACTIVE
            self._put(Step(step_id=step_id, type=kind, status=active, round=round_number, content=added, time=time))
        else:
            self._put(_changed(old, content=old.content + added, time=time))

    def _void(self, round_number: int, time: Timestamp) -> None:
        for step_id in (_reasoning_id(round_number), _text_id(round_number)):
            step = self._steps.get(step_id)
            if step is not None and step.status == pb.STEP_STATUS_ACTIVE:
                self._put(_changed(step, status=pb.STEP_STATUS_VOID, content="", time=time))

    def _on_message(self, message: Message) -> None:
        if message.role != ROLE_ASSISTANT:
            return
        known = [self._round_of_call[call_id] for call_id in message.call_ids if call_id in self._round_of_call]
        number = known[0] if known else max(self._last_message_round, self._last_call_round) + 1
        self._last_message_round = number
        of_message: dict[str, Any] = {
            "status": pb.STEP_STATUS_STOPPED if message.interrupted else pb.STEP_STATUS_DONE,
            "time": message.create_time,
        }
        reasoning_id = _reasoning_id(number)
        if message.reasoning:
            step = Step(step_id=reasoning_id, type=pb.STEP_TYPE_REASONING, round=number, content=message.reasoning)
            self._put(_changed(step, **of_message, model=message.model))
        elif reasoning_id in self._steps:
            # An interrupted answer is stored without its reasoning; the log has it.
            self._put(_changed(self._steps[reasoning_id], **of_message))
        content = message.text or message.refusal
        if content:
            kind = pb.STEP_TYPE_PLANNING if message.call_ids else pb.STEP_TYPE_ANSWER
            step = Step(step_id=_text_id(number), type=kind, round=number, content=content)
            self._put(_changed(step, **of_message, model=message.model))

    def _on_call(self, call: Call) -> None:
        self._last_call_round = max(self._last_call_round, call.round)
        is_question = call.HasField("question")
        times = [getattr(call, name) for name in ("end_time", "start_time", "create_time") if call.HasField(name)]
        step = Step(
            step_id=call.call_id,
            type=pb.STEP_TYPE_QUESTION if is_question else pb.STEP_TYPE_TOOL_CALL,
            status=_STATUS[call.state],
            round=call.round,
            content=call.question.question if is_question else _arguments(call),
            tool_name=call.tool_name,
            call_id=call.call_id,
            time=times[0] if times else Timestamp(),
        )
        self._indexes[call.call_id] = call.index
        self._put(step)
        if call.state in SETTLED:
            whole = "" if call.result_omitted_bytes else call.result.content_json.decode(errors="replace")
            result = _changed(step, step_id=f"{call.call_id}-result", type=pb.STEP_TYPE_RESULT, content=whole)
            result.content_omitted_bytes = call.result_omitted_bytes
            self._put(result)

    def _on_end(self, time: Timestamp) -> None:
        for step in list(self._steps.values()):
            if step.status == pb.STEP_STATUS_ACTIVE and not step.call_id:
                self._put(_changed(step, status=pb.STEP_STATUS_STOPPED, time=time))

    def _sort_key(self, step: Step) -> tuple[int, int, int, int]:
        kind = _ORDER[step.type]
        # A result comes right after its call.
        return step.round, min(kind, _ORDER[pb.STEP_TYPE_TOOL_CALL]), self._indexes.get(step.call_id, 0), kind


def _changed(step: Step, **fields: Any) -> Step:
    """Return a modified copy of `step`, because clients may already have been sent `step` itself."""
    changed = Step(**fields)
    whole = Step()
    whole.CopyFrom(step)
    for name in fields:
        whole.ClearField(name)  # type: ignore[arg-type]  # a field of the message
    whole.MergeFrom(changed)
    return whole


def _change(before: Step | None, step: Step) -> StepChange:
    if before is None or step.status == pb.STEP_STATUS_VOID or not before.content:
        return StepChange(step=step)
    if step.type != pb.STEP_TYPE_RESULT and step.content.startswith(before.content):
        return StepChange(step=_changed(step, content=step.content[len(before.content) :]), appends=True)
    return StepChange(step=step)


def _reasoning_id(round_number: int) -> str:
    return f"{round_number}-reasoning"


def _text_id(round_number: int) -> str:
    return f"{round_number}-text"


def _arguments(call: Call) -> str:
    return call.arguments_json.decode(errors="replace") or call.proposed_arguments
