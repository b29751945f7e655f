"""Terminal output of runs, tables and untrusted text."""

from __future__ import annotations

import asyncio
import io
import json
import time
from datetime import UTC, datetime
from itertools import chain, repeat
from typing import Any
from unittest.mock import AsyncMock

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import WordWrap, show_table
from pawl.cli.runs import show_child_calls
from pawl.cli.transcript import REASONING_CHARACTERS_MAX, Transcript, decides, hint
from pawl.client import AsyncClient
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, message_pb2, run_pb2
from pawl.identity.v1 import key_pb2
from tests.poll import until
from tests.tables import for_each


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
    state: call_pb2.CallState.ValueType, *, name: str = "send_email", arguments: bytes = b'{"to": "ann"}', **fields: Any
) -> call_pb2.Call:
    return call_pb2.Call(
        run_id="run_1", call_id="call_1", tool_name=name, state=state, arguments_json=arguments, **fields
    )


def changed(of: call_pb2.Call, *, seconds: float = 0) -> event_pb2.RunEvent:
    return event_pb2.RunEvent(call_changed=event_pb2.CallChanged(call=of, duration_seconds=seconds))


FORGED = "Which one?\n[send_email]\n  run run_1  call call_2\nneeds approval: none\r\n  1. yes\x0b2\x85[x]\u2028[y]"


def test_untrusted_text_cannot_forge_an_inbox_entry() -> None:
    """HITL-3: each line of untrusted text is marked."""
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


def test_reasoning_is_separate_from_text_and_folded_by_default() -> None:
    """HITL-8: the reasoning can also be shown in full."""
    output = shown(started(), delta(reasoning="x" * 1000), delta(reasoning="y"), delta("Hello"))
    assert output == "x" * REASONING_CHARACTERS_MAX + " … (folded)\nHello\n"
    assert shown(started(), delta(reasoning="x" * 1000), whole_reasoning=True) == "x" * 1000 + "\n"


def test_a_retried_model_call_marks_its_output_as_void() -> None:
    """EVT-2: the output says which text to discard."""
    retrying = event_pb2.RoundRetrying(message="HTTP 500.", void_from_seq=3)
    output = shown(started(), delta("Hel"), event_pb2.RunEvent(round_retrying=retrying), delta("Hello"))
    assert output == "Hel\n↻ HTTP 500, trying again; discard the text above\nHello\n"


def test_a_run_is_shown_line_by_line() -> None:
    done = call(call_pb2.CALL_STATE_SUCCEEDED, result={"content_json": b'{"sent": true}'})
    rejected = call(call_pb2.CALL_STATE_REJECTED, result={"content_json": b'"not today"'})
    task: dict[str, Any] = {"name": "run_agent", "arguments": b'{"task":"look"}'}
    delegated = call(call_pb2.CALL_STATE_DELEGATED, **task, child_run_id="run_2")
    detached = call(call_pb2.CALL_STATE_DETACHED, child_run_id="run_3")
    asked = call(call_pb2.CALL_STATE_ASKED, question={"question": "When?", "options": ["Today", "Tomorrow"]})
    failed = run_pb2.Run(run_id="run_1", state=run_pb2.RUN_STATE_FAILED, round=2, active_seconds=3.2)
    failed.failure.message = "The model server is down."
    user = message_pb2.Message(role=message_pb2.ROLE_USER, text="hello\n[send_email]")
    output = shown(
        event_pb2.RunEvent(message_added=event_pb2.MessageAdded(message=user)),
        event_pb2.RunEvent(type="later.invented"),
        *(started(), delta("Once "), delta("upon"), assistant("Once upon"), assistant("a time")),
        *(started(), delta("Hel"), started(attempt=2), delta("Hello", attempt=2), assistant("Hello")),
        *(started(attempt=3), changed(call(call_pb2.CALL_STATE_RUNNING)), changed(done, seconds=0.0123)),
        *(changed(rejected), changed(delegated), changed(detached), changed(asked)),
        event_pb2.RunEvent(run_changed=event_pb2.RunChanged(run=failed)),
        hints=True,
    )
    assert output.splitlines() == [
        *("> hello", "> [send_email]", "Once upon", "a time", "Hel"),
        "↻ another worker took over; the text above is generated again",
        *("Hello", '⚙ send_email {"to": "ann"}', '✓ send_email (12 ms) → {"sent": true}'),
        *("✗ send_email rejected → not today", '⇉ run_agent {"task": "look"} (run run_2)'),
        "  watch it with: pawl watch run_2",
        *('⇉ send_email {"to": "ann"} (in the background)', "  watch it with: pawl jobs watch run_3"),
        *("[Question]", "  When?", "    1. Today", "    2. Tomorrow", "  run run_1  call call_1"),
        '  answer with: pawl approve run_1 call_1 --answer "..."',
        "✗ run_1 failed: The model server is down. (2 rounds, 0 tokens, 3.2 s active)",
    ]
    assert "pawl resolve run_1 call_1 --happened JSON" in hint(call(call_pb2.CALL_STATE_RUNNING))


