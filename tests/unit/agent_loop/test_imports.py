"""Imported histories: validation and conversion."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent.v1 import conversation_pb2
from pawl.agent_loop.api import convert
from pawl.agent_loop.conversations import rules as imports
from pawl.agent_loop.conversations.rules import HistoryCall, HistoryMessage, HistoryRole
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules.message import Role
from pawl.chassis.ids import CallId
from pawl.client.history import chat_messages as to_json
from pawl.client.history import history as from_json
from pawl.errors import InvalidHistory
from pawl.event.v1 import call_pb2, message_pb2
from pawl.job_store.conversations.exporting import history as exported
from pawl.values import CallState
from tests.tables import for_each
from tests.unit.agent_loop.scenario import present


def user(text: str = "hello", **fields: Any) -> HistoryMessage:
    return HistoryMessage(role=HistoryRole.USER, text=text, **fields)


def answer(text: str = "", *calls: HistoryCall, **fields: Any) -> HistoryMessage:
    return HistoryMessage(role=HistoryRole.ASSISTANT, text=text, calls=calls, **fields)


def call(call_id: str, name: str = "look", arguments: str = "{}") -> HistoryCall:
    return HistoryCall(call_id=call_id, tool_name=name, arguments_json=arguments)


def result(call_id: str, text: str = "12", **fields: Any) -> HistoryMessage:
    return HistoryMessage(role=HistoryRole.TOOL, text=text, call_id=call_id, **fields)


GOOD = [user(), answer("", call("a"), call("b")), result("b"), result("a"), answer("done")]


def test_a_history_valid_for_a_strict_server_is_accepted() -> None:
    imports.check(GOOD)
    imports.check([user(), user("again"), answer("one"), answer("two", call("a")), result("a", "")])


@for_each(
    ("history", "position", "reason"),
    [
        ([], 0, "has no messages"),
        ([answer("hi")], 1, "must be from the user"),
        ([user()], 1, "send it after the import"),
        ([user(" \n"), answer("x")], 1, "is empty"),
        ([user(), answer()], 2, "neither text nor calls"),
        ([user("a\x00b"), answer("x")], 1, "U+0000"),
        ([user("x" * 262_145), answer("x")], 1, "262144 bytes"),
        ([user(), HistoryMessage(role=HistoryRole.SYSTEM, text="x"), answer("x")], 2, "instructions"),
        ([user(), HistoryMessage(role=HistoryRole.UNSPECIFIED, text="x"), answer("x")], 2, "its role must be"),
        ([user(), answer("", call("a"))], 2, "no result right after"),
        ([user(), answer("", call("a")), user(), result("a"), answer("x")], 2, "no result right after"),
        ([user(), answer("", call("a")), result("a"), result("a")], 4, "already has a result"),
        ([user(), answer("x"), result("a")], 3, "not in the assistant message before"),
        ([user(), answer("", call("a")), result("")], 3, "must name its call"),
        ([user(), answer("", call("a"), call("a")), result("a")], 2, "another call has the same id"),
        (
            [user(), answer("", call("a")), result("a"), answer("", call("a")), result("a")],
            4,
            "another call has the same id",
        ),
        ([user(), answer("", call("")), result("")], 2, "1 to 256"),
        ([user(), answer("", call("a\x07")), result("a\x07")], 2, "control character"),
        ([user(), answer("", call("a", "a b")), result("a")], 2, "tool name"),
        ([user(), answer("", call("a", arguments="[]")), result("a")], 2, "strict JSON object"),
        ([user(), answer("", call("a", arguments='{"a": 1, "a": 2}')), result("a")], 2, "strict JSON object"),
        ([user(), answer("", call("a", arguments="")), result("a")], 2, "{} for none"),
        ([user(calls=(call("a"),)), result("a"), answer("x")], 1, "only assistant messages"),
        ([user(), answer("x", call_id="a")], 2, "only tool messages"),
        ([user(), answer("", *(call(f"c{n}") for n in range(129)))], 2, "at most 128"),
        ([user(), answer("", call("a")), result("a", error_reason="LATE")], 3, "requires is_error"),
        ([user()] * 1001, 0, "at most 1000 messages"),
    ],
)
def test_each_fault_is_reported_with_its_position(history: Any, position: int, reason: str) -> None:
    with pytest.raises(InvalidHistory) as refused:
        imports.check(history)
    prefix = f"message {position}: " if position else ""
    assert any(part.startswith(prefix) and reason in part for part in refused.value.message.split("; ")), refused.value
    assert not position or str(position) in refused.value.metadata["positions"].split(",")


def test_all_faults_are_reported_at_once_and_in_order() -> None:
    bad = [answer("", call("a", "!")), HistoryMessage(role=HistoryRole.SYSTEM, text="x"), user("\x00")]
    with pytest.raises(InvalidHistory) as refused:
        imports.check(bad)
    assert (refused.value.metadata["positions"], int(refused.value.metadata["fault_count"])) == ("1,2,3", 6)


def test_an_imported_history_has_new_ids_and_settled_calls() -> None:
    numbers = itertools.count(1)
    messages, calls = imports.convert_history(
        [
            user("q"),
            answer("let me see", call("a", arguments='{"b":1, "a":2}'), call("b")),
            result("b", "no such thing", is_error=True),
            result("a", '{"x": 1}'),
            answer("", call("c")),
            result("c", "plain text"),
            answer("done"),
        ],
        lambda: CallId(f"ours_{next(numbers)}"),
    )
    assert [(message.role, message.text, message.call_ids) for message in messages] == [
        (Role.USER, "q", ()),
        (Role.ASSISTANT, "let me see", ("ours_1", "ours_2")),
        (Role.ASSISTANT, "", ("ours_3",)),
        (Role.ASSISTANT, "done", ()),
    ]
    assert all([message.imported for message in messages] + [each.imported for each in calls])
    assert [(each.call_id, each.provider_call_id, each.round, each.index, each.state) for each in calls] == [
        ("ours_1", "a", 1, 0, CallState.SUCCEEDED),
        ("ours_2", "b", 1, 1, CallState.FAILED),
        ("ours_3", "c", 2, 0, CallState.SUCCEEDED),
    ]
    results = [b'{"x": 1}', b'"no such thing"', b'"plain text"']
    assert [present(each.result).content_json for each in calls] == results
    assert (calls[0].arguments_json, calls[0].proposed_arguments) == (b'{"a":2,"b":1}', '{"b":1, "a":2}')


parts = st.one_of(
    st.builds(user, st.text(max_size=3)),
    st.builds(answer, st.text(max_size=3)),
    st.builds(answer, st.just(""), st.builds(call, st.sampled_from("ab"), st.sampled_from(["look", "!"]))),
    st.builds(result, st.sampled_from(["a", "b", ""]), st.text(max_size=3)),
    st.just(HistoryMessage(role=HistoryRole.SYSTEM, text="x")),
)


@given(st.lists(parts, max_size=8))
def test_every_accepted_history_can_be_imported(history: list[HistoryMessage]) -> None:
    try:
        imports.check(history)
    except InvalidHistory:
        return
    numbers = itertools.count(1)
    messages, calls = imports.convert_history(history, lambda: CallId(f"c{next(numbers)}"))
    assert len(messages) + len(calls) == len(history)
    assert [call_id for message in messages for call_id in message.call_ids] == [each.call_id for each in calls]
    for each in calls:
        assert each.settled
        msgspec.json.decode(present(each.result).content_json)


def test_chat_completions_are_read_with_their_positions() -> None:
    text = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert [each.text for each in from_json([text])] == ["a\n\nb"]
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    bad: list[Any] = [text, image, 7, {"role": "assistant", "tool_calls": [{"id": "a"}]}, {"content": 3}]
    with pytest.raises(InvalidHistory) as refused:
        from_json(bad)
    for position in ("2: Invalid value 'image_url'", "3: Expected `object`", "4: Object missing", "5: Expected `str"):
        assert f"message {position}" in refused.value.message


texts = st.text(max_size=3)
outcomes = st.builds(
    call_pb2.CallResult,
    content_json=st.sampled_from([b"{}", b'{"error":"x"}', b'"12"', b"null"]),
    is_error=st.booleans(),
    error_reason=st.sampled_from(["TOOL_ERROR", "TOOL_TIMEOUT"]),
)
made_calls = st.builds(
    call_pb2.Call,
    tool_name=st.sampled_from(["look", "files.read", "é" * 70, ""]),
    arguments_json=st.sampled_from([b"{}", b'{"a":1}', b"[]", b""]),
    result=st.none() | outcomes,
)
other_messages = st.builds(
    message_pb2.Message,
    role=st.sampled_from([message_pb2.ROLE_USER, message_pb2.ROLE_NOTICE, message_pb2.ROLE_SUMMARY]),
    text=texts,
    notices_json=st.sampled_from([b"", b'[{"job":"j"}]']),
    parts=st.lists(st.builds(message_pb2.Part, image=st.just(message_pb2.ImagePart())), max_size=2),
)
answers = st.builds(message_pb2.Message, role=st.just(message_pb2.ROLE_ASSISTANT), text=texts, refusal=texts)


@given(st.lists(st.tuples(other_messages | answers, st.lists(made_calls, max_size=2)), max_size=6))
def test_exported_history_is_imported_and_exported_unchanged(
    turns: list[tuple[message_pb2.Message, list[call_pb2.Call]]],
) -> None:
    known = dict[str, call_pb2.Call]()
    for message, asked in turns:
        for each in asked if message.role == message_pb2.ROLE_ASSISTANT else ():
            each.call_id = f"call_{len(known)}"
            known[each.call_id] = each
            message.call_ids.append(each.call_id)
    first = message_pb2.Message(role=message_pb2.ROLE_USER, text="q")
    last = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="a")
    shown = list(exported([first, *(message for message, _ in turns), last], known))
    history = list(map(convert.history_message, shown))
    imports.check(history)
    numbers = itertools.count(1)
    messages, calls = imports.convert_history(history, lambda: CallId(f"c{next(numbers)}"))
    written = {str(each.call_id): wire.CALL.write(each) for each in calls}
    assert list(exported(map(wire.MESSAGE.write, messages), written)) == shown
    assert from_json(to_json(shown)) == [unmarked(each) for each in shown]


def unmarked(message: conversation_pb2.HistoryMessage) -> conversation_pb2.HistoryMessage:
    """Return the message as the chat completions format can express it: without marks of errors."""
    if message.is_error:
        message.text = to_json([message])[0]["content"]
    message.is_error, message.error_reason = False, ""
    return message
