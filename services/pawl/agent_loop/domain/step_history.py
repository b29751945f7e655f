"""The steps of a run, in order: made from its log, and only from it.

The same log gives the same steps with the same ids, whoever reads it and when:
ids are made of rounds and call ids. In each round the model adds one message, so
the round of a message is known from those before it; a message that follows
calls without one of its own, as the report of an undo does, is a round of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.domain.call import Call
from pawl.agent_loop.domain.message import Message, Role
from pawl.chassis.ids import CallId
from pawl.values.call import CallState


class StepType(StrEnum):
    """The types of step."""

    REASONING = "REASONING"
    PLANNING = "PLANNING"
    TOOL_CALL = "TOOL_CALL"
    RESULT = "RESULT"
    QUESTION = "QUESTION"
    ANSWER = "ANSWER"


class StepStatus(StrEnum):
    """The states of a step."""

    ACTIVE = "ACTIVE"
    WAITING = "WAITING"
    DONE = "DONE"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    VOID = "VOID"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a run did. `time` is when it changed last, in seconds since 1970."""

    step_id: str
    type: StepType
    status: StepStatus
    round: int
    index: int = 0
    content: str = ""
    content_omitted_bytes: int = 0
    tool_name: str = ""
    call_id: CallId = CallId("")
    time: float = 0.0
    model: str = ""


