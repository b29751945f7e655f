"""Implements `pawl demo`: a conversation with a crash in the middle, checked against the ledger."""

from __future__ import annotations

import asyncio
import email
import email.policy
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import nats
import typer
from nats.aio.msg import Msg
from rich.console import Console

from pawl.chassis.process.tasks import within
from pawl.cli import wording
from pawl.cli.chat import panel
from pawl.cli.command import EXIT_IMPOSSIBLE, EXIT_INTERRUPTED, EXIT_UNSUCCESSFUL, fail
from pawl.cli.failure import CommandError
from pawl.cli.transcript import ENDED, Transcript
from pawl.client import AsyncClient, AsyncSession, answer, edit
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2
from pawl.server.bus.connection import flush
from pawl.server.process import log_setup

_SECONDS_MAX: Final = 120.0
_SECONDS_GOOD: Final = 60.0
_NOTIFICATION_SECONDS_MAX: Final = 10.0
_PAGE: Final = 200
_AGENT: Final = "agent-loop"
_LAST_NUMBER: Final = 60
_PROMPT: Final = (
    "add task Launch with subtasks Write and Test"
    "; then show me the plan"
    "; then book a table"
    "; then e-mail ann@example.com about lunch: see you at noon"
    f"; then count slowly to {_LAST_NUMBER}"
)
_SUBJECT: Final = "lunch at one"
_SHOWN_AS: Final = "panel of the demo"
_DELTAS_BEFORE_KILL: Final = 3


@dataclass(slots=True, kw_only=True)
class Evidence:
    run: run_pb2.Run = field(default_factory=run_pb2.Run)
    calls: Sequence[call_pb2.Call] = ()
    messages: Sequence[message_pb2.Message] = ()
    events: Sequence[event_pb2.RunEvent] = ()
    inbox: Sequence[notify_pb2.Notification] = ()
    subjects: Sequence[str] = ()
    seen: list[event_pb2.RunEvent] = field(default_factory=list)
    heard: list[notify_pb2.Notification] = field(default_factory=list)
    answer: str = ""
    attempt_when_killed: int = 0
    stayed_down: bool = False
    connections_after_kill: list[str] = field(default_factory=list)
    seconds: float = _SECONDS_GOOD


