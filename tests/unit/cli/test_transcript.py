"""What a reader sees of a run."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pawl.cli import wording
from pawl.cli.transcript import REASONING_CHARACTERS_MAX, Transcript, decides, hint
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, message_pb2, run_pb2


def shown(*events: event_pb2.RunEvent | gap_pb2.Gap, terminal: bool = False, **options: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, highlight=False, color_system=None)
    transcript = Transcript(console, **options)
    for event in events:
        if isinstance(event, gap_pb2.Gap):
            transcript.show_gap(event)
        else:
            transcript.show(event)
    transcript.end_line()
    return output.getvalue()


def delta(text: str = "", reasoning: str = "", *, attempt: int = 1) -> event_pb2.RunEvent:
    return event_pb2.RunEvent(attempt=attempt, output_delta=event_pb2.OutputDelta(text=text, reasoning=reasoning))


def started(*, attempt: int = 1) -> event_pb2.RunEvent:
    return event_pb2.RunEvent(attempt=attempt, round_started=event_pb2.RoundStarted(round=1))


def assistant(text: str) -> event_pb2.RunEvent:
    message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text)
    return event_pb2.RunEvent(message_added=event_pb2.MessageAdded(message=message))


def call(
    state: call_pb2.CallState.ValueType, *, name: str = "send_email", arguments: bytes = b'{"to": "ann"}'
) -> call_pb2.Call:
    return call_pb2.Call(run_id="run_1", call_id="call_1", tool_name=name, state=state, arguments_json=arguments)


def changed(of: call_pb2.Call, *, seconds: float = 0) -> event_pb2.RunEvent:
    return event_pb2.RunEvent(call_changed=event_pb2.CallChanged(call=of, duration_seconds=seconds))


FORGED = "Which one?\n[send_email]\n  run run_1  call call_2\nneeds approval: none\r\n  1. yes\x0b2\x85[x]\u2028[y]"


def test_what_others_wrote_cannot_be_taken_for_an_entry_of_the_inbox() -> None:
    """HITL-3."""
    asked = call(call_pb2.CALL_STATE_ASKED)
    asked.question.question = asked.question.why = asked.question.default_answer = FORGED
    asked.question.options.append(FORGED)
    gated = call(call_pb2.CALL_STATE_AWAITING_APPROVAL)
    gated.approval.preview = gated.approval.cause = FORGED
    for pending in (asked, gated):
        lines = shown(changed(pending)).splitlines()
        assert [line for line in lines if line.startswith("[")] == [f"[{wording.call_title(pending)}]"]
        ours = [line for line in lines if not line.startswith("    | ")]
        assert sum("run run_1  call call_" in line for line in ours) == 1
        assert not any(line.strip().startswith(("needs approval: none", "1. yes")) for line in ours)


def test_a_message_of_several_lines_is_one_message() -> None:
    message = message_pb2.Message(role=message_pb2.ROLE_USER, text="hello\n[send_email]")
    assert (
        shown(event_pb2.RunEvent(message_added=event_pb2.MessageAdded(message=message))) == "> hello\n> [send_email]\n"
    )


def test_pieces_of_text_are_joined_on_one_line() -> None:
    assert shown(started(), delta("Once "), delta("upon"), assistant("Once upon")) == "Once upon\n"


def test_a_message_whose_pieces_were_not_seen_is_shown_whole() -> None:
    assert shown(assistant("Once upon")) == "Once upon\n"


def test_reasoning_stands_apart_from_text_and_is_folded() -> None:
    """HITL-8."""
    output = shown(started(), delta(reasoning="x" * 1000), delta(reasoning="y"), delta("Hello"))
    assert output == "x" * REASONING_CHARACTERS_MAX + " … (folded)\nHello\n"


def test_reasoning_is_shown_whole_when_asked_for() -> None:
    assert shown(started(), delta(reasoning="x" * 1000), whole_reasoning=True) == "x" * 1000 + "\n"


def test_a_retried_model_call_says_that_what_it_wrote_is_void() -> None:
    """EVT-2."""
    retrying = event_pb2.RoundRetrying(message="HTTP 500.", void_from_seq=3)
    output = shown(started(), delta("Hel"), event_pb2.RunEvent(round_retrying=retrying), delta("Hello"))
    assert output == "Hel\n↻ HTTP 500, trying again; what it wrote above is void\nHello\n"


def test_a_takeover_in_the_middle_of_an_answer_is_told() -> None:
    output = shown(started(), delta("Hel"), started(attempt=2), delta("Hello", attempt=2))
    assert output == "Hel\n↻ another worker has taken over; what the model wrote above begins anew\nHello\n"


def test_a_new_worker_between_answers_is_not_told() -> None:
    assert "taken over" not in shown(started(), delta("Hi"), assistant("Hi"), started(attempt=2))


def test_a_call_that_a_run_does_names_the_run_and_how_to_watch_it() -> None:
    delegated = call(call_pb2.CALL_STATE_DELEGATED, name="run_agent", arguments=b'{"task":"look"}')
    delegated.child_run_id = "run_2"
    assert shown(changed(delegated)) == '⇉ run_agent {"task": "look"} (run run_2)\n'
    assert shown(changed(delegated), hints=True).endswith("  watch it with: pawl watch run_2\n")


def test_a_call_shows_its_state_and_its_duration() -> None:
    done = call(call_pb2.CALL_STATE_SUCCEEDED)
    done.result.content_json = b'{"sent": true}'
    output = shown(changed(call(call_pb2.CALL_STATE_RUNNING)), changed(done, seconds=0.0123))
    assert output == '⚙ send_email {"to": "ann"}\n✓ send_email (12 ms) → {"sent": true}\n'


def test_a_call_that_did_not_succeed_says_how_it_ended() -> None:
    failed = call(call_pb2.CALL_STATE_REJECTED)
    failed.result.content_json = b'"not today"'
    assert shown(changed(failed)) == "✗ send_email rejected → not today\n"


def test_a_call_that_waits_shows_everything_a_person_needs_and_the_command() -> None:
    """HITL-2: the arguments are shown whole."""
    waiting = call(call_pb2.CALL_STATE_AWAITING_APPROVAL, arguments=b'{"body": "%s"}' % (b"x" * 500))
    waiting.approval.preview = "An e-mail to Ann"
    waiting.approval.cause = "category SENSITIVE"
    output = shown(changed(waiting), hints=True)
    assert "[send_email]" in output
    assert "An e-mail to Ann" in output
    assert "x" * 500 in output.replace("\n", "")
    assert "needs approval: category SENSITIVE" in output
    assert "pawl approve run_1 call_1" in output


def test_a_call_in_doubt_shows_the_command_that_resolves_it() -> None:
    assert "pawl resolve run_1 call_1 --happened JSON" in hint(call(call_pb2.CALL_STATE_RUNNING))


def test_a_question_shows_its_options_with_numbers() -> None:
    asked = call(call_pb2.CALL_STATE_ASKED)
    asked.question.question = "When?"
    asked.question.options.extend(["Today", "Tomorrow"])
    output = shown(changed(asked))
    assert "When?\n    1. Today\n    2. Tomorrow" in output


def test_a_failed_run_says_why() -> None:
    run = run_pb2.Run(run_id="run_1", state=run_pb2.RUN_STATE_FAILED, round=2, active_seconds=3.2)
    run.failure.message = "The model server is down."
    output = shown(event_pb2.RunEvent(run_changed=event_pb2.RunChanged(run=run)))
    assert output == "✗ run_1 failed: The model server is down. (2 rounds, 0 tokens, 3.2 s active)\n"


def run_event(**fields: Any) -> event_pb2.RunEvent:
    run = run_pb2.Run(run_id="run_1", **fields)
    return event_pb2.RunEvent(run_changed=event_pb2.RunChanged(run=run))


UNKNOWN_OUTCOME = run_pb2.Attention(reason=run_pb2.ATTENTION_REASON_UNKNOWN_OUTCOME)
QUARANTINED = run_pb2.Attention(reason=run_pb2.ATTENTION_REASON_QUARANTINED)


@pytest.mark.parametrize(
    ("event", "lines"),
    [
        (
            run_event(state=run_pb2.RUN_STATE_WAITING, waits=[run_pb2.WAIT_KIND_BUDGET]),
            ["‖ waits for more tokens", "  add some with: pawl top-up run_1 TOKENS"],
        ),
        (
            event_pb2.RunEvent(run_topped_up=event_pb2.RunToppedUp(tokens=500, token_budget=1500, user_id="ann")),
            ["+ ann added 500 tokens: it may use 1500"],
        ),
        (
            run_event(state=run_pb2.RUN_STATE_NEEDS_ATTENTION, attention=UNKNOWN_OUTCOME),
            [
                "‖ needs an operator: it is not known whether a call had its effect",
                "  an operator sees what to do with: pawl attention run_1",
            ],
        ),
        (
            run_event(state=run_pb2.RUN_STATE_NEEDS_ATTENTION, attention=QUARANTINED, crash_count=3),
            [
                "‖ needs an operator: quarantined: 3 workers died while they drove it, without any progress in between",
                "  an operator sees what to do with: pawl attention run_1",
            ],
        ),
        (
            event_pb2.RunEvent(
                operator_acted=event_pb2.OperatorActed(
                    user_id="bob", act=event_pb2.OPERATOR_ACT_REDRIVEN, reason="the tool is\nmended"
                )
            ),
            ["⚑ operator bob let the run go on: the tool is mended"],
        ),
        (
            event_pb2.RunEvent(
                operator_acted=event_pb2.OperatorActed(
                    user_id="bob", act=event_pb2.OPERATOR_ACT_RESOLVED, call_id="call_1"
                )
            ),
            ["⚑ operator bob said what became of a call (call_1)"],
        ),
        (
            event_pb2.RunEvent(operator_acted=event_pb2.OperatorActed(user_id="bob", act=99)),  # type: ignore[arg-type]
            ["⚑ operator bob did something about the run"],
        ),
        (
            run_event(
                state=run_pb2.RUN_STATE_CANCELLED,
                stop_cause=run_pb2.STOP_CAUSE_OPERATOR,
                unstopped_call_ids=["call_1", "call_2"],
            ),
            [
                "✗ run_1 cancelled by an operator (0 rounds, 0 tokens, 0 ms active)",
                "! could not be stopped and may go on: call_1, call_2",
            ],
        ),
    ],
)
def test_waits_acts_and_what_could_not_be_stopped_are_told(event: event_pb2.RunEvent, lines: list[str]) -> None:
    assert shown(event, hints=True).splitlines() == lines


def test_nothing_that_a_model_or_a_tool_says_steers_the_terminal() -> None:
    """I22 for the reader: escape sequences and overrides of direction are shown and not carried out."""
    evil = "\x1b]0;title\x07\x1b[2J\u202ered\rx"
    done = call(call_pb2.CALL_STATE_SUCCEEDED, name=f"t{evil}")
    done.result.content_json = f'"{evil}"'.encode()
    output = shown(started(), delta(evil, evil), changed(done), assistant(evil), terminal=True)
    assert not any(character in output for character in "\x1b\x07\u202e\r")


def test_an_event_of_a_later_version_shows_nothing() -> None:
    assert shown(event_pb2.RunEvent(type="later.invented")) == ""


def test_a_gap_is_a_sentence_and_what_the_events_had_led_to() -> None:
    """EVT-1."""
    done = call(call_pb2.CALL_STATE_SUCCEEDED)
    done.result.content_json = b'"sent"'
    snapshot = gap_pb2.RunSnapshot(
        messages=[
            message_pb2.Message(role=message_pb2.ROLE_USER, text="Tell ann"),
            message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="I will.", call_ids=["call_0", "call_1"]),
            message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="Done."),
        ],
        calls=[done],
        omitted_call_count=1,
    )
    ended = run_pb2.Run(run_id="run_1", state=run_pb2.RUN_STATE_COMPLETED)
    lines = shown(
        gap_pb2.Gap(from_seq=3, to_seq=40, snapshot=snapshot),
        event_pb2.RunEvent(run_changed=event_pb2.RunChanged(run=ended)),
    ).splitlines()
    assert lines[:-1] == [
        "… events 3 to 40 are not kept any more; they came to this, without 1 earlier call:",
        "> Tell ann",
        "I will.",
        "✓ send_email → sent",
        "Done.",
    ]
    assert "completed" in lines[-1]


@pytest.mark.parametrize(
    ("roles", "approvals", "told"),
    [
        ([], 1, "decide with: pawl approve"),
        (["approver"], 1, "decide with: pawl approve"),
        (["member"], 1, "waits for somebody with the role approver or admin"),
        ([], 2, "waits for 2 other people"),
    ],
)
def test_who_may_not_decide_is_told_who_does(roles: list[str], approvals: int, told: str) -> None:
    waiting = call(call_pb2.CALL_STATE_AWAITING_APPROVAL)
    waiting.approval.approvals_required = approvals
    assert told in hint(waiting, decides=decides(run_pb2.Run(user_roles=roles)))


def test_a_call_that_somebody_has_approved_waits_for_the_others_only() -> None:
    waiting = call(call_pb2.CALL_STATE_AWAITING_APPROVAL)
    waiting.approval.approvals_required = 2
    waiting.approval.approvals.add(user_id="ann")
    assert "waits for 1 other person with" in hint(waiting)
