"""The chat, and the commands for conversations."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator
from typing import Any, Self, cast
from unittest.mock import AsyncMock

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from pawl.agent.v1 import agent_pb2, conversation_pb2, jobs_pb2, session_pb2
from pawl.cli import chat
from pawl.cli.chat import Chat
from pawl.cli.conversations import call_lines
from pawl.cli.transcript import Transcript
from pawl.cli.wording import stopped_text
from pawl.client import AsyncClient
from pawl.errors import ConversationErased, InvalidArguments, SeqBeyondEnd, Unavailable
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.event.v1.conversation_pb2 import Conversation, Erasure, LeftCall
from tests.tables import for_each
from tests.unit.cli.test_commands import invoke


class Session:
    """A stream client whose runs end before the response to their start."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.frames: asyncio.Queue[session_pb2.SessionResponse] = asyncio.Queue()
        self.started: list[str] = []
        self.starts: list[tuple[str, str]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def next_frame(self) -> session_pb2.SessionResponse:
        return await self.frames.get()

    async def start(self, text: str, *, conversation_id: str = "", conversation_key: str = "", **_: Any) -> str:
        self.started.append(text)
        self.starts.append((conversation_id, conversation_key))
        await asyncio.sleep(0)
        run_id = f"run_{len(self.started)}"
        completed = event_pb2.RunEvent(
            run_id=run_id,
            conversation_id=conversation_id or "conv_1",
            run_changed=event_pb2.RunChanged(run=run_pb2.Run(run_id=run_id, state=run_pb2.RUN_STATE_COMPLETED)),
        )
        self.frames.put_nowait(session_pb2.SessionResponse(event=completed))
        # Let a reader get the frame before the receipt.
        for _turn in range(3):
            await asyncio.sleep(0)
        return run_id


class Keyboard:
    def __init__(self, *lines: str) -> None:
        self._lines: list[str | None] = [*lines, None]

    async def line(self) -> str | None:
        return self._lines.pop(0)


def talking(*lines: str, **options: Any) -> tuple[Chat, Any, io.StringIO]:
    output = io.StringIO()
    console, keyboard = Console(file=output, width=400), cast("Any", Keyboard(*lines))
    talk = Chat(AsyncClient("127.0.0.1:1", environment={}), console, Transcript(console), keyboard, **options)
    return talk, talk._session, output


async def test_a_line_and_a_frame_that_arrive_together_are_both_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncClient, "session", Session)
    talk, session, output = talking("first", "second", conversation_key="k")
    for _ in range(2):
        session.frames.put_nowait(session_pb2.SessionResponse(heartbeat=session_pb2.ServerHeartbeat()))

    async def end_runs() -> None:
        while True:
            await asyncio.sleep(0)
            for run_id in list(talk._active):
                session.frames.put_nowait(session_pb2.SessionResponse(end=session_pb2.End(run_id=run_id)))
                await asyncio.sleep(0.01)

    ending = asyncio.create_task(end_runs())
    async with asyncio.timeout(60):
        assert await talk.run() == 0
    ending.cancel()
    assert (session.started, output.getvalue().count("completed (")) == (["first", "second"], 2)
    assert session.starts == [("", "k"), ("conv_1", "")], "the key starts the conversation and its id continues it"


class HeldSession(Session):
    """A session whose runs wait for tokens or for an operator."""

    async def start(self, text: str, *, conversation_id: str = "", conversation_key: str = "", **_: Any) -> str:
        self.started.append(text)
        self.starts.append((conversation_id, conversation_key))
        run = run_pb2.Run(run_id=f"run_{len(self.started)}", state=run_pb2.RUN_STATE_NEEDS_ATTENTION)
        if text == "spend":
            run.state = run_pb2.RUN_STATE_WAITING
            run.waits.append(run_pb2.WAIT_KIND_BUDGET)
        changed = event_pb2.RunEvent(run_id=run.run_id, run_changed=event_pb2.RunChanged(run=run))
        self.frames.put_nowait(session_pb2.SessionResponse(event=changed))
        return run.run_id

    async def cancel(self, run_id: str, reason: str) -> None:
        del reason
        self.frames.put_nowait(session_pb2.SessionResponse(end=session_pb2.End(run_id=run_id)))


async def test_a_refused_decision_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncClient, "session", Session)
    talk, session, _ = talking()
    session.decide = AsyncMock(side_effect=InvalidArguments("amount is no number"))
    waiting = {name: call_pb2.Call(call_id=name, state=call_pb2.CALL_STATE_AWAITING_APPROVAL) for name in ("a", "b")}
    talk._pending = dict(waiting)
    with pytest.raises(InvalidArguments):
        await talk._decide('e {"amount": "x"}')
    assert list(talk._pending.items()) == list(waiting.items())