def demo(
    *, keep: Annotated[bool, typer.Option("--keep", help="Always keep the data folder and its logs.")] = False
) -> None:
    """Play a conversation, including a crash.

    Starts its own suite in a temporary folder on free ports, plays the conversation, and verifies the outcome from the
    ledger. The exit code is 0 if every check passes.
    """
    folder = Path(tempfile.mkdtemp(prefix="pawl-demo-"))
    code = EXIT_UNSUCCESSFUL
    try:
        code = asyncio.run(_play(folder, Transcript(Console(highlight=False))))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except TimeoutError:
        code = fail(CommandError(f"The demo did not finish within {_SECONDS_MAX:g} s."), [])
    except Exception as error:  # noqa: BLE001  # users see a message, never a traceback
        code = fail(error, [])
    if keep or code in {EXIT_UNSUCCESSFUL, EXIT_IMPOSSIBLE}:
        print(f"Data and logs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(code)


async def _play(folder: Path, screen: Transcript) -> int:
    started = time.monotonic()
    log_setup.configure(service="demo", instance_id="demo", level="error", log_format="auto")
    screen.line(f"Starting PostgreSQL, NATS, a scripted model and the services in {folder} ...")
    options = SuiteOptions(data=folder, replicas={_AGENT: 2})
    async with (
        asyncio.timeout(_SECONDS_MAX),
        Suite(options) as suite,
        AsyncClient(data=folder, environment={}) as target,
    ):
        screen.line(
            f"Ready after {time.monotonic() - started:.1f} s. Two replicas of agent-loop are running: {target.agent}"
        )
        story = Story(suite, target, screen)
        await story.play()
        evidence = story.evidence
        await _read_ledger(target, evidence, suite.folder.outbox)
    evidence.seconds = time.monotonic() - started
    screen.line("\nVerified from the ledger:")
    found = verdicts(evidence)
    for name, good in found.items():
        screen.line(f"{'✓' if good else '✗'} {name}", "green" if good else "bold red")
    missing = [name for name, good in found.items() if not good]
    if missing:
        screen.line(f"{len(missing)} of {len(found)} checks failed: {'; '.join(missing)}")
        return EXIT_UNSUCCESSFUL
    screen.line("All checks passed.")
    screen.line(
        "Next: run `make up`, and in another terminal `.venv/bin/pawl console` to open the console in a browser."
    )
    return 0


class Story:
    """The demo's conversation, played once. `target` contains every replica's address."""

    def __init__(self, suite: Suite, target: AsyncClient, screen: Transcript) -> None:
        self.evidence = Evidence()
        self._suite = suite
        self._target = target
        self._screen = screen
        self._address = ""
        self._deltas_after_mail = -1
        self._victim: int | None = None
        self._notified = asyncio.Event()

    async def play(self) -> None:
        """Play until the run has ended and its notification has either arrived or timed out."""
        subscriber = await nats.connect(self._suite.nats_url())
        try:
            await subscriber.subscribe("pawl.v1.local.user.me.notifications", cb=self._hear)
            await flush(subscriber)
            await self._talk()
            await within(_NOTIFICATION_SECONDS_MAX, self._notified.wait())
        finally:
            await subscriber.close()
        if self._victim is not None:
            self.evidence.stayed_down = self._suite.pid(_AGENT, self._victim) is None

    async def _talk(self) -> None:
        async with self._target.session(
            addresses=self._target.agent, tools=[panel(self._show_panel)], on_connected=self._connected
        ) as session:
            self.evidence.run.run_id = await session.start(_PROMPT)
            while not (frame := await session.next_frame()).HasField("end"):
                if frame.HasField("event"):
                    self.evidence.seen.append(frame.event)
                    self._screen.show(frame.event)
                    await self._react(session, frame.event)

    async def _react(self, session: AsyncSession, event: event_pb2.RunEvent) -> None:
        """React to an event as a user would. During the run's last answer, kill the replica that drives the run."""
        call = event.call_changed.call
        if call.state == call_pb2.CALL_STATE_ASKED and not self.evidence.answer:
            self.evidence.answer = call.question.options[0]
            self._note(f"You answer: {self.evidence.answer}")
            await session.decide(answer(call, self.evidence.answer))
        elif call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
            self._note(f"You approve, with another subject: {_SUBJECT}")
            await session.decide(edit(call, json.loads(call.arguments_json) | {"subject": _SUBJECT}))
        elif call.tool_name == "send_email" and call.state == call_pb2.CALL_STATE_SUCCEEDED:
            self._deltas_after_mail = 0
        elif event.output_delta.text and self._deltas_after_mail >= 0:
            self._deltas_after_mail += 1
            if self._deltas_after_mail == _DELTAS_BEFORE_KILL:
                await self._kill_owner(event.attempt)

    def _show_panel(self, title: str, content: str) -> dict[str, str]:
        self._note(f"[{title}] {content}")
        return {"shown_as": _SHOWN_AS}

    def _connected(self, address: str) -> None:
        self._address = address
        self._note(f"Connected to the agent-loop at {address}")
        if self._victim is not None:
            self.evidence.connections_after_kill.append(address)

    async def _kill_owner(self, attempt: int) -> None:
        """Kill the replica that drives the run and serves this client, and leave it stopped."""
        self.evidence.attempt_when_killed = attempt
        self._victim = self._target.agent.index(self._address)
        self._note(f"kill -9: the agent-loop at {self._address}, in the middle of the answer")
        self._suite.kill(_AGENT, self._victim)
        # Otherwise the launcher would restart it, and checking which replica finished the run would prove nothing.
        await self._suite.stop_process(_AGENT, self._victim)

    async def _hear(self, message: Msg) -> None:
        notification = notify_pb2.Notification.FromString(message.data)
        self.evidence.heard.append(notification)
        self._note(f"NATS subscriber received: {notification.title}")
        if notification.kind == notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED:
            self._notified.set()

    def _note(self, text: str) -> None:
        self._screen.line(f"        --> {wording.clean(text)}", "bold yellow")


async def _read_ledger(target: AsyncClient, evidence: Evidence, outbox: Path) -> None:
    evidence.run = run = await target.get(evidence.run.run_id)
    evidence.calls = [call async for call in target.calls(run.run_id)]
    evidence.messages = [message async for message in target.messages(run.conversation_id)]
    events = [event async for event in target.watch(run.run_id)]
    evidence.events = [event for event in events if isinstance(event, event_pb2.RunEvent)]
    request = notify_pb2.ListNotificationsRequest(page_size=_PAGE)
    evidence.inbox = (await target.notifier.ListNotifications(request)).notifications
    evidence.subjects = await asyncio.to_thread(_subjects, outbox)


def _subjects(outbox: Path) -> list[str]:
    mails = (path.read_bytes() for path in sorted(outbox.glob("*/*.eml")))
    return [str(email.message_from_bytes(mail, policy=email.policy.default)["Subject"]) for mail in mails]


def verdicts(evidence: Evidence) -> dict[str, bool]:
    run, events = evidence.run, evidence.events
    calls = {call.tool_name: call for call in reversed(evidence.calls)}
    created, added, shown, asked, mailed = (
        calls.get(name, call_pb2.Call())
        for name in ("create_task", "add_subtask", "show_panel", "ask_user", "send_email")
    )
    seqs = [event.seq for event in events]
    answers = [each.text for each in evidence.messages if each.role == message_pb2.ROLE_ASSISTANT]
    ended = [event.seq for event in events if event.run_changed.run.state in ENDED]
    killed = evidence.attempt_when_killed
    last = max((event.seq for event in events if event.attempt == killed), default=0)
    later = {event.attempt for event in events if event.seq > last and event.attempt}
    completed = [n.event_id for n in evidence.heard if n.kind == notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED]
    stored = [n.event_id for n in evidence.inbox if n.kind == notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED]
    return {
        "the log is complete, without a gap, and its last event ends the run": bool(seqs)
        and seqs == list(range(1, len(seqs) + 1))
        and ended == seqs[-1:]
        and run.state == run_pb2.RUN_STATE_COMPLETED,
        "reasoning was streamed and stored": any(each.reasoning for each in evidence.messages)
        and any(event.output_delta.reasoning for event in events),
        "the answer is complete to its last character": answers[-1:] == [run.output_text]
        and run.output_text.rstrip().endswith(str(_LAST_NUMBER)),
        "two backend calls, the second using the result of the first": bool(_result(created).get("task_id"))
        and _result(added).get("parent", {}).get("task_id") == _result(created)["task_id"],
        "a front-end call, answered by this client": _result(shown) == {"shown_as": _SHOWN_AS},
        "a question, answered": bool(evidence.answer) and evidence.answer in asked.result.content_json.decode(),
        "send_email, approved with an edited argument, sent once": list(evidence.subjects) == [_SUBJECT]
        and mailed.approval.decision.kind == call_pb2.DECISION_KIND_EDIT,
        "kill -9 while the model streamed, finished by another replica": bool(later)
        and min(later) > killed > 0
        and evidence.stayed_down,
        "the client reconnected and saw every event once, byte for byte": bool(evidence.connections_after_kill)
        and [_bytes(event) for event in evidence.seen] == [_bytes(event) for event in events],
        "no call is left open": bool(evidence.calls)
        and all(call.HasField("result") and call.HasField("end_time") for call in evidence.calls)
        and not run.pending_calls,
        "a NATS subscriber was notified once": completed == stored == [event.event_id for event in events[-1:]] != [],
        "finished in time": evidence.seconds < _SECONDS_GOOD,
    }


def _bytes(event: event_pb2.RunEvent) -> bytes:
    return event.SerializeToString(deterministic=True)


def _result(call: call_pb2.Call) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call.result.content_json or b"{}")
    return found
