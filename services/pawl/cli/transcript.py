"""Prints human-readable transcripts of runs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from pawl.cli import wording
from pawl.cli.command import WordWrap
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, message_pb2, run_pb2

# Characters of reasoning shown per round. The rest is hidden.
REASONING_CHARACTERS_MAX: Final = 300

_SETTLED: Final = {
    call_pb2.CALL_STATE_SUCCEEDED: ("✓", "green"),
    call_pb2.CALL_STATE_FAILED: ("✗", "red"),
    call_pb2.CALL_STATE_REJECTED: ("✗", "yellow"),
    call_pb2.CALL_STATE_EXPIRED: ("✗", "yellow"),
    call_pb2.CALL_STATE_CANCELLED: ("✗", "yellow"),
    call_pb2.CALL_STATE_OUTCOME_UNKNOWN: ("?", "red"),
}
# Final run states, each with its symbol and style.
ENDED: Final = {
    run_pb2.RUN_STATE_COMPLETED: ("✓", "green"),
    run_pb2.RUN_STATE_FAILED: ("✗", "red"),
    run_pb2.RUN_STATE_CANCELLED: ("✗", "yellow"),
    run_pb2.RUN_STATE_EXPIRED: ("✗", "yellow"),
}
_IN_PROGRESS: Final = (run_pb2.RUN_STATE_QUEUED, run_pb2.RUN_STATE_RUNNING)


def is_visible(event: event_pb2.RunEvent) -> bool:
    """Return whether to show an event to users if its run was not started by a message."""
    match event.WhichOneof("kind"):
        case "run_changed":
            run = event.run_changed.run
            is_nothing = run.state in _IN_PROGRESS or (run.state == run_pb2.RUN_STATE_COMPLETED and not run.output_text)
            return not is_nothing and run.stop_cause != run_pb2.STOP_CAUSE_SUPERSEDED
        case "message_added":
            text = event.message_added.message
            return text.role == message_pb2.ROLE_ASSISTANT and bool(text.text or text.refusal or text.call_ids)
        case "output_delta":
            return bool(event.output_delta.text or event.output_delta.refusal)
        case "round_started" | "round_ended":
            return False
        case _:
            return True


class Transcript:
    """Prints events in seq order. On a terminal, lines wrap between words.

    `whole_reasoning` shows all reasoning. `hints` adds the command that settles a pending call.
    """

    def __init__(self, console: Console, *, whole_reasoning: bool = False, hints: bool = False) -> None:
        self._console = console
        self._whole_reasoning = whole_reasoning
        self._hints = hints
        self._wrap = WordWrap(console.width) if console.is_terminal else None
        self._in_line = False
        self._in_reasoning = False
        self._style = ""
        self._reasoning_characters = 0
        self._text_shown = False
        self._attempt = 0
        self._decides = True

    def show(self, event: event_pb2.RunEvent) -> None:
        self._note_takeover(event)
        match event.WhichOneof("kind"):
            case "run_changed":
                self._run_changed(event)
            case "message_added":
                self._message_added(event.message_added.message)
            case "round_started":
                self._begin_round()
            case "round_retrying":
                self._retrying(event.round_retrying)
            case "output_delta":
                self._delta(event.output_delta)
            case "call_changed":
                self._call_changed(event.call_changed)
            case "tool_progress":
                progress = event.tool_progress
                self.line(f"  … {wording.clean(progress.tool_name)} {wording.progress_text(progress)}", "dim")
            case "run_topped_up":
                topped_up = event.run_topped_up
                added = f"{wording.clean(topped_up.user_id)} added {wording.count_text(topped_up.tokens, 'token')}"
                self.line(f"+ {added}; the budget is now {topped_up.token_budget}", "green")
            case "operator_acted":
                self.line(f"⚑ {wording.act_text(event.operator_acted)}", "magenta")
            case "warning":
                self.line(f"! {wording.one_line(event.warning.message, 300)}", "yellow")
            case _:
                pass  # An event from a later version, or one with nothing to show.

    def show_gap(self, gap: gap_pb2.Gap) -> None:
        snapshot = gap.snapshot
        omitted = [
            wording.count_text(count, noun)
            for count, noun in (
                (snapshot.omitted_message_count, "earlier message"),
                (snapshot.omitted_call_count, "earlier call"),
            )
            if count
        ]
        without = f", without {' and '.join(omitted)}" if omitted else ""
        self.line(f"… events {gap.from_seq} to {gap.to_seq} are no longer stored. Their outcome{without}:", "dim")
        calls = {call.call_id: call for call in snapshot.calls}
        self._begin_round()
        for message in snapshot.messages:
            self._message_added(message)
            for call_id in message.call_ids:
                if call_id in calls:
                    self._call_changed(event_pb2.CallChanged(call=calls[call_id]))

    def line(self, text: str, style: str = "") -> None:
        self.end_line()
        self._console.print(Text(text, style=style), soft_wrap=not self._console.is_terminal)

    def command(self, text: str) -> None:
        """Print a command without wrapping it, so that it can be copied."""
        self.end_line()
        self._console.print(Text(f"  {text}", style="bold"), soft_wrap=True)

    def end_line(self) -> None:
        if self._in_line:
            rest = self._wrap.flush() if self._wrap else ""
            self._console.print(Text(rest, style=self._style), soft_wrap=True)
        self._in_line = self._in_reasoning = False

    def card(self, title: str, lines: list[str], style: str = "cyan") -> None:
        self.end_line()
        if self._console.is_terminal:
            body = Text("\n".join(lines))
            self._console.print(Panel(body, title=Text(title), title_align="left", border_style=style, expand=False))
        else:
            self._console.print(Text("\n".join([f"[{title}]", *(f"  {line}" for line in lines)])), soft_wrap=True)

    def pending(self, call: call_pb2.Call) -> None:
        self.card(wording.call_title(call), wording.call_lines(call, datetime.now(tz=UTC)), "yellow")

    def _note_takeover(self, event: event_pb2.RunEvent) -> None:
        is_retry = event.HasField("round_retrying")
        if event.attempt > self._attempt > 0 and not is_retry and (self._in_line or self._text_shown):
            self.line("↻ another worker took over; the text above is generated again", "yellow")
            self._begin_round()
        self._attempt = max(self._attempt, event.attempt)

    def _begin_round(self) -> None:
        self.end_line()
        self._reasoning_characters = 0
        self._text_shown = False

    def _retrying(self, retrying: event_pb2.RoundRetrying) -> None:
        why = wording.one_line(retrying.message or retrying.reason, 200).rstrip(". ")
        void = "; discard the text above" if retrying.void_from_seq else ""
        self.line(f"↻ {why}, trying again{void}", "yellow")
        self._begin_round()

    def _delta(self, delta: event_pb2.OutputDelta) -> None:
        if delta.reasoning:
            self._reasoning(wording.clean(delta.reasoning))
        for text in (delta.text, delta.refusal):
            if text:
                self._write(wording.clean(text))
                self._text_shown = True

    def _reasoning(self, text: str) -> None:
        room = len(text) if self._whole_reasoning else REASONING_CHARACTERS_MAX - self._reasoning_characters
        if room <= 0:
            return
        self._reasoning_characters += len(text)
        folded = " … (folded)" if len(text) > room else ""
        self._write(text[:room] + folded, "dim italic", reasoning=True)

    def _write(self, text: str, style: str = "", *, reasoning: bool = False) -> None:
        if reasoning is not self._in_reasoning:
            self.end_line()
        self._in_reasoning, self._style = reasoning, style
        self._in_line = True
        shown = self._wrap.take(text) if self._wrap else text
        self._console.print(Text(shown, style=style), end="", soft_wrap=True)

    def _message_added(self, message: message_pb2.Message) -> None:
        match message.role:
            case message_pb2.ROLE_USER:
                text = "\n".join((wording.clean(message.text), *wording.parts_of(message))).strip("\n")
                self.line("> " + text.replace("\n", "\n> "), "bold")
            case message_pb2.ROLE_NOTICE:
                self.line("◆ " + wording.clean(message.text).replace("\n", "\n◆ "), "dim")
            case message_pb2.ROLE_ASSISTANT if not self._text_shown and (message.text or message.refusal):
                self.line(wording.clean(message.text or message.refusal))
            case _:
                self.end_line()
        self._text_shown = False

    def _call_changed(self, changed: event_pb2.CallChanged) -> None:
        call = changed.call
        name = wording.clean(call.tool_name)
        arguments = wording.json_line(call.arguments_json)
        match call.state:
            case call_pb2.CALL_STATE_RUNNING:
                by = f" (allowed by {call.rule_id})" if call.rule_id and not call.approval.digest else ""
                if call.approval.HasField("series") and not call.approval.HasField("decision"):
                    by = " (approved with its series)"
                self.line(f"⚙ {name} {arguments}{by}", "cyan")
            case call_pb2.CALL_STATE_OFFERED if changed.from_state != call_pb2.CALL_STATE_OFFERED:
                self.line(f"⇢ {name} {arguments} (in a front end)", "cyan")
            case call_pb2.CALL_STATE_DETACHED:
                self.line(f"⇉ {name} {arguments} (in the background)", "cyan")
                if self._hints:
                    self.command(f"watch it with: pawl jobs watch {call.child_run_id}")
            case call_pb2.CALL_STATE_DELEGATED:
                self.line(f"⇉ {name} {arguments} (run {call.child_run_id})", "cyan")
                if self._hints:
                    self.command(f"watch it with: pawl watch {call.child_run_id}")
            case call_pb2.CALL_STATE_AWAITING_APPROVAL | call_pb2.CALL_STATE_ASKED:
                self.pending(call)
                if self._hints:
                    self.command(hint(call, decides=self._decides))
            case state if state in _SETTLED:
                self._settled(changed)

    def _settled(self, changed: event_pb2.CallChanged) -> None:
        call = changed.call
        mark, style = _SETTLED[call.state]
        result = wording.json_line(call.result.content_json)
        if call.result_omitted_bytes:
            result = f"{call.result_omitted_bytes} bytes"
        how = "" if call.state == call_pb2.CALL_STATE_SUCCEEDED else f" {wording.text_at(call, 'state')}"
        duration = f" ({wording.seconds_text(changed.duration_seconds)})" if changed.duration_seconds else ""
        self.line(f"{mark} {wording.clean(call.tool_name)}{how}{duration} → {result}", style)

    def _run_changed(self, event: event_pb2.RunEvent) -> None:
        run = event.run_changed.run
        self._decides = decides(run)
        match run.state:
            case run_pb2.RUN_STATE_WAITING:
                self.line(f"‖ waiting for {wording.wait_names(run.waits)}", "yellow")
                if self._hints and run_pb2.WAIT_KIND_BUDGET in run.waits:
                    self.command(top_up_hint(run))
            case run_pb2.RUN_STATE_NEEDS_ATTENTION:
                self.line(f"‖ needs an operator: {wording.attention_text(run.attention, run.crash_count)}", "red")
                if self._hints:
                    self.command(f"operators can see what to do with: pawl attention {run.run_id}")
            case run_pb2.RUN_STATE_CANCELLING:
                self.line("‖ cancelling", "yellow")
            case state if state in ENDED:
                self._ended(run)

    def _ended(self, run: run_pb2.Run) -> None:
        mark, style = ENDED[run.state]
        tokens = run.usage.input_tokens + run.usage.output_tokens
        rounds, spent = wording.count_text(run.round, "round"), wording.count_text(tokens, "token")
        facts = f"{rounds}, {spent}, {wording.seconds_text(run.active_seconds)} active"
        by = wording.STOPPED_BY.get(run.stop_cause, "") if run.state == run_pb2.RUN_STATE_CANCELLED else ""
        why = f": {wording.one_line(run.failure.message, 300)}" if run.failure.message else ""
        self.line(f"{mark} {run.run_id} {wording.state_name(run.state)}{by}{why} ({facts})", style)
        if run.unstopped_call_ids:
            self.line(f"! could not be stopped and may still be running: {', '.join(run.unstopped_call_ids)}", "red")


def decides(run: run_pb2.Run) -> bool:
    """Return whether a run's user may decide on its gated calls. A user with roles must be an approver or admin."""
    return not run.user_roles or bool({"approver", "admin"} & set(run.user_roles))