def turn_event(**kind: Any) -> session_pb2.SessionResponse:
    return session_pb2.SessionResponse(event=event_pb2.RunEvent(run_id="turn_1", conversation_id="conv_1", **kind))


@pytest.mark.parametrize("reply", ["", "It has ended: 42."])
async def test_a_silent_turn_is_not_shown(reply: str) -> None:
    """ASYNC-5: a silent turn shows no start, notice or end. Any other turn shows all three in order."""
    talk, _, output = talking()
    talk._active["turn_1"], talk._silent_turns["turn_1"] = None, []
    talk._prompting = True
    notice = message_pb2.Message(role=message_pb2.ROLE_NOTICE, text="calculate: completed (run_1)")
    answer = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=reply)
    running = run_pb2.Run(run_id="turn_1", generation=1, state=run_pb2.RUN_STATE_RUNNING)
    ended = run_pb2.Run(run_id="turn_1", generation=1, state=run_pb2.RUN_STATE_COMPLETED, output_text=reply)
    for event in (
        turn_event(run_changed=event_pb2.RunChanged(run=running)),
        turn_event(message_added=event_pb2.MessageAdded(message=notice)),
        turn_event(round_started=event_pb2.RoundStarted(round=1)),
        turn_event(output_delta=event_pb2.OutputDelta(reasoning="Is that news?")),
        turn_event(message_added=event_pb2.MessageAdded(message=answer)),
        turn_event(run_changed=event_pb2.RunChanged(run=ended)),
        session_pb2.SessionResponse(end=session_pb2.End(run_id="turn_1")),
    ):
        talk._show(event)
    shown = output.getvalue()
    assert (talk._prompting, talk._active) == (reply == "", {})
    parts = [part for part in ("◆ calculate", "Is that news", reply or "?", "✓") if part in shown]
    assert parts == sorted(parts, key=shown.index)
    assert len(parts) == (4 if reply else 0)


async def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> tuple[list[str], str]:
    monkeypatch.setattr(AsyncClient, "session", Session)
    talk, session, output = talking(*lines)
    await asyncio.gather(*(talk._handle_line(line) for line in lines))
    return session.started, output.getvalue()


async def test_an_unknown_command_is_reported_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for line, text in {
        "/foo": "Unknown command /foo. Commands: /cancel, ",
        "/etc/notes.txt is what?": "To send it as text: //etc/notes.txt",
        "/": "Unknown command /. ",
        "/stop one two": "Usage: /stop [JOB]\n",
        "/top-up many": "Usage: /top-up TOKENS\n",
        "/quit now": "Usage: /quit\n",
        "/help": "Type a message. ",
    }.items():
        started, shown = await typed(monkeypatch, line)
        assert (started, text in shown) == ([], True), (line, shown)
    assert await typed(monkeypatch, "//etc/notes.txt is what?") == (["/etc/notes.txt is what?"], "")


MESSAGE = message_pb2.Message(run_id="run_1", call_ids=["call_1", "call_2"])
CALLS = {
    "call_1": call_pb2.Call(
        tool_name="weather",
        arguments_json=b'{"city":"Oslo"}',
        result=call_pb2.CallResult(content_json=b'{"degrees":12}'),
    ),
    "call_2": call_pb2.Call(tool_name="look", arguments_json=b"{}"),
}


SHOWN = ['  weather {"city": "Oslo"} → {"degrees": 12}', "  look {}"]


@for_each(
    ("message", "calls", "is_mine", "lines"),
    [
        (MESSAGE, {}, True, ["  (2 calls: pawl steps run_1)"]),
        (MESSAGE, {}, False, ["  (2 calls)"]),  # Steps of other users are hidden.
        (MESSAGE, CALLS, True, SHOWN),
        (MESSAGE, CALLS, False, SHOWN),
        (message_pb2.Message(run_id="run_1"), CALLS, True, []),
    ],
)
def test_calls_are_shown_with_their_message_or_only_counted(
    message: message_pb2.Message, calls: dict[str, call_pb2.Call], is_mine: bool, lines: list[str]
) -> None:
    assert call_lines(message, calls, is_mine=is_mine) == lines


