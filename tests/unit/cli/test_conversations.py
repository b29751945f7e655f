"""Conversations at the command line: by id and key, whose they are, and where their calls can be looked at."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from typer.testing import CliRunner

from pawl.agent.v1 import agent_pb2, conversation_pb2
from pawl.cli.__main__ import app
from pawl.cli.conversations import lines_of_calls
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.event.v1.conversation_pb2 import Conversation, Erasure, LeftCall

MESSAGE = message_pb2.Message(run_id="run_1", call_ids=["call_1", "call_2"])
CALLS = {
    "call_1": call_pb2.Call(
        tool_name="weather",
        arguments_json=b'{"city":"Oslo"}',
        result=call_pb2.CallResult(content_json=b'{"degrees":12}'),
    ),
    "call_2": call_pb2.Call(tool_name="look", arguments_json=b"{}"),
}


def test_calls_of_an_own_run_are_where_its_steps_are() -> None:
    assert lines_of_calls(MESSAGE, {}, is_mine=True) == ["  (2 calls: pawl steps run_1)"]


def test_nobody_is_sent_to_steps_that_are_not_theirs_to_see() -> None:
    assert lines_of_calls(MESSAGE, {}, is_mine=False) == ["  (2 calls)"]


def test_calls_that_have_no_steps_or_are_shared_stand_with_their_message() -> None:
    shown = ['  weather {"city": "Oslo"} → {"degrees": 12}', "  look {}"]
    assert lines_of_calls(MESSAGE, CALLS, is_mine=True) == lines_of_calls(MESSAGE, CALLS, is_mine=False) == shown


def test_a_message_without_calls_has_no_line_for_them() -> None:
    assert lines_of_calls(message_pb2.Message(run_id="run_1"), CALLS, is_mine=True) == []


class Target:
    """A suite with a conversation of the key `k`."""

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


def pawl(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"PAWL_ADDRESS": "127.0.0.1:1", "COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.parametrize("names_it", [("conv_1",), ("--key", "k")], ids=["id", "key"])
@pytest.mark.parametrize(
    ("command", "behind", "asked"),
    [
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
    ],
)
def test_a_conversation_is_named_by_its_id_or_by_its_key(
    target: Target, command: tuple[str, ...], names_it: tuple[str, ...], behind: tuple[str, ...], asked: list[Any]
) -> None:
    code, output = pawl(*command, *names_it, *behind)
    assert (code, target.asked) == (0, asked), output


@pytest.mark.parametrize(
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
def test_neither_both_nor_none_of_the_two_names_one(target: Target, arguments: tuple[str, ...]) -> None:
    code, output = pawl(*arguments)
    assert code == 2
    assert output.startswith("Give ")
    assert not target.asked


def test_of_conversations_that_others_share_it_is_said_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Conversations:
        async def ListConversations(self, _: conversation_pb2.ListConversationsRequest) -> Any:
            found = Conversation(conversation_id="conv_1", user_id="ann", title="Oslo")
            return conversation_pb2.ListConversationsResponse(conversations=[found])

    monkeypatch.setattr(AsyncClient, "conversations", Conversations())
    for arguments in (("list", "--shared"), ("search", "oslo", "--shared")):
        code, output = pawl("conversations", *arguments)
        assert (code, output.strip().split("\t")[2:]) == (0, ["ann", "Oslo"])
    assert "ann" not in pawl("conversations", "list")[1]
