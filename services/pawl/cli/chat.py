"""`pawl chat`: a conversation over the Session stream."""

from __future__ import annotations

import asyncio
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
from pawl.cli.transcript import ENDED, Transcript, says_something
from pawl.client import AsyncClient
from pawl.errors import ConversationNotFound, InvalidArguments, InvalidJson, PawlError
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.tools import Category, EffectClass, Tool, tool

# Each as it is typed, and what it does.
_COMMANDS: Final = {
    "/cancel": "stops the run",
    "/top-up TOKENS": "adds to its budget",
    "/runs": "lists yours",
    "/jobs": "lists what runs in the background",
    "/pause JOB": "pauses one of these",
    "/resume JOB": "lets it go on",
    "/stop JOB": "ends it",
    "/help": "says this",
    "/quit": "leaves (runs go on)",
}
_HELP: Final = (
    f"Type a message. {', '.join(f'{typed} {does}' for typed, does in _COMMANDS.items())}. "
    "What begins with a slash is said with two: //this."
)
_SHOWN: Final = 10
_PAGE: Final = 200
_DIGITS_MAX: Final = 18
_QUIET_SECONDS: Final = 0.1
_AGAIN_SECONDS: Final = 2.0


@command()
async def chat(
    target: AsyncClient,
    console: Console,
    *,
    conversation: Annotated[str, typer.Option(help="Go on with this conversation.")] = "",
    conversation_key: ConversationKey = "",
    agent: Agent = "",
    effort: Effort = None,
    reasoning: Reasoning = False,
) -> int:
    """Talk to the agent.

    Live text, tool calls, approvals and questions in one place. Lines of a file
    may take the place of the keyboard.
    """
    screen = Transcript(console, whole_reasoning=reasoning)
    options = run_pb2.RunOptions(reasoning_effort=effort_of(effort))
    if conversation and conversation_key:
        raise CommandError("Give --conversation or --conversation-key, not both.")
    if conversation_key:
        with suppress(ConversationNotFound):  # The first message begins it.
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
    """Return the tool that a front end of ours runs itself."""

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def show_panel(
        title: Annotated[str, "Heading of the panel"], content: Annotated[str, "What to show, as plain text"]
    ) -> dict[str, Any]:
        """Shows something to the user on the screen, with a title."""
        return show(title, content)

    return show_panel