class Target:
    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def get_conversation(self, conversation_id: str = "", *, conversation_key: str = "") -> Conversation:
        assert (conversation_id, conversation_key) == ("", "k")
        return Conversation(conversation_id="conv_1", title="Oslo")

    async def update_conversation(self, conversation_id: str, **changes: Any) -> Conversation:
        self.asked.append((conversation_id, changes))
        return Conversation(conversation_id=conversation_id, title=changes.get("title", ""))

    async def share(self, conversation_id: str, **changes: Any) -> None:
        self.asked.append((conversation_id, changes))

    async def fork(self, conversation_id: str, number: int) -> Conversation:
        self.asked.append((conversation_id, number))
        return Conversation(conversation_id="conv_2", forked_number=2)

    async def erase(self, conversation_id: str, **_: Any) -> Erasure:
        self.asked.append((conversation_id, "erase"))
        return Erasure(end_time=Timestamp(seconds=1))

    async def left_calls(self, _: str) -> AsyncGenerator[LeftCall, None]:
        for call in list[LeftCall]():
            yield call

    async def send(self, conversation_id: str, text: str, **_: Any) -> agent_pb2.SendMessageResponse:
        self.asked.append((conversation_id, text))
        return agent_pb2.SendMessageResponse(run=run_pb2.Run(run_id="run_1"))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    made = Target()
    for name in ("get_conversation", "update_conversation", "share", "fork", "erase", "left_calls", "send"):
        monkeypatch.setattr(AsyncClient, name, getattr(made, name))
    return made


COMMANDS: list[tuple[tuple[str, ...], tuple[str, ...], list[Any]]] = [
    (("conversations", "rename"), ("Oslo",), [("conv_1", {"title": "Oslo"})]),
    (("conversations", "rename"), ("",), [("conv_1", {"title": ""})]),
    (("conversations", "label"), ("a=1", "b=2"), [("conv_1", {"labels": {"a": "1", "b": "2"}})]),
    (("conversations", "label"), ("--none",), [("conv_1", {"labels": {}})]),
    (("conversations", "archive"), (), [("conv_1", {"archived": True})]),
    (("conversations", "unarchive"), (), [("conv_1", {"archived": False})]),
    (("conversations", "share"), (), [("conv_1", {"shows_arguments": False, "write": False, "private": False})]),
    (("conversations", "erase"), ("--yes",), [("conv_1", "erase")] * 2),
    (("fork",), (), [("conv_1", 0)]),
    (("fork",), ("go on", "--at", "2", "--detach"), [("conv_1", 2), ("conv_2", "go on")]),
]


@for_each(("command", "behind", "asked"), COMMANDS)
def test_a_conversation_is_given_by_its_id_or_its_key(target: Target, command: Any, behind: Any, asked: Any) -> None:
    for names_it in (("conv_1",), ("--key", "k")):
        target.asked.clear()
        code, output = invoke(*command, *names_it, *behind)
        assert (code, target.asked) == (0, asked), output


@for_each(
    "arguments",
    [
        ("conversations", "show"),
        ("conversations", "show", "conv_1", "--key", "k"),
        ("conversations", "rename"),
        ("conversations", "rename", "conv_1"),
        ("conversations", "rename", "conv_1", "Oslo", "--key", "k"),
        ("conversations", "archive", "conv_1", "--key", "k"),
        ("conversations", "erase", "--yes"),
        ("fork", "conv_1", "go on", "--key", "k"),
    ],
)
def test_a_conversation_requires_exactly_one_of_id_and_key(target: Target, arguments: Any) -> None:
    code, output = invoke(*arguments)
    assert (code, output.startswith("Specify "), target.asked) == (2, True, [])


def test_shared_conversations_are_listed_with_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    class Conversations:
        async def ListConversations(self, _: conversation_pb2.ListConversationsRequest) -> Any:
            found = Conversation(conversation_id="conv_1", user_id="ann", title="Oslo")
            return conversation_pb2.ListConversationsResponse(conversations=[found])

    monkeypatch.setattr(AsyncClient, "conversations", Conversations())
    for arguments in (("list", "--shared"), ("search", "oslo", "--shared")):
        code, output = invoke("conversations", *arguments)
        assert (code, output.strip().split("\t")[2:]) == (0, ["ann", "", "Oslo"])


