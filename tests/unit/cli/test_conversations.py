"""Calls in a conversation that is printed: where they can be looked at differs with whose it is."""

from __future__ import annotations

from pawl.cli.conversations import lines_of_calls
from pawl.event.v1 import call_pb2, message_pb2

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
