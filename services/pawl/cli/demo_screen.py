"""The events of the demo, one line each, as they come."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from pawl.cli import wording
from pawl.event.v1 import call_pb2, event_pb2

_STYLES = {"run": "bold", "tool": "cyan", "output": "", "message": "green", "round": "magenta", "warning": "yellow"}


class Screen:
    """Lines of text, in colours on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._writing = ""
        self._last_seq = 0

    def event(self, event: event_pb2.RunEvent) -> None:
        """Show an event: number, epoch of the worker, type, and what it says in short.

        Pieces of one output go on in one line, as they come.
        """
        output = event.output_delta.reasoning or event.output_delta.text
        if output and not event.output_delta.calls:
            self._write(event, "reasoning" if event.output_delta.reasoning else "text", output)
            return
        self._end_line()
        style = _STYLES.get(event.type.partition(".")[0], "dim")
        line = f"{event.seq:>4} e{event.attempt:<2} {event.type:<22} {detail(event)}"
        self._console.print(Text(line.rstrip(), style=style), soft_wrap=True)

    def _write(self, event: event_pb2.RunEvent, kind: str, output: str) -> None:
        if self._writing != f"{kind} {event.attempt}":
            self._end_line()
            self._writing = f"{kind} {event.attempt}"
            head = f"{event.seq:>4} e{event.attempt:<2} {event.type:<22} {kind}: "
            self._console.print(Text(head, style="dim"), end="", soft_wrap=True)
        style = "dim italic" if kind == "reasoning" else ""
        text = " ".join(wording.clean(output).split("\n"))
        self._console.print(Text(text, style=style), end="", soft_wrap=True)
        self._last_seq = event.seq

    def _end_line(self) -> None:
        if self._writing:
            self._console.print(Text(f" (to {self._last_seq})", style="dim"), soft_wrap=True)
        self._writing = ""

    def note(self, text: str) -> None:
        """Show what happens outside the log."""
        self._end_line()
        self._console.print(Text(f"        --> {wording.clean(text)}", style="bold yellow"), soft_wrap=True)

    def verdict(self, name: str, detail_text: str, *, good: bool) -> None:
        """Show a line of the check list."""
        mark, style = ("✓", "green") if good else ("✗", "bold red")
        self._console.print(Text(f"{mark} {name}: {wording.one_line(detail_text, 200)}", style=style), soft_wrap=True)

    def line(self, text: str = "") -> None:
        """Show a line."""
        self._console.print(Text(text), soft_wrap=True)


def detail(event: event_pb2.RunEvent) -> str:
    """Return what an event says, on one line."""
    match event.WhichOneof("kind"):
        case "run_changed":
            run = event.run_changed.run
            return f"waits for {wording.wait_names(run.waits)}" if run.waits else run.run_id
        case "message_added":
            message = event.message_added.message
            return wording.one_line(message.text) or f"calls {len(message.call_ids)} tools"
        case "round_started":
            return f"round {event.round_started.round} with {event.round_started.model}"
        case "round_retrying":
            return wording.one_line(event.round_retrying.message or event.round_retrying.reason)
        case "round_ended":
            return f"round {event.round_ended.round}"
        case "output_delta":
            return _delta(event.output_delta)
        case "call_changed":
            return _call(event.call_changed.call)
        case "tool_progress":
            return wording.one_line(event.tool_progress.message)
        case "run_topped_up":
            return f"may use {event.run_topped_up.token_budget} tokens"
        case "operator_acted":
            return wording.act_text(event.operator_acted)
        case "warning":
            return wording.one_line(event.warning.message)
        case _:
            return ""


def _delta(delta: event_pb2.OutputDelta) -> str:
    fragments = [f"{call.tool_name} {call.arguments_text}".strip() for call in delta.calls]
    parts = (
        ("reasoning", delta.reasoning),
        ("text", delta.text),
        ("refusal", delta.refusal),
        ("calls", " | ".join(fragments)),
    )
    return "  ".join(f"{name}: {wording.one_line(text)}" for name, text in parts if text)


def _call(call: call_pb2.Call) -> str:
    if call.HasField("result"):
        return f"{call.tool_name} → {wording.json_line(call.result.content_json)}"
    if call.HasField("question"):
        return f"{call.tool_name}: {wording.one_line(call.question.question)}"
    return f"{call.tool_name} {wording.json_line(call.arguments_json)}"