class Chat:
    """One conversation at the keyboard.

    Lines are read while the model speaks. A line is a command, else the decision
    about the first call that waits for one, else a message.
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
        # Runs that do calls of those: of them only calls are shown.
        self._below: set[str] = set()
        self._unattached: list[str] = []
        # Runs that nobody asked for: the model may have something to say.
        self._turns: set[str] = set()
        # What they began with, as long as they have not said anything.
        self._unsaid: dict[str, list[event_pb2.RunEvent]] = {}
        # What began since then is to be shown, though it may have ended before anybody looked.
        self._first_run_id = ""
        self._following: asyncio.Task[None] | None = None
        # Runs that wait for tokens or an operator: no line of a message helps them.
        self._held: dict[str, run_pb2.Run] = {}
        self._connections = 0
        self._noticed = asyncio.Event()
        self._prompting = False
        self._prompt_due = True
        self._leaving = False
        self._input_over = False
        self._session = target.session(
            tools=[panel(self._show_panel)], on_connected=self._connected, on_lost=self._lost
        )

    async def run(self) -> int:
        """Talk until /quit, or the end of the input and of what it started; returns the exit code."""
        if sys.stdin.isatty():
            self._screen.line(_HELP, "dim")
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
                self._part()
        return 0

    async def _follow(self) -> None:
        """Have the turns of the model shown as they begin, however long the conversation goes on."""
        while True:
            with suppress(PawlError):  # Whoever types is told by the session.
                async with aclosing(self._target.follow(self._conversation_id, self._first_run_id)) as started:
                    async for run in started:
                        if run.generation and run.run_id not in self._turns | self._resumed:
                            self._turns.add(run.run_id)
                            self._active[run.run_id] = None
                            self._unattached.append(run.run_id)
                            self._unsaid[run.run_id] = []
                            self._noticed.set()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _resume(self) -> None:
        """Take up what goes on in the conversation that was asked for."""
        if not self._conversation_id:
            return
        request = agent_pb2.ListRunsRequest(page_size=_PAGE, conversation_id=self._conversation_id)
        page = await self._target.agents.ListRuns(request)
        if not page.runs:
            raise CommandError(f"No such conversation: {self._conversation_id}. `pawl runs` shows yours.")
        for run in reversed([run for run in page.runs if run.state not in ENDED]):
            self._active[run.run_id] = None
            self._resumed.add(run.run_id)
            await self._session.attach(run.run_id)
        await self._attach()

    def _part(self) -> None:
        """Say how to come back."""
        self._screen.end_line()
        if self._prompting:
            self._console.print()
        if self._conversation_id and sys.stdin.isatty():
            going_on = "The run goes on. " if self._active else ""
            self._screen.line(f"{going_on}Come back with: pawl chat --conversation {self._conversation_id}", "dim")

    async def _take_next(self) -> None:
        """Take a frame, a line and a notice, whatever is there first; ask for a line once it is quiet."""
        frame = asyncio.create_task(self._session.next_frame())
        line = asyncio.create_task(self._next_line())
        notice = asyncio.create_task(self._noticed.wait())
        tasks = (frame, line, notice)
        try:
            await asyncio.wait(tasks, timeout=_QUIET_SECONDS if self._prompt_due else None, return_when=FIRST_COMPLETED)
        finally:
            # Before anything else is awaited: what a task takes from now on is left for its successor.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not notice.cancelled():
            self._noticed.clear()
            await self._attach()
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
            await self._obey(line.result())

    async def _attach(self) -> None:
        """Have the events of runs that were not started here come in."""
        if self._conversation_id and self._following is None:
            self._following = asyncio.create_task(self._follow())
        while self._unattached:
            await self._session.attach(self._unattached.pop())

    async def _next_line(self) -> str | None:
        """Return the next line. People may type at any time; the lines of a file wait until they are wanted."""
        if self._input_over or not (sys.stdin.isatty() or self._wants_line()):
            await asyncio.Event().wait()
        return await self._keyboard.line()

    def _wants_line(self) -> bool:
        """Return whether nothing goes on without a line."""
        return not self._active or bool(self._pending) or self._held.keys() >= self._active.keys()

    def _done(self) -> bool:
        """Return whether to leave: told to, or the input has ended and nothing is left that could go on without it."""
        return self._leaving or (self._input_over and self._wants_line())

    # What comes from the suite.

    def _show(self, frame: SessionResponse) -> None:
        match frame.WhichOneof("frame"):
            case "event":
                for event in self._said(frame.event):
                    self._begin_line()
                    self._show_event(event)
            case "gap":
                self._begin_line()
                self._unsaid.pop(frame.gap.run_id, None)
                self._screen.show_gap(frame.gap)
            case "end":
                for runs_of in (self._active, self._held, self._unsaid):
                    runs_of.pop(frame.end.run_id, None)

    def _said(self, event: event_pb2.RunEvent) -> list[event_pb2.RunEvent]:
        """Return what there is to show with an event: nothing of a turn that says nothing."""
        unsaid = self._unsaid.get(event.run_id)
        if unsaid is None:
            return [event]
        if not says_something(event):
            unsaid.append(event)
            return []
        return [*self._unsaid.pop(event.run_id), event]

    def _begin_line(self) -> None:
        """Leave the line of a prompt, which is asked for again."""
        if self._prompting:
            self._console.print()
            self._prompting = False

    def _show_event(self, event: event_pb2.RunEvent) -> None:
        if event.run_id in self._below:
            if event.HasField("call_changed"):
                self._screen.show(event)
                self._note_pending(event.call_changed.call)
            return
        self._conversation_id = event.conversation_id
        self._first_run_id = self._first_run_id or event.run_id
        by_user = event.message_added.message.role == message_pb2.ROLE_USER
        if not (by_user and sys.stdin.isatty() and event.run_id not in self._resumed):  # Else it stands there already.
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
        if call.state == call_pb2.CALL_STATE_DELEGATED and call.child_run_id not in self._below:
            self._below.add(call.child_run_id)
            self._unattached.append(call.child_run_id)

    def _note_held(self, run: run_pb2.Run) -> None:
        if run_pb2.WAIT_KIND_BUDGET in run.waits:
            self._held[run.run_id] = run
            needed = f" (at least {run.tokens_needed})" if run.tokens_needed else ""
            self._screen.command(f"/top-up TOKENS adds some{needed}, /cancel stops the run")
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
            self._notice(f"↻ connected again, to {address}", "dim")

    def _lost(self) -> None:
        self._notice("↻ the connection is gone; trying again", "yellow")

    def _notice(self, text: str, style: str) -> None:
        """Say something that is no answer to anything; a prompt that stood there is asked again."""
        if self._prompting:
            self._console.print()
        self._screen.line(text, style)
        self._noticed.set()

    def _prompt(self) -> None:
        """Ask for a decision if one is wanted, else for a message; nobody reads it without a terminal."""
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

    # What comes from the keyboard.

    async def _obey(self, line: str | None) -> None:
        if line is None:
            self._input_over = True
            if sys.stdin.isatty():
                self._console.print()
            return
        try:
            said = line.removeprefix("/") if line.startswith("//") else line
            if said == line and line.startswith("/") and not self._refuses(line):
                await self._command(line.strip())
            elif self._pending:
                await self._decide(said)
            elif said.strip():
                run_id = await self._session.start(
                    said,
                    conversation_id=self._conversation_id,
                    conversation_key="" if self._conversation_id else self._conversation_key,
                    agent=self._agent,
                    options=self._options,
                )
                self._active[run_id] = None
        except (CommandError, PawlError) as error:
            self._screen.line(explain(error, list(self._target.agent)), "yellow")

    def _refuses(self, line: str) -> bool:
        """Return whether a line gives no answer to the question that waits for one."""
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
                found = [job async for job in self._target.list_jobs(of, open_only=True)] if of else []
                self._screen.end_line()
                show_items(self._console, found, jobs.COLUMNS, none=jobs.NONE_OPEN)
            case ["/stop", job_id]:
                self._screen.line(
                    wording.stopped_text(await self._target.stop_job(job_id, "stopped in the chat")), "dim"
                )
            case ["/pause", job_id]:
                self._screen.line(jobs.paused_text(await self._target.pause_job(job_id)), "dim")
            case ["/resume", job_id]:
                self._screen.line(jobs.paused_text(await self._target.resume_job(job_id), resumed=True), "dim")
            case ["/help"]:
                self._screen.line(_HELP, "dim")
            case [name, *_] if meant := [typed for typed in _COMMANDS if typed.split()[0] == name]:
                self._screen.line(f"It is: {meant[0]}", "yellow")
            case [name, *_]:
                there_are = ", ".join(_COMMANDS)
                said = wording.one_line(name)
                self._screen.line(f"There is no command {said}. There are {there_are}. To say it: /{said}", "yellow")

    async def _top_up(self, tokens: int) -> None:
        waiting = [run for run in self._held.values() if run_pb2.WAIT_KIND_BUDGET in run.waits]
        if not waiting:
            self._screen.line("No run waits for tokens.", "dim")
        for run in waiting:
            await self._target.top_up(run.run_id, tokens)

    async def _cancel(self) -> None:
        if not self._active:
            self._screen.line("No run is active.", "dim")
        for run_id in list(self._active):
            await self._session.cancel(run_id, "cancelled in the chat")