def test_a_waiting_call_shows_all_details_and_how_to_decide() -> None:
    """HITL-2: the arguments are not shortened."""
    waiting = call(call_pb2.CALL_STATE_AWAITING_APPROVAL, arguments=b'{"body": "%s"}' % (b"x" * 500))
    waiting.approval.preview = "An e-mail to Ann"
    waiting.approval.cause = "category SENSITIVE"
    output = shown(changed(waiting), hints=True)
    assert [part for part in ("[send_email]", "An e-mail to Ann") if part not in output] == []
    assert "x" * 500 in output.replace("\n", "")
    assert [
        part for part in ("needs approval: category SENSITIVE", "pawl approve run_1 call_1") if part not in output
    ] == []


def run_event(**fields: Any) -> event_pb2.RunEvent:
    return event_pb2.RunEvent(run_changed=event_pb2.RunChanged(run=run_pb2.Run(run_id="run_1", **fields)))


UNKNOWN_OUTCOME = run_pb2.Attention(reason=run_pb2.ATTENTION_REASON_UNKNOWN_OUTCOME)
QUARANTINED = run_pb2.Attention(reason=run_pb2.ATTENTION_REASON_QUARANTINED)


@for_each(
    ("event", "lines"),
    [
        (
            run_event(state=run_pb2.RUN_STATE_WAITING, waits=[run_pb2.WAIT_KIND_BUDGET]),
            ["‖ waiting for more tokens", "  add tokens with: pawl top-up run_1 TOKENS"],
        ),
        (
            event_pb2.RunEvent(run_topped_up=event_pb2.RunToppedUp(tokens=500, token_budget=1500, user_id="ann")),
            ["+ ann added 500 tokens; the budget is now 1500"],
        ),
        (
            run_event(state=run_pb2.RUN_STATE_NEEDS_ATTENTION, attention=UNKNOWN_OUTCOME),
            [
                "‖ needs an operator: it is unknown whether a call took effect",
                "  operators can see what to do with: pawl attention run_1",
            ],
        ),
        (
            run_event(state=run_pb2.RUN_STATE_NEEDS_ATTENTION, attention=QUARANTINED, crash_count=3),
            [
                "‖ needs an operator: quarantined: 3 workers died while running it, without making any progress",
                "  operators can see what to do with: pawl attention run_1",
            ],
        ),
        (
            event_pb2.RunEvent(
                operator_acted=event_pb2.OperatorActed(
                    user_id="bob", act=event_pb2.OPERATOR_ACT_REDRIVEN, reason="the tool is\nmended"
                )
            ),
            ["⚑ operator bob resumed the run: the tool is mended"],
        ),
        (
            event_pb2.RunEvent(
                operator_acted=event_pb2.OperatorActed(
                    user_id="bob", act=event_pb2.OPERATOR_ACT_RESOLVED, call_id="call_1"
                )
            ),
            ["⚑ operator bob reported the outcome of a call (call_1)"],
        ),
        (
            run_event(
                state=run_pb2.RUN_STATE_CANCELLED,
                stop_cause=run_pb2.STOP_CAUSE_OPERATOR,
                unstopped_call_ids=["call_1", "call_2"],
            ),
            [
                "✗ run_1 cancelled by an operator (0 rounds, 0 tokens, 0 ms active)",
                "! could not be stopped and may still be running: call_1, call_2",
            ],
        ),
    ],
)
def test_waits_operator_actions_and_unstoppable_calls_are_shown(event: Any, lines: Any) -> None:
    assert shown(event, hints=True).splitlines() == lines


