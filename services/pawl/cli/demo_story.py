"""The conversation that `pawl demo` plays, and what it remembers to be checked."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.request import urlopen

import nats
from nats.aio.msg import Msg

from pawl.chassis.bus import flush
from pawl.chassis.tasks import within
from pawl.cli.chat import panel
from pawl.cli.demo_screen import Screen
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient, AsyncSession, answer, edit
from pawl.event.v1 import call_pb2, event_pb2
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2

LAST_NUMBER: Final = 60
PROMPT: Final = (
    "add task Launch with subtasks Write and Test"
    "; then show me the plan"
    "; then book a table"
    "; then e-mail ann@example.com about lunch: see you at noon"
    f"; then count slowly to {LAST_NUMBER}"
)
EDITED_SUBJECT: Final = "lunch at one"
DELTAS_BEFORE_KILL: Final = 3

_AGENT: Final = "agent-loop"
_HELD: Final = "pawl_agent_loop_runs_held"
_METRIC: Final = "pawl_agent_loop_model_calls_total"
_NOTIFICATION_SECONDS_MAX: Final = 10.0
_OWNER_SECONDS_MAX: Final = 3.0


@dataclass(slots=True, kw_only=True)
class Evidence:
    """The record of what the client did and saw."""

    panel: str = field(default_factory=lambda: f"panel-{secrets.token_hex(4)}")
    answer: str = ""
    subject: str = EDITED_SUBJECT
    last_words: str = str(LAST_NUMBER)
    run_id: str = ""
    seen: list[event_pb2.RunEvent] = field(default_factory=list)
    heard: list[notify_pb2.Notification] = field(default_factory=list)
    killed_pid: int = 0
    attempt_when_killed: int = 0
    victim_stayed_down: bool = False
    connections_after_kill: list[str] = field(default_factory=list)
    metric: str = ""
    seconds: float = 0.0


class Story:
    """Plays the conversation once. `target` lists every replica."""

    def __init__(self, suite: Suite, target: AsyncClient, screen: Screen) -> None:
        self.evidence = Evidence()
        self._suite = suite
        self._target = target
        self._screen = screen
        self._session: AsyncSession | None = None
        self._address = ""
        self._mailed = False
        self._final_deltas = 0
        self._victim: int | None = None
        self._told = asyncio.Event()

    async def play(self) -> None:
        """Talk until the run has ended and its notification was heard, or should have been."""
        subscriber = await nats.connect(self._suite.nats_url())
        try:
            await subscriber.subscribe("pawl.v1.local.user.me.notifications", cb=self._hear)
            await flush(subscriber)
            await self._talk()
            await self._await_notification()
        finally:
            await subscriber.close()
        self.evidence.metric = await self._metric()
        self._screen.note(f"Prometheus: {self.evidence.metric}")

    async def _talk(self) -> None:
        session = await self._connect(self._target.agent)
        try:
            self._screen.note(f"You: {PROMPT}")
            self.evidence.run_id = await session.start(PROMPT)
            while True:
                frame = await self._current.next_frame()
                if frame.HasField("end"):
                    break
                if frame.HasField("event"):
                    self.evidence.seen.append(frame.event)
                    self._screen.event(frame.event)
                    await self._react(frame.event)
        finally:
            await self._current.__aexit__(None, None, None)
        if self._victim is not None:
            self.evidence.victim_stayed_down = self._suite.pid(_AGENT, self._victim) is None

    # What this front end does.

    async def _react(self, event: event_pb2.RunEvent) -> None:
        if event.HasField("call_changed"):
            await self._decide(event.call_changed.call)
        elif self._mailed and event.output_delta.text and self._victim is None:
            self._final_deltas += 1
            if self._final_deltas >= DELTAS_BEFORE_KILL:
                await self._kill_owner(event.attempt)

    async def _decide(self, call: call_pb2.Call) -> None:
        if call.state == call_pb2.CALL_STATE_ASKED and not self.evidence.answer:
            self.evidence.answer = call.question.options[0]
            self._screen.note(f"You answer: {self.evidence.answer}")
            await self._current.decide(answer(call, self.evidence.answer))
        elif call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
            edited = json.loads(call.arguments_json) | {"subject": EDITED_SUBJECT}
            self._screen.note(f"You approve, with another subject: {EDITED_SUBJECT}")
            await self._current.decide(edit(call, edited))
        elif call.tool_name == "send_email" and call.state == call_pb2.CALL_STATE_SUCCEEDED:
            self._mailed = True

    def _show_panel(self, title: str, content: str) -> dict[str, str]:
        self._screen.note(f"[{title}] {content}")
        return {"shown_as": self.evidence.panel}

    # Which replica does what.

    @property
    def _current(self) -> AsyncSession:
        if self._session is None:
            raise CommandError("There is no session.")
        return self._session

    async def _connect(self, addresses: Sequence[str]) -> AsyncSession:
        self._session = self._target.session(
            addresses=addresses,
            tools=[panel(self._show_panel)],
            # Its calls come to it, whichever session it has.
            client_id="demo",
            on_connected=self._connected,
        )
        return await self._session.__aenter__()

    def _connected(self, address: str) -> None:
        self._address = address
        self._screen.note(f"Connected to the agent-loop at {address}")
        if self._victim is not None:
            self.evidence.connections_after_kill.append(address)

    async def _kill_owner(self, attempt: int) -> None:
        """Kill the replica that runs the run, with this client attached to it, and keep it down."""
        owner = await self._owner()
        address = self._target.agent[owner]
        if self._address != address:
            self._screen.note(f"The run is driven by the agent-loop at {address}: attach there")
            await self._current.__aexit__(None, None, None)
            others = [other for other in self._target.agent if other != address]
            await (await self._connect([address, *others])).attach(self.evidence.run_id, self.evidence.seen[-1].seq)
        self.evidence.attempt_when_killed = attempt
        self.evidence.killed_pid = self._suite.pid(_AGENT, owner) or 0
        self._victim = owner
        self._screen.note(
            f"kill -9 {self.evidence.killed_pid}: the agent-loop at {address}, in the middle of the answer"
        )
        self._suite.kill(_AGENT, owner)
        # The launcher would start it again at once; then nobody could say who finished the run.
        await self._suite.stop_process(_AGENT, owner)

    async def _owner(self) -> int:
        """Return which replica holds a run; while one streams, exactly one does."""
        async with asyncio.timeout(_OWNER_SECONDS_MAX):
            while True:
                for number, replica in enumerate(self._suite.endpoints.services[_AGENT]):
                    if f"{_HELD} 1.0" in await _metrics(replica.metrics):
                        return number
                await asyncio.sleep(0.05)

    async def _metric(self) -> str:
        for replica in self._suite.endpoints.services[_AGENT]:
            if replica.pid is None:
                continue
            for line in await _metrics(replica.metrics):
                if line.startswith(_METRIC) and not line.endswith(" 0.0"):
                    return line
        return ""

    # What the subscriber hears.

    async def _hear(self, message: Msg) -> None:
        notification = notify_pb2.Notification.FromString(message.data)
        self.evidence.heard.append(notification)
        self._screen.note(f"NATS subscriber heard: {notification.title}")
        if notification.kind == notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED:
            self._told.set()

    async def _await_notification(self) -> None:
        if not await within(_NOTIFICATION_SECONDS_MAX, self._told.wait()):
            self._screen.note("the NATS subscriber heard nothing of the end")


async def _metrics(address: str) -> list[str]:
    def get() -> list[str]:
        with urlopen(f"http://{address}/metrics", timeout=2) as response:
            text: str = response.read().decode()
        return text.splitlines()

    return await asyncio.to_thread(get)
