"""What a reader sees of an undo and of steps."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console

from pawl.agent.v1 import steps_pb2, undo_pb2
from pawl.cli import steps, wording
from pawl.cli.undoing import undo_line
from pawl.event.v1 import call_pb2


def shown(step: steps_pb2.Step, *, full: bool = False) -> str:
    output = io.StringIO()
    steps.show(Console(file=output, width=60, highlight=False, color_system=None), step, full=full)
    return output.getvalue()


def test_a_step_is_folded_to_a_line_and_opened_whole() -> None:
    reasoning = "First I look at the files.\n" * 20
    step = steps_pb2.Step(type=steps_pb2.STEP_TYPE_REASONING, round=2, content=reasoning)

    assert shown(step).count("\n") == 1
    assert "…" in shown(step)
    assert shown(step, full=True).count("First I look at the files.") == 20


def test_content_cannot_steer_the_terminal() -> None:
    step = steps_pb2.Step(type=steps_pb2.STEP_TYPE_ANSWER, content="a\x1b[2Jb", tool_name="\x1b]0;x")

    assert "\x1b" not in shown(step) + shown(step, full=True)


def test_a_result_that_is_too_large_says_how_large_it_is() -> None:
    step = steps_pb2.Step(type=steps_pb2.STEP_TYPE_RESULT, tool_name="read", content_omitted_bytes=70_000)

    assert shown(step) == "  0 result read: 70000 bytes\n"


@pytest.mark.parametrize("state", [number for name, number in undo_pb2.UndoState.items() if number])
def test_each_state_of_an_undo_has_words(state: undo_pb2.UndoState.ValueType) -> None:
    line, _ = undo_line(undo_pb2.CallUndo(call_id="call_1", tool_name="write", state=state, summary="Take it back"))

    assert "does not know" not in line
    assert "call_1  write (Take it back)" in line


def test_a_line_says_why_a_call_cannot_be_undone() -> None:
    found = undo_pb2.CallUndo(
        call_id="call_1",
        tool_name="mail",
        state=undo_pb2.UNDO_STATE_CANNOT_BE_UNDONE,
        reason="Its tool gives no way back.",
    )

    assert undo_line(found)[0] == "✗ call_1  mail cannot be undone: Its tool gives no way back."


def test_who_decides_an_inverse_is_told_what_it_takes_back() -> None:
    call = call_pb2.Call(call_id="undo_1", undoes_call_id="call_1", arguments_json=b"{}")

    assert "takes back: call call_1" in wording.call_lines(call, datetime.now(tz=UTC))