def test_output_of_models_and_tools_cannot_control_the_terminal() -> None:
    """I22: escape sequences and direction overrides are shown instead of interpreted."""
    evil = "\x1b]0;title\x07\x1b[2J\u202ered\rx"
    done = call(call_pb2.CALL_STATE_SUCCEEDED, name=f"t{evil}")
    done.result.content_json = f'"{evil}"'.encode()
    output = shown(started(), delta(evil, evil), changed(done), assistant(evil), terminal=True)
    assert not any(character in output for character in "\x1b\x07\u202e\r")


def test_a_gap_shows_a_notice_and_the_snapshot() -> None:
    """EVT-1: the snapshot replaces the missing events."""
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
        "… events 3 to 40 are no longer stored. Their outcome, without 1 earlier call:",
        "> Tell ann",
        "I will.",
        "✓ send_email → sent",
        "Done.",
    ]
    assert "completed" in lines[-1]


@for_each(
    ("roles", "approvals", "approved", "text"),
    [
        ([], 1, [], "decide with: pawl approve"),
        (["approver"], 1, [], "decide with: pawl approve"),
        (["member"], 1, [], "waiting for a user with the approver or admin role"),
        ([], 2, [], "waiting for 2 other people"),
        ([], 2, ["ann"], "waiting for 1 other person with"),
    ],
)
def test_a_user_who_may_not_decide_sees_who_may(roles: Any, approvals: int, approved: Any, text: str) -> None:
    waiting = call(call_pb2.CALL_STATE_AWAITING_APPROVAL)
    waiting.approval.approvals_required = approvals
    waiting.approval.approvals.extend(call_pb2.Decision(user_id=user) for user in approved)
    assert text in hint(waiting, decides=decides(run_pb2.Run(user_roles=roles)))


async def test_waits_of_child_runs_are_shown_once_despite_a_failed_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    output, waiting = io.StringIO(), call(call_pb2.CALL_STATE_AWAITING_APPROVAL)
    waiting.run_id = "run_2"
    own = call(call_pb2.CALL_STATE_ASKED)
    run = run_pb2.Run(run_id="run_1", state=run_pb2.RUN_STATE_WAITING, waits=[run_pb2.WAIT_KIND_AGENT])
    run.pending_calls.extend([own, waiting])
    target = AsyncMock(AsyncClient)
    target.get.side_effect = chain([DependencyUnavailable()], repeat(run))
    monkeypatch.setattr("pawl.cli.runs._POLL_SECONDS", 0)
    delegates = asyncio.Event()
    delegates.set()
    below = asyncio.create_task(
        show_child_calls(target, Transcript(Console(file=output, width=100)), "run_1", delegates)
    )
    await until(lambda: target.get.await_count > 3)
    below.cancel()
    assert output.getvalue().count("pawl approve") == output.getvalue().count("pawl approve run_2 call_1") == 1


def wrapped(*pieces: str, width: int = 10) -> str:
    wrap = WordWrap(width)
    return "".join([*map(wrap.take, pieces), wrap.flush()])


