"""What a reader sees of an undo and of steps."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pawl.agent.v1 import steps_pb2, undo_pb2
from pawl.cli import steps, wording
from pawl.cli.__main__ import app
from pawl.cli.undoing import undo_line
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2, run_pb2


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


@pytest.mark.parametrize("command", ["steps", "watch"])
def test_of_a_run_that_was_imported_it_is_said_that_nothing_ran(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = run_pb2.Run(run_id="run_1", conversation_id="conv_1", state=run_pb2.RUN_STATE_COMPLETED)
    imported.end_time.GetCurrentTime()

    async def nothing(*_: object) -> AsyncGenerator[None, None]:
        for each in list[None]():
            yield each

    async def get(*_: object) -> run_pb2.Run:
        return imported

    monkeypatch.setattr(AsyncClient, "pages", nothing)
    monkeypatch.setattr(AsyncClient, "watch", nothing)
    monkeypatch.setattr(AsyncClient, "get", get)
    result = CliRunner().invoke(app, [command, "run_1"], env={"PAWL_ADDRESS": "127.0.0.1:1"})
    said = "run_1 stands for messages that were imported: nothing ran. `pawl conversations show conv_1` shows them."
    assert (result.exit_code, result.output.strip()) == (0, said)
    imported.last_seq = 9
    assert CliRunner().invoke(app, [command, "run_1"], env={"PAWL_ADDRESS": "127.0.0.1:1"}).output == ""


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


def test_what_is_not_kept_of_a_series_is_said_before_its_steps() -> None:
    """ASYNC-3."""
    assert steps.trimmed_text(run_pb2.Run(trimmed_rounds=4900)).startswith("… the first 4900 iterations")
    assert steps.trimmed_text(run_pb2.Run()) == ""