class StepChange(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is new or changed; with `appends`, `step.content` is only what was added to the content before."""

    step: Step
    appends: bool = False


class Wrote(msgspec.Struct, frozen=True, kw_only=True):
    """The log: the model wrote. With `asks` it has begun to write calls."""

    round: int
    text: str = ""
    reasoning: str = ""
    asks: bool = False
    time: float = 0.0


class Voided(msgspec.Struct, frozen=True, kw_only=True):
    """The log: what the model wrote in a round is void."""

    round: int
    time: float = 0.0


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """The log: a message entered the conversation."""

    message: Message
    time: float = 0.0


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """The log: a call is now like this; its result may have been left out for its size."""

    call: Call
    result_omitted_bytes: int = 0


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """The log: the run has ended."""

    time: float = 0.0


StepFact: TypeAlias = Wrote | Voided | Said | Called | Over

_STATUS: Final = {
    CallState.PROPOSED: StepStatus.ACTIVE,
    CallState.RUNNABLE: StepStatus.ACTIVE,
    CallState.RUNNING: StepStatus.ACTIVE,
    CallState.DELEGATED: StepStatus.ACTIVE,
    CallState.AWAITING_APPROVAL: StepStatus.WAITING,
    CallState.OFFERED: StepStatus.WAITING,
    CallState.ASKED: StepStatus.WAITING,
    CallState.SUCCEEDED: StepStatus.DONE,
    CallState.FAILED: StepStatus.FAILED,
    CallState.OUTCOME_UNKNOWN: StepStatus.FAILED,
    CallState.REJECTED: StepStatus.STOPPED,
    CallState.EXPIRED: StepStatus.STOPPED,
    CallState.CANCELLED: StepStatus.STOPPED,
}
_ORDER: Final = {
    StepType.REASONING: 0,
    StepType.PLANNING: 1,
    StepType.ANSWER: 1,
    StepType.TOOL_CALL: 2,
    StepType.QUESTION: 2,
    StepType.RESULT: 3,
}


class Steps:
    """The steps of one run. Give it the log in order; not safe to share."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._last_message_round = 0
        self._last_call_round = 0
        self._round_of_call: dict[CallId, int] = {}

    def all(self) -> tuple[Step, ...]:
        """Return the steps as they are, in order: by round, and within one as the model works."""
        shown = (step for step in self._steps.values() if step.status is not StepStatus.VOID)
        return tuple(sorted(shown, key=_place))

    def take(self, facts: Iterable[StepFact]) -> tuple[StepChange, ...]:
        """Take what the log says next; return each step that this has changed once, in order."""
        before = self._steps.copy()
        for fact in facts:
            self._take(fact)
        changed = [step for step_id, step in self._steps.items() if before.get(step_id) != step]
        return tuple(_change(before.get(step.step_id), step) for step in sorted(changed, key=_place))

    def skip_to(self, said: Sequence[Said], called: Sequence[Called]) -> None:
        """Take the messages and calls of a run that has ended in place of its log."""
        self._round_of_call = {each.call.call_id: each.call.round for each in called}
        followed = {call_id for each in said for call_id in each.message.call_ids}
        # Calls that no message asks for come before the message that reports on them.
        self._last_call_round = max(
            (each.call.round for each in called if each.call.call_id not in followed), default=0
        )
        for entry in said:
            self._said(entry)
        for each in called:
            self._called(each)

    def _take(self, fact: StepFact) -> None:
        match fact:
            case Wrote():
                self._wrote(fact)
            case Voided():
                self._void(fact)
            case Said():
                self._said(fact)
            case Called():
                self._called(fact)
            case Over():
                self._over(fact)
            case _:
                assert_never(fact)

    def _put(self, step: Step) -> None:
        self._steps[step.step_id] = step

    def _wrote(self, fact: Wrote) -> None:
        if fact.reasoning:
            self._append(_reasoning_id(fact.round), StepType.REASONING, fact.round, fact.reasoning, fact.time)
        text_id = _text_id(fact.round)
        if fact.text:
            self._append(text_id, StepType.ANSWER, fact.round, fact.text, fact.time)
        said = self._steps.get(text_id)
        if fact.asks and said is not None and said.status is StepStatus.ACTIVE:
            self._put(replace(said, type=StepType.PLANNING, time=fact.time))

    def _append(self, step_id: str, kind: StepType, round_number: int, added: str, time: float) -> None:
        old = self._steps.get(step_id)
        if old is None or old.status is not StepStatus.ACTIVE:
            new = Step(
                step_id=step_id, type=kind, status=StepStatus.ACTIVE, round=round_number, content=added, time=time
            )
            self._put(new)
        else:
            self._put(replace(old, content=old.content + added, time=time))

    def _void(self, fact: Voided) -> None:
        for step_id in (_reasoning_id(fact.round), _text_id(fact.round)):
            step = self._steps.get(step_id)
            if step is not None and step.status is StepStatus.ACTIVE:
                self._put(replace(step, status=StepStatus.VOID, content="", time=fact.time))

    def _said(self, fact: Said) -> None:
        message = fact.message
        if message.role is not Role.ASSISTANT:
            return
        known = [self._round_of_call[call_id] for call_id in message.call_ids if call_id in self._round_of_call]
        number = known[0] if known else max(self._last_message_round, self._last_call_round) + 1
        self._last_message_round = number
        status = StepStatus.STOPPED if message.interrupted else StepStatus.DONE
        reasoning_id = _reasoning_id(number)
        if message.reasoning:
            self._put(
                Step(
                    step_id=reasoning_id,
                    type=StepType.REASONING,
                    status=status,
                    round=number,
                    content=message.reasoning,
                    time=fact.time,
                    model=message.model,
                )
            )
        elif reasoning_id in self._steps:
            # An answer that broke off is kept without its reasoning; the log has it.
            self._put(replace(self._steps[reasoning_id], status=status, time=fact.time))
        content = message.text or message.refusal
        if content:
            kind = StepType.PLANNING if message.call_ids else StepType.ANSWER
            self._put(
                Step(
                    step_id=_text_id(number),
                    type=kind,
                    status=status,
                    round=number,
                    content=content,
                    time=fact.time,
                    model=message.model,
                )
            )

    def _called(self, fact: Called) -> None:
        call = fact.call
        self._last_call_round = max(self._last_call_round, call.round)
        is_question = call.question is not None
        time = call.end_time or call.start_time or call.create_time or 0.0
        asked = call.question.question if call.question is not None else _arguments(call)
        step = Step(
            step_id=call.call_id,
            type=StepType.QUESTION if is_question else StepType.TOOL_CALL,
            status=_STATUS[call.state],
            round=call.round,
            index=call.index,
            content=asked,
            tool_name=call.tool_name,
            call_id=call.call_id,
            time=time,
        )
        self._put(step)
        if call.settled:
            whole = call.result is not None and not fact.result_omitted_bytes
            content = call.result.content_json.decode(errors="replace") if whole and call.result else ""
            result = replace(
                step,
                step_id=f"{call.call_id}-result",
                type=StepType.RESULT,
                content=content,
                content_omitted_bytes=fact.result_omitted_bytes,
            )
            self._put(result)

    def _over(self, fact: Over) -> None:
        for step in list(self._steps.values()):
            if step.status is StepStatus.ACTIVE and not step.call_id:
                self._put(replace(step, status=StepStatus.STOPPED, time=fact.time))


def _change(before: Step | None, step: Step) -> StepChange:
    if before is None or step.status is StepStatus.VOID or not before.content:
        return StepChange(step=step)
    if step.type is not StepType.RESULT and step.content.startswith(before.content):
        return StepChange(step=replace(step, content=step.content[len(before.content) :]), appends=True)
    return StepChange(step=step)


def _place(step: Step) -> tuple[int, int, int, int]:
    kind = _ORDER[step.type]
    # A result stands behind its call.
    return step.round, min(kind, _ORDER[StepType.TOOL_CALL]), step.index, kind


def _reasoning_id(round_number: int) -> str:
    return f"{round_number}-reasoning"


def _text_id(round_number: int) -> str:
    return f"{round_number}-text"


def _arguments(call: Call) -> str:
    return call.arguments_json.decode(errors="replace") or call.proposed_arguments
