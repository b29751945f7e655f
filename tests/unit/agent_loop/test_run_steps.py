"""Steps of a run are the same whether they are built live or later from the log."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from google.protobuf import json_format

from pawl.agent.v1 import steps_pb2 as pb
from pawl.agent.v1.steps_pb2 import Step, StepChange
from pawl.agent_loop.api.live import BusEvents
from pawl.agent_loop.api.step_history import Steps
from pawl.chassis.ids import RunId, StoreId
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, message_pb2, run_pb2
from pawl.event.v1.event_pb2 import RunEvent, RunEvents
from tests.golden import GAP, LOG, TOLD

NOW = 1_700_000_000


def events(*kinds: event_pb2.RunEvent) -> list[event_pb2.RunEvent]:
    for seq, event in enumerate(kinds, 1):
        event.seq = seq
        event.time.seconds = NOW + seq
    return list(kinds)


def delta(round_number: int, *, text: str = "", reasoning: str = "", tool: str = "") -> event_pb2.RunEvent:
    fragments = [event_pb2.CallFragment(tool_name=tool)] if tool else []
    return event_pb2.RunEvent(
        output_delta=event_pb2.OutputDelta(round=round_number, text=text, reasoning=reasoning, calls=fragments)
    )


def assistant(text: str, *, reasoning: str = "", calls: tuple[str, ...] = (), seq: int = 0) -> event_pb2.RunEvent:
    message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text, reasoning=reasoning, call_ids=calls)
    message.create_time.seconds = NOW + seq
    return event_pb2.RunEvent(message_added=event_pb2.MessageAdded(message=message))


def called(
    call_id: str,
    state: call_pb2.CallState.ValueType,
    *,
    round_number: int = 1,
    index: int = 0,
    question: str = "",
    omitted_bytes: int = 0,
) -> event_pb2.RunEvent:
    call = call_pb2.Call(
        call_id=call_id,
        round=round_number,
        index=index,
        tool_name="ask_user" if question else "write",
        state=state,
        arguments_json=b'{"n":1}',
        result_omitted_bytes=omitted_bytes,
    )
    if question:
        call.question.question = question
    if state >= call_pb2.CALL_STATE_SUCCEEDED and not omitted_bytes:
        call.result.content_json = b'"done"'
        call.end_time.seconds = NOW
    return event_pb2.RunEvent(call_changed=event_pb2.CallChanged(call=call))


def retrying(round_number: int) -> event_pb2.RunEvent:
    return event_pb2.RunEvent(round_retrying=event_pb2.RoundRetrying(round=round_number, void_from_seq=1))


def ended() -> event_pb2.RunEvent:
    return event_pb2.RunEvent(run_changed=event_pb2.RunChanged(run=run_pb2.Run(state=run_pb2.RUN_STATE_COMPLETED)))


def whole_run() -> list[event_pb2.RunEvent]:
    """Return the events of a run with a void attempt, two calls, a question and an answer."""
    user = message_pb2.Message(role=message_pb2.ROLE_USER, text="hello")
    return events(
        event_pb2.RunEvent(message_added=event_pb2.MessageAdded(message=user)),
        delta(1, reasoning="No, "),
        delta(1, text="Hm"),
        retrying(1),
        delta(1, reasoning="First I "),
        delta(1, reasoning="look.\n\u00e9"),
        delta(1, text="Let me"),
        delta(1, text=" see.", tool="write"),
        assistant("Let me see.", reasoning="First I look.\n\u00e9", calls=("call_b", "call_a"), seq=9),
        called("call_b", call_pb2.CALL_STATE_RUNNING),
        called("call_a", call_pb2.CALL_STATE_ASKED, index=1, question="Which?"),
        called("call_b", call_pb2.CALL_STATE_SUCCEEDED),
        called("call_a", call_pb2.CALL_STATE_SUCCEEDED, index=1, question="Which?"),
        delta(2, reasoning="Now all is known."),
        delta(2, text="Done."),
        assistant("Done.", reasoning="Now all is known.", seq=16),
        ended(),
    )


def steps_of(log: list[event_pb2.RunEvent]) -> Steps:
    steps = Steps()
    steps.take(log)
    return steps


def applied(shown: dict[str, Step], changes: Sequence[StepChange]) -> None:
    for change in changes:
        step, old = change.step, shown.get(change.step.step_id)
        step.content = old.content + step.content if change.appends and old else step.content
        shown[step.step_id] = step


def test_a_run_is_shown_as_steps() -> None:
    assert [(step.step_id, step.type, step.status, step.content) for step in steps_of(whole_run()).all()] == [
        ("1-reasoning", pb.STEP_TYPE_REASONING, pb.STEP_STATUS_DONE, "First I look.\n\u00e9"),
        ("1-text", pb.STEP_TYPE_PLANNING, pb.STEP_STATUS_DONE, "Let me see."),
        ("call_b", pb.STEP_TYPE_TOOL_CALL, pb.STEP_STATUS_DONE, '{"n":1}'),
        ("call_b-result", pb.STEP_TYPE_RESULT, pb.STEP_STATUS_DONE, '"done"'),
        ("call_a", pb.STEP_TYPE_QUESTION, pb.STEP_STATUS_DONE, "Which?"),
        ("call_a-result", pb.STEP_TYPE_RESULT, pb.STEP_STATUS_DONE, '"done"'),
        ("2-reasoning", pb.STEP_TYPE_REASONING, pb.STEP_STATUS_DONE, "Now all is known."),
        ("2-text", pb.STEP_TYPE_ANSWER, pb.STEP_STATUS_DONE, "Done."),
    ]


def test_steps_do_not_depend_on_how_changes_are_chunked() -> None:
    log = whole_run()
    whole = steps_of(whole_run()).all()
    for start in range(len(log)):
        for size in (1, 2, 5, len(log)):
            steps = Steps()
            steps.take(log[:start])
            shown = {step.step_id: step for step in steps.all()}
            for first in range(start, len(log), size):
                applied(shown, steps.take(log[first : first + size]))
            assert [shown[step.step_id] for step in whole] == whole
            assert all(step.status == pb.STEP_STATUS_VOID for step in shown.values() if step not in whole)


def test_the_undo_report_follows_its_calls_even_after_trimming() -> None:
    calls = [
        called("undo_b", call_pb2.CALL_STATE_SUCCEEDED, round_number=1),
        called("undo_a", call_pb2.CALL_STATE_FAILED, round_number=2),
    ]
    log = events(*calls, assistant("Undo of run run_1"), ended())
    snapshot = gap_pb2.RunSnapshot(
        messages=[log[2].message_added.message], calls=[event.call_changed.call for event in log[:2]]
    )
    steps = Steps()
    steps.take_gap(gap_pb2.Gap(to_seq=3, snapshot=snapshot))

    ids = [step.step_id for step in steps_of(log).all()]

    assert ids == ["undo_b", "undo_b-result", "undo_a", "undo_a-result", "3-text"]
    assert [step.step_id for step in steps.all()] == ids


# The golden log as steps; tests/unit/gateway and web/client read the same log.


def logged() -> list[Any]:
    return [json_format.ParseDict(each, event_pb2.RunEvent()) for each in json.loads(LOG.read_text())]


def shown(steps: Steps) -> list[dict[str, str]]:
    summaries: list[dict[str, str]] = []
    for step in steps.all():
        match step.type:
            case pb.STEP_TYPE_REASONING:
                summaries.append({"reasoning": step.content})
            case pb.STEP_TYPE_PLANNING | pb.STEP_TYPE_ANSWER:
                summaries.append({"text": step.content})
            case pb.STEP_TYPE_RESULT:
                (call,) = [each for each in summaries if each.get("call") == step.call_id]
                call["result"] = step.content
            case _:
                summaries.append({"call": step.call_id, "tool": step.tool_name, "arguments": step.content})
    return summaries


def expected() -> list[dict[str, str]]:
    """Return the steps that all readers should show, with the text of each question as its arguments."""
    summaries: list[dict[str, str]] = json.loads(TOLD.read_text())
    for each in summaries:
        if each.get("tool") == "ask_user":
            each["arguments"] = json.loads(each["arguments"])["question"]
    return summaries


@pytest.mark.parametrize("has_gap", [False, True])
def test_steps_match_the_golden_log_even_after_a_gap(*, has_gap: bool) -> None:
    steps = Steps()
    if has_gap:
        steps.take_gap(json_format.ParseDict(json.loads(GAP.read_text()), gap_pb2.Gap()))
    for each in logged()[-1:] if has_gap else logged():
        steps.take([each])
    assert shown(steps) == expected()


def test_an_omitted_result_reports_its_size() -> None:
    result = steps_of(events(called("call_1", call_pb2.CALL_STATE_SUCCEEDED, omitted_bytes=20_000))).all()[1]
    assert (result.content, result.content_omitted_bytes) == ("", 20_000)


# A live event is accepted only if it is about the watched run.


class Bus:
    deliver: Callable[[str, bytes], Awaitable[None]]

    async def subscribe(self, _subject: str, deliver: Callable[[str, bytes], Awaitable[None]]) -> None:
        self.deliver = deliver


async def test_only_valid_events_of_the_watched_run_are_accepted() -> None:
    bus: Any = Bus()
    taken: list[tuple[list[bytes], int]] = []

    async def take(events: Sequence[bytes], last: RunEvent) -> None:
        taken.append((list(events), last.seq))

    await BusEvents(bus).subscribe(StoreId("acme"), RunId("run_1"), take)
    own = [RunEvent(store_id="acme", run_id="run_1", seq=seq) for seq in (4, 5)]
    others = [RunEvent(store_id="acme", run_id="run_2", seq=6), RunEvent(store_id="other", run_id="run_1", seq=6)]
    for data in (*(RunEvents(events=[event]).SerializeToString() for event in others), b"", b"\xff", b"\x0a\x01\xff"):
        await bus.deliver("subject", data)
    await bus.deliver("subject", RunEvents(events=own).SerializeToString())
    assert taken == [([event.SerializeToString() for event in own], 5)]