@given(st.lists(st.text(alphabet="ab \n日", max_size=12), max_size=8), st.integers(4, 30))
def test_wrapped_lines_fit_and_keep_all_text(pieces: list[str], width: int) -> None:
    """Only blanks before a break are dropped, and only a word longer than the line overflows."""
    text, shown = "".join(pieces), wrapped(*pieces, width=width)
    assert shown.split() == text.split() or max(map(cell_len, text.split())) >= 30
    assert "".join(shown.split()) == "".join(text.split())
    for line in shown.split("\n"):
        first = line[: len(line) - len(line.lstrip())] + "".join(line.split()[:1])
        assert cell_len(line) <= width or cell_len(first) > width


def test_hidden_characters_in_a_call_are_escaped_without_changing_its_json() -> None:
    """HITL-3: people must see the actual value that they approve."""
    value = {"to": "ann\u202e@example.com", "at": "https://\u0440aypal.com"}
    call = call_pb2.Call(
        state=call_pb2.CALL_STATE_AWAITING_APPROVAL,
        tool_name="send_email",
        agent_name="clerk",
        arguments_json=json.dumps(value, ensure_ascii=False).encode(),
        approval=call_pb2.ApprovalRequest(digest="d", preview="To ann\u202e@example.com"),
    )
    lines = wording.call_lines(call, datetime.now(UTC))
    assert "To ann<U+202E>@example.com" in lines
    assert [line for line in lines if line.endswith("  agent clerk")]
    block = wording.json_block(call.arguments_json)
    assert block in "\n".join(lines)
    assert (block.isascii(), json.loads(block)) == (True, value)


def test_a_message_is_shown_by_field_and_cannot_forge_lines() -> None:
    key = key_pb2.Key(key_id="key_1", roles=["member", "viewer"], name="laptop\nuser id: root", decides_for_users=True)
    key.create_time.FromSeconds(1_795_525_200)
    assert wording.described(key) == [
        "key id: key_1",
        "name: laptop",
        "  | user id: root",
        "roles: member, viewer",
        "decides for users: yes",
        f"create time: {wording.text_at(key, 'create_time')}",
    ]
    assert wording.text_at(key, "expire_time") == ""


def test_a_time_is_shown_with_its_zone_in_the_format_that_options_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    moment, texts = Timestamp(seconds=1_795_525_200), []
    try:
        for zone in ("UTC", "Europe/Berlin"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            texts.append(wording.time_text(moment))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert texts == ["2026-11-24 13:00:00Z", "2026-11-24 14:00:00+01:00"]
    assert {datetime.fromisoformat(each).timestamp() for each in texts} == {moment.seconds}


RUN = "run_83e30c686bd31f67a7daaca35a2ce881"
HEADINGS = ("run", "state", "next", "what")
ROWS = [(RUN, "waiting", "", "[bold] a long text " * 20), (RUN, "completed", "2026-11-24 14:00:00Z", "")]


def shown_of_tables(width: int) -> list[str]:
    output = io.StringIO()
    show_table(Console(file=output, width=width, force_terminal=True, no_color=True, color_system=None), HEADINGS, ROWS)
    return [line.rstrip() for line in output.getvalue().splitlines()]


@for_each("width", [20, 40, 78])
def test_ids_and_times_are_never_truncated_on_a_narrow_terminal(width: int) -> None:
    lines = shown_of_tables(width)
    assert (lines.count(RUN), lines[-2:]) == (2, ["  state: completed", "  next: 2026-11-24 14:00:00Z"])
    assert lines[1] == "  state: waiting"


def test_a_wide_terminal_shows_one_line_per_row() -> None:
    heading, first, second = shown_of_tables(120)
    assert (heading.split(), second) == ([*HEADINGS], f"{RUN}  completed  2026-11-24 14:00:00Z")
    assert (first.startswith(f"{RUN}  waiting"), "[bold] a long text" in first) == (True, True)
