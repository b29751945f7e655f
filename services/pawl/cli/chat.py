"""Implements `pawl chat`: a conversation over the Session stream."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.session_pb2 import SessionResponse
from pawl.cli import answers, jobs, runs, wording
from pawl.cli.command import LineReader, command, follows
from pawl.cli.contract import show_items
from pawl.cli.failure import CommandError, explain
from pawl.cli.runs import Agent, ConversationKey, Effort, Reasoning, effort_of
from pawl.cli.transcript import ENDED, Transcript, is_visible
from pawl.client import AsyncClient
from pawl.errors import (
    ConversationNotFound,
    FailedPrecondition,
    InvalidArgument,
    InvalidArguments,
    InvalidJson,
    NotFound,
    PawlError,
    PermissionDenied,
    SeqBeyondEnd,
    Unauthenticated,
)
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.tools import Category, EffectClass, Tool, tool

_COMMANDS: Final = {
    "/cancel": "stops the run",
    "/top-up TOKENS": "adds tokens to its budget",
    "/runs": "lists your runs",
    "/jobs": "lists background jobs",
    "/pause JOB": "pauses a job",
    "/resume JOB": "resumes it",
    "/stop [JOB]": "stops it, by default the newest job (also Ctrl-\\)",
    "/help": "shows this help",
    "/quit": "leaves (runs continue)",
}
_HELP: Final = (
    f"Type a message. {', '.join(f'{typed} {does}' for typed, does in _COMMANDS.items())}. "
    "To send a message that starts with a slash, type two: //this."
)
_SHOWN: Final = 10
_PAGE: Final = 200
_DIGITS_MAX: Final = 18
_IDLE_SECONDS: Final = 0.1
_RETRY_SECONDS: Final = 2.0


@command()
async def chat(
    target: AsyncClient,
    console: Console,
    *,
    conversation: Annotated[str, typer.Option(help="Continue this conversation.")] = "",
    conversation_key: ConversationKey = "",
    agent: Agent = "",
    effort: Effort = None,
    reasoning: Reasoning = False,
) -> int:
    """Chat with an agent.

    Shows tool calls, approvals and questions, and the answer as the model writes it. Reads lines from standard input,
    so input can come from a file.
    """
    screen = Transcript(console, whole_reasoning=reasoning)
    options = run_pb2.RunOptions(reasoning_effort=effort_of(effort))
    if conversation and conversation_key:
        raise CommandError("Specify --conversation or --conversation-key, not both.")
    if conversation_key:
        with suppress(ConversationNotFound):  # The first message creates the conversation.
            conversation = (await target.get_conversation(conversation_key=conversation_key)).conversation_id
    talk = Chat(
        target,
        console,
        screen,
        LineReader(),
        conversation_id=conversation,
        conversation_key=conversation_key,
        agent=agent,
        options=options,
    )
    return await talk.run()


def panel(show: Callable[[str, str], dict[str, Any]]) -> Tool[..., Any]:
    """Return the `show_panel` tool of the chat and the demo. `show` displays a panel."""

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def show_panel(
        title: Annotated[str, "Heading of the panel"], content: Annotated[str, "What to show, as plain text"]
    ) -> dict[str, Any]:
        """Shows something to the user on the screen, with a title."""
        return show(title, content)

    return show_panel


class Chat:
    """A conversation on a terminal.

    Reads lines while the model is writing. A line is a command, a decision on the first pending call, or a message.
    """

    def __init__(
        self,
        target: AsyncClient,
        console: Console,
        screen: Transcript,
        keyboard: LineReader,
        *,
        conversation_id: str = "",
        conversation_key: str = "",
        agent: str = "",
        options: run_pb2.RunOptions | None = None,
    ) -> None:
        self._target = target
        self._console = console
        self._screen = screen
        self._keyboard = keyboard
        self._conversation_id = conversation_id
        self._conversation_key = conversation_key
        self._agent = agent
        self._options = options
        self._active: dict[str, None] = {}
        self._resumed: set[str] = set()
        self._pending: dict[str, call_pb2.Call] = {}
        # Runs of the agents that these runs delegate to. Only their calls are shown.
        self._child_runs: set[str] = set()
        self._unattached: list[str] = []
        # Runs started without a message, so that the model can react to background results.
        self._model_turns: set[str] = set()
        # The first events of these runs, held back until there is visible output.
        self._silent_turns: dict[str, list[event_pb2.RunEvent]] = {}
        self._cursor = ""
        self._following: asyncio.Task[None] | None = None
        # Runs that are waiting for tokens or an operator. A message does not resume them.
        self._held: dict[str, run_pb2.Run] = {}
        self._connections = 0
        self._changed = asyncio.Event()
        # Commands from keys that have not been carried out yet.
        self._keys: list[str] = []
        self._prompting = False
        self._prompt_due = True
        self._leaving = False
        self._input_over = False
        self._session = target.session(
            tools=[panel(self._show_panel)], on_connected=self._connected, on_lost=self._lost
        )

    async def run(self) -> int:
        """Chat until /quit, or until the input has ended and no run can continue without it. Return the exit code."""
        if sys.stdin.isatty():
            self._screen.line(_HELP, "dim")
            # The terminal reads whole lines, but passes this key on immediately.
            asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self._press, "/stop")
        follows(self._target)
        async with self._session:
            await self._resume()
            try:
                while not self._done():
                    await self._take_next()
            finally:
                if self._following is not None:
                    self._following.cancel()
                    await asyncio.wait([self._following])
                self._leave()
        return 0

    def _press(self, command: str) -> None:
        self._keys.append(command)
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._target.follow(self._conversation_id, self._cursor)) as changes:
                    async for change in changes:
                        self._cursor = change.cursor
                        for run in (item.run for item in change.items):
                            if run.generation and run.run_id not in self._model_turns | self._resumed:
                                self._model_turns.add(run.run_id)
                                self._active[run.run_id] = None
                                self._unattached.append(run.run_id)
                                self._silent_turns[run.run_id] = []
                                self._changed.set()
            except SeqBeyondEnd:  # The suite was restored from a backup.
                self._cursor = ""
            except (FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unauthenticated):
                return
            except PawlError:
                pass  # The session reports errors.
            await asyncio.sleep(_RETRY_SECONDS)

    async def _resume(self) -> None:
        if not self._conversation_id:
            return
        request = agent_pb2.ListRunsRequest(page_size=_PAGE, conversation_id=self._conversation_id)
        page = await self._target.agents.ListRuns(request)
        if not page.runs:
            raise CommandError(
                f"No conversation has the id {self._conversation_id}. List yours with `pawl conversations list`."
            )
        for run in reversed([run for run in page.runs if run.state not in ENDED]):
            self._active[run.run_id] = None
            self._resumed.add(run.run_id)
            await self._session.attach(run.run_id)
        await self._attach()

    def _leave(self) -> None:
        self._screen.end_line()
        if self._prompting:
            self._console.print()
        if self._conversation_id and sys.stdin.isatty():
            running = "The run continues. " if self._active else ""
            agent = f" --agent {shlex.quote(self._agent)}" if self._agent else ""
            command = f"pawl chat --conversation {self._conversation_id}{agent}"
            self._screen.line(f"{running}Resume the chat with: {command}", "dim")

    async def _take_next(self) -> None:
        frame = asyncio.create_task(self._session.next_frame())
        line = asyncio.create_task(self._next_line())
        notice = asyncio.create_task(self._changed.wait())
        tasks = (frame, line, notice)
        try:
            await asyncio.wait(tasks, timeout=_IDLE_SECONDS if self._prompt_due else None, return_when=FIRST_COMPLETED)
        finally:
            # Cancel before the next await, so that no task takes an item that would then be lost.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not notice.cancelled():
            self._changed.clear()
            await self._attach()
            while self._keys:
                self._leave_prompt()
                await self._handle_line(self._keys.pop())
        if not line.cancelled():
            self._prompting = False
        quiet = all(task.cancelled() for task in tasks)
        if quiet and not self._prompting:
            self._prompt()
        self._prompt_due = not quiet
        if not frame.cancelled():
            self._show(frame.result())
            await self._attach()
        if not line.cancelled():
            await self._handle_line(line.result())

    async def _attach(self) -> None:
        if self._conversation_id and self._following is None:
            self._following = asyncio.create_task(self._follow())
        while self._unattached:
            await self._session.attach(self._unattached.pop())

    async def _next_line(self) -> str | None:
        """Return the next line, or None at the end of input.

        Users can type at any time. Lines from a file wait until they are needed.
        """
        if self._input_over or not (sys.stdin.isatty() or self._wants_line()):
            await asyncio.Event().wait()
        return await self._keyboard.line()

    def _wants_line(self) -> bool:
        """Return whether the chat can continue only with input."""
        return not self._active or bool(self._pending) or self._held.keys() >= self._active.keys()

    def _done(self) -> bool:
        """Return whether to leave the chat.

        The chat ends if the user leaves, or if the input has ended and no run can continue without it.
        """
        return self._leaving or (self._input_over and self._wants_line())

    # Frames from the suite.

    def _show(self, frame: SessionResponse) -> None:
        match frame.WhichOneof("frame"):
            case "event":
                for event in self._visible_events(frame.event):
                    self._leave_prompt()
                    self._show_event(event)
            case "gap":
                self._leave_prompt()
                self._silent_turns.pop(frame.gap.run_id, None)
                self._screen.show_gap(frame.gap)
            case "end":
                for runs_of in (self._active, self._held, self._silent_turns):
                    runs_of.pop(frame.end.run_id, None)

    def _visible_events(self, event: event_pb2.RunEvent) -> list[event_pb2.RunEvent]:
        held_back = self._silent_turns.get(event.run_id)
        if held_back is None:
            return [event]
        if not is_visible(event):
            held_back.append(event)
            return []
        return [*self._silent_turns.pop(event.run_id), event]

    def _leave_prompt(self) -> None:
        if self._prompting:
            self._console.print()
            self._prompting = False

    def _show_event(self, event: event_pb2.RunEvent) -> None:
        if event.run_id in self._child_runs:
            if event.HasField("call_changed"):
                self._screen.show(event)
                self._note_pending(event.call_changed.call)
            return
        self._conversation_id = event.conversation_id
        by_user = event.message_added.message.role == message_pb2.ROLE_USER
        if not (
            by_user and sys.stdin.isatty() and event.run_id not in self._resumed
        ):  # Otherwise the terminal shows it already.
            self._screen.show(event)
        if event.HasField("call_changed"):
            self._note_pending(event.call_changed.call)
        if event.HasField("run_changed"):
            self._note_held(event.run_changed.run)

    def _note_pending(self, call: call_pb2.Call) -> None:
        if call.state in {call_pb2.CALL_STATE_AWAITING_APPROVAL, call_pb2.CALL_STATE_ASKED}:
            self._pending[call.call_id] = call
        else:
            self._pending.pop(call.call_id, None)
        if call.state == call_pb2.CALL_STATE_DELEGATED and call.child_run_id not in self._child_runs:
            self._child_runs.add(call.child_run_id)
            self._unattached.append(call.child_run_id)

    def _note_held(self, run: run_pb2.Run) -> None:
        if run_pb2.WAIT_KIND_BUDGET in run.waits:
            self._held[run.run_id] = run
            needed = f" (at least {run.tokens_needed})" if run.tokens_needed else ""
            self._screen.command(f"/top-up TOKENS adds tokens{needed}, /cancel stops the run")
        elif run.state == run_pb2.RUN_STATE_NEEDS_ATTENTION:
            self._held[run.run_id] = run
            self._screen.command(f"pawl attention {run.run_id} shows what to do, /cancel stops the run")
        else:
            self._held.pop(run.run_id, None)

    def _show_panel(self, title: str, content: str) -> dict[str, bool]:
        self._screen.card(wording.clean(title), wording.clean(content).splitlines(), "magenta")
        return {"shown": True}

    def _connected(self, address: str) -> None:
        self._connections += 1
        if self._connections > 1:
            self._notice(f"↻ reconnected to {address}", "dim")

    def _lost(self) -> None:
        self._notice("↻ connection lost; reconnecting", "yellow")

    def _notice(self, text: str, style: str) -> None:
        if self._prompting:
            self._console.print()
        self._screen.line(text, style)
        self._changed.set()

    def _prompt(self) -> None:
        if not sys.stdin.isatty():
            return
        call = next(iter(self._pending.values()), None)
        if call is not None:
            self._screen.end_line()
            self._console.print(answers.prompt(call), end="", markup=False, style="bold")
        elif self._wants_line():
            self._screen.end_line()
            self._console.print("> ", end="", style="bold")
        self._prompting = self._wants_line()

    # Lines from the keyboard.

    async def _handle_line(self, line: str | None) -> None:
        if line is None:
            self._input_over = True
            if sys.stdin.isatty():
                self._console.print()
            return
        try:
            text = line.removeprefix("/") if line.startswith("//") else line
            if text == line and line.startswith("/") and not self._declines(line):
                await self._command(line.strip())
            elif self._pending:
                await self._decide(text)
            elif text.strip():
                run_id = await self._session.start(
                    text,
                    conversation_id=self._conversation_id,
                    conversation_key="" if self._conversation_id else self._conversation_key,
                    agent=self._agent,
                    options=self._options,
                )
                self._active[run_id] = None
        except (CommandError, PawlError) as error:
            self._screen.line(explain(error, list(self._target.agent)), "yellow")

    def _declines(self, line: str) -> bool:
        call = next(iter(self._pending.values()), None)
        is_asked = call is not None and call.state == call_pb2.CALL_STATE_ASKED
        return is_asked and line.partition(" ")[0] == answers.REFUSAL

    async def _decide(self, line: str) -> None:
        call_id, call = next(iter(self._pending.items()))
        decision = answers.decision_of(line, call)
        self._pending.pop(call_id)
        try:
            await self._session.decide(decision)
        except (InvalidArguments, InvalidJson):
            self._pending = {call_id: call, **self._pending}
            raise

    async def _command(self, command: str) -> None:
        match command.split():
            case ["/quit" | "/exit"]:
                self._leaving = True
            case ["/cancel"]:
                await self._cancel()
            case ["/top-up", tokens] if tokens.isascii() and tokens.isdecimal() and len(tokens) <= _DIGITS_MAX:
                await self._top_up(int(tokens))
            case ["/runs"]:
                request = agent_pb2.ListRunsRequest(page_size=_SHOWN)
                page = await self._target.agents.ListRuns(request)
                self._screen.end_line()
                show_items(self._console, page.runs, runs.COLUMNS, none=runs.NO_RUNS)
            case ["/jobs"]:
                of = self._conversation_id
                found = [job.message async for job in self._target.list_jobs(of, open_only=True)] if of else []
                self._screen.end_line()
                show_items(self._console, found, jobs.COLUMNS, none=jobs.NONE_OPEN)
            case ["/stop", *job_ids] if len(job_ids) <= 1:
                await self._stop_job(*job_ids)
            case ["/pause", job_id]:
                self._screen.line(jobs.paused_text(await self._target.pause_job(job_id)), "dim")
            case ["/resume", job_id]:
                self._screen.line(jobs.paused_text(await self._target.resume_job(job_id), resumed=True), "dim")
            case ["/help"]:
                self._screen.line(_HELP, "dim")
            case [name, *_] if usage := [typed for typed in _COMMANDS if typed.split()[0] == name]:
                self._screen.line(f"Usage: {usage[0]}", "yellow")
            case [name, *_]:
                known = ", ".join(_COMMANDS)
                shown = wording.one_line(name)
                self._screen.line(f"Unknown command {shown}. Commands: {known}. To send it as text: /{shown}", "yellow")

    async def _stop_job(self, job_id: str = "") -> None:
        """Stop a job, by default the newest in this conversation."""
        if not job_id:
            of = self._conversation_id
            found = [job.job_id async for job in self._target.list_jobs(of, open_only=True)] if of else []
            job_id = found[0] if found else ""
        if not job_id:
            self._screen.line("No background job is open.", "dim")
        else:
            self._screen.line(wording.stopped_text(await self._target.stop_job(job_id, "stopped in the chat")), "dim")

    async def _top_up(self, tokens: int) -> None:
        waiting = [run for run in self._held.values() if run_pb2.WAIT_KIND_BUDGET in run.waits]
        if not waiting:
            self._screen.line("No run is waiting for tokens.", "dim")
        for run in waiting:
            await self._target.top_up(run.run_id, tokens)

    async def _cancel(self) -> None:
        if not self._active:
            self._screen.line("No run is active.", "dim")
        for run_id in list(self._active):
            await self._session.cancel(run_id, "cancelled in the chat")
