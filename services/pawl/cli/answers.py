"""Parses decisions on calls, and the results of calls, as users type them."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from pawl.agent.v1 import types_pb2
from pawl.chassis import strict_json
from pawl.cli import wording
from pawl.cli.command import json_of, object_of
from pawl.cli.failure import CommandError
from pawl.client import decisions
from pawl.event.v1 import call_pb2

# Typed to decline a question.
REFUSAL: Final = "/refuse"
QUESTION_PROMPT: Final = f"option number or your own answer ({REFUSAL} to decline): "
RESULT_PROMPT: Final = "result as JSON, or ! text for an error: "
DECIDABLE: Final = frozenset(
    {call_pb2.CALL_STATE_AWAITING_APPROVAL, call_pb2.CALL_STATE_ASKED, call_pb2.CALL_STATE_OFFERED}
)


def prompt(call: call_pb2.Call) -> str:
    if call.state == call_pb2.CALL_STATE_OFFERED:
        return RESULT_PROMPT
    return QUESTION_PROMPT if call.state == call_pb2.CALL_STATE_ASKED else f"{choices(call)}: "


def choices(call: call_pb2.Call) -> str:
    series = ", [s]eries to approve the whole series" if call.approval.HasField("series") else ""
    return f"[a]pprove{series}, [e]dit [JSON], [r]eject[: reason], t: text to answer instead"


def decision_of(line: str, call: call_pb2.Call) -> types_pb2.CallDecision:
    """Parse a line into a decision on `call`. `e` by itself opens an editor.

    Only the bare word approves. A reason or other text must follow a colon, so that the start of a sentence never
    counts as a decision.

    Raises:
        CommandError: The line is not a decision.
    """
    line = line.strip()
    if call.state == call_pb2.CALL_STATE_ASKED:
        return _answer_question(line, call)
    verb, _, arguments = line.partition(" ")
    if verb.lower() in {"e", "edit"}:
        return edit(call, arguments.encode() if arguments else edit_in_editor(call.arguments_json))
    verb, colon, text = (part.strip() for part in line.partition(":"))
    match verb.lower(), colon:
        case ("a" | "approve" | "y" | "yes", ""):
            return decisions.approve(call)
        case ("s" | "series", "") if call.approval.HasField("series"):
            return decisions.approve(call, for_series=True)
        case ("r" | "reject" | "n" | "no", _):
            return decisions.reject(call, text)
        case ("t" | "text", ":") if text:
            return decisions.answer(call, text)
        case _:
            raise CommandError(f"Not a decision. Type one of: {choices(call)}.")


def result_of(line: str, call: call_pb2.Call) -> types_pb2.ToolResult:
    """Parse a line into the result of a front-end call. Text after `!` is an error for the model.

    Raises:
        CommandError: The line is not JSON.
    """
    line = line.strip()
    if line.startswith("!"):
        content, is_error = strict_json.dumps_canonical(line[1:].strip()), True
    else:
        json_of(line, "The result", "Put text in quotes.")
        content, is_error = line.encode(), False
    return types_pb2.ToolResult(run_id=call.run_id, call_id=call.call_id, content_json=content, is_error=is_error)


def done(decision: types_pb2.CallDecision, call: call_pb2.Call) -> str:
    approval = call.approval
    whole = " for the whole series" if decision.for_series else ""
    match decision.kind:
        case call_pb2.DECISION_KIND_APPROVE if approval.approvals_required > 1:
            return f"Approved: {len(approval.approvals) + 1} of {approval.approvals_required}."
        case call_pb2.DECISION_KIND_APPROVE:
            return f"Approved{whole}."
        case call_pb2.DECISION_KIND_EDIT if approval.approvals_required > 1:
            return f"Edited and approved: 1 of {approval.approvals_required}."
        case call_pb2.DECISION_KIND_EDIT:
            return f"Approved with your arguments{whole}."
        case call_pb2.DECISION_KIND_REJECT:
            return "Rejected." if call.state != call_pb2.CALL_STATE_ASKED else "Declined to answer."
        case _:
            return "Answered."


def edit(
    call: call_pb2.Call, arguments: bytes, *, for_series: bool = False, series: call_pb2.Series | None = None
) -> types_pb2.CallDecision:
    """Approve a call with different arguments. With `for_series`, approve its whole series, which `series` can change.

    Raises:
        CommandError: The arguments are not a JSON object.
        InvalidField: The call does not belong to a series.
    """
    object_of(arguments, "The new arguments")
    return decisions.edit(call, arguments, for_series=for_series, series=series)


def chosen(line: str, call: call_pb2.Call) -> str:
    """Return the option of a question if `line` is its number. Otherwise, return `line`."""
    options = call.question.options
    if line.isascii() and line.isdecimal() and 1 <= int(line) <= len(options):
        return options[int(line) - 1]
    return line


def edit_in_editor(arguments: bytes) -> bytes:
    """Open the arguments in $VISUAL or $EDITOR, and return the edited text.

    Raises:
        CommandError: No editor was found, or the editor failed.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="pawl-edit-") as folder:
        path = Path(folder) / "arguments.json"
        path.write_text(wording.json_block(arguments) + "\n", encoding="utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(path)], check=True)
            return path.read_bytes()
        except (OSError, ValueError, subprocess.CalledProcessError):
            raise CommandError(f"The editor {editor!r} failed. Set EDITOR, or type: e JSON.") from None


def _answer_question(line: str, call: call_pb2.Call) -> types_pb2.CallDecision:
    if not line:
        raise CommandError("Type the number of an option, or your own answer.")
    verb, _, reason = line.partition(" ")
    if verb == REFUSAL:
        return decisions.reject(call, reason.strip())
    return decisions.answer(call, chosen(line, call))
