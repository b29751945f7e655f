"""The canned model calls the tool that it is told of, as long as it has not seen enough results."""

from __future__ import annotations

import json

import pytest

from bench.model import answers, tool_name


@pytest.mark.parametrize(
    "function",
    [{"name": "reserve", "parameters": {}}, {"description": "Reserve.", "name": "reserve", "strict": True}],
)
def test_the_tool_is_the_one_that_the_request_names(function: dict[str, object]) -> None:
    messages = [{"role": "user", "content": '{"function": {"name": "other"}}'}]
    tools = [{"type": "function", "function": function}]
    for body in ({"messages": messages, "tools": tools}, {"tools": tools, "messages": messages}):
        for separators in ((",", ":"), (", ", ": ")):
            assert tool_name(json.dumps(body, separators=separators).encode()) == b"reserve"


def test_the_last_answer_is_the_text() -> None:
    *rounds, text = answers(b"reserve", 3, 100)
    assert [b'"name":"reserve"' in b"".join(answer) for answer in rounds] == [True] * 3
    assert len(text) == 100 + 1 + 3  # the role before it, and what ends an answer
    assert b"the end" in text[100]