async def test_a_waiting_run_can_be_topped_up_or_cancelled_and_does_not_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions: list[HeldSession] = []
    topped_up: list[tuple[str, int]] = []

    class Agents:
        async def TopUpRun(self, request: agent_pb2.TopUpRunRequest) -> agent_pb2.TopUpRunResponse:
            assert request.request_id
            topped_up.append((request.run_id, request.tokens))
            sessions[0].frames.put_nowait(session_pb2.SessionResponse(end=session_pb2.End(run_id=request.run_id)))
            return agent_pb2.TopUpRunResponse()

    def session(*_: Any, **__: Any) -> HeldSession:
        sessions.append(HeldSession())
        return sessions[0]

    monkeypatch.setattr(AsyncClient, "session", session)
    monkeypatch.setattr(AsyncClient, "agents", Agents())
    talk, _, output = talking("spend", "/top-up some", "/top-up 500", "break", "/top-up 7", "/cancel", "break")
    async with asyncio.timeout(60):
        assert await talk.run() == 0
    assert (topped_up, sessions[0].started) == ([("run_1", 500)], ["spend", "break", "break"])
    shown = output.getvalue()
    assert [
        part
        for part in (
            "/top-up TOKENS adds tokens",
            "pawl attention run_2 shows what to do",
            "No run is waiting for tokens.",
        )
        if part not in shown
    ] == []


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/stop", "run_2 (scrape) is being stopped."),
        ("/stop run_1", "run_1 (scrape) is being stopped."),
    ],
)
@pytest.mark.parametrize("by_key", [False, True])
async def test_stop_stops_the_named_or_newest_job(
    monkeypatch: pytest.MonkeyPatch, line: str, shown: str, by_key: bool
) -> None:
    async def list_jobs(_: object, of: str, **__: object) -> AsyncGenerator[jobs_pb2.BackgroundJob, None]:
        for job_id in ("run_2", "run_1") if of == "conv_1" else ():
            yield jobs_pb2.BackgroundJob(job_id=job_id)

    async def stop_job(_: object, job_id: str, __: str) -> jobs_pb2.BackgroundJob:
        definition = run_pb2.Job(tool_name="scrape")
        return jobs_pb2.BackgroundJob(job_id=job_id, definition=definition, state=run_pb2.RUN_STATE_CANCELLING)

    monkeypatch.setattr(AsyncClient, "session", Session)
    monkeypatch.setattr(AsyncClient, "list_jobs", list_jobs)
    monkeypatch.setattr(AsyncClient, "stop_job", stop_job)
    talk, _, output = talking(conversation_id="conv_1")
    if by_key:
        monkeypatch.setattr(talk, "_attach", AsyncMock())
        talk._press(line)
        await talk._take_next()
    else:
        await talk._handle_line(line)
    assert output.getvalue() == f"{shown}\n"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"state": run_pb2.RUN_STATE_CANCELLED}, "run_1 (scrape) is stopped."),
        ({"state": run_pb2.RUN_STATE_COMPLETED}, "run_1 (scrape) had already ended (completed)."),
        (
            {"state": run_pb2.RUN_STATE_CANCELLED, "not_stopped": "it keeps running"},
            "run_1 (scrape) could not be stopped: it keeps running",
        ),
    ],
)
def test_a_stopped_job_is_described(fields: dict[str, Any], text: str) -> None:
    job = jobs_pb2.BackgroundJob(job_id="run_1", definition=run_pb2.Job(tool_name="scrape"), **fields)
    assert stopped_text(job) == text


async def test_following_starts_over_if_the_position_is_lost_and_ends_with_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cursors = list[str]()
    outcomes = [SeqBeyondEnd(last_seq=1), ConversationErased()]

    async def follow(_: object, __: str, after: str = "") -> AsyncGenerator[conversation_pb2.WatchConversationResponse]:
        cursors.append(after)
        if after:
            raise outcomes.pop(0)
        yield conversation_pb2.WatchConversationResponse(cursor="1")
        raise Unavailable

    monkeypatch.setattr(AsyncClient, "follow", follow)
    monkeypatch.setattr(chat, "_RETRY_SECONDS", 0.0)
    talk, _, _ = talking(conversation_id="conv_1")
    async with asyncio.timeout(60):
        await talk._follow()
    assert cursors == ["", "1", "", "1"]


@pytest.mark.parametrize(
    ("agent", "flags"), [("", ""), ("shop clerk", " --agent 'shop clerk'"), ("draft/clerk", " --agent draft/clerk")]
)
def test_command_to_resume_names_the_agent(monkeypatch: pytest.MonkeyPatch, agent: str, flags: str) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    talk, _, output = talking(conversation_id="conv_1", agent=agent)
    talk._leave()
    assert output.getvalue() == f"Resume the chat with: pawl chat --conversation conv_1{flags}\n"