def top_up_hint(run: run_pb2.Run) -> str:
    needed = f"at least {run.tokens_needed} tokens" if run.tokens_needed else "tokens"
    return f"add {needed} with: pawl top-up {run.run_id} {run.tokens_needed or 'TOKENS'}"


def hint(call: call_pb2.Call, *, decides: bool = True) -> str:
    """Return the command that settles a pending call, or a text about who can settle it."""
    command = f"pawl approve {call.run_id} {call.call_id}"
    if call.asked_user_id not in {"", call.user_id}:
        answer = ' --answer "..."' if call.state == call_pb2.CALL_STATE_ASKED else ""
        return f"waiting for {wording.clean(call.asked_user_id)}, who can use: {command}{answer}"
    if call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
        needed = call.approval.approvals_required
        if needed > 1:
            left = max(needed - len(call.approval.approvals), 1)
            whom = f"{left} other people" if left > 1 else "1 other person"
            return f"waiting for {whom} with the approver or admin role: {command}"
        if call.HasField("asked_user_id") and not call.asked_user_id:
            return f"waiting for a user with the approver or admin role: {command}"
        if not (decides or call.asked_user_id):
            return "waiting for a user with the approver or admin role, who can use: pawl inbox --all-users"
    if call.state == call_pb2.CALL_STATE_ASKED:
        return f'answer with: {command} --answer "..."'
    if call.state == call_pb2.CALL_STATE_OFFERED:
        return "waiting for a front end; or enter its result as JSON in `pawl inbox`"
    if call.state == call_pb2.CALL_STATE_RUNNING:
        command = f"pawl resolve {call.run_id} {call.call_id}"
        return (
            f"find out whether it happened, then report it: {command} --happened JSON   (or --run-again, --tell-model)"
        )
    return f'decide with: {command}   (or --edit JSON, --reject "reason")'
