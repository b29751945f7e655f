"""Strict mode refuses the histories that OpenAI refuses, and no others."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pawl.model_server.request import RefusedRequest, read_request
from pawl.model_server.strict import check_request

USER = {"role": "user", "content": "hi"}


def call(*ids: str) -> dict[str, Any]:
    made = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(identity: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": "ok"}


def function(name: str = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def check(*messages: dict[str, Any], reasoning_echo: bool = False, **body: Any) -> None:
    data = json.dumps({"model": "m", "messages": messages, **body}).encode()
    check_request(read_request(data), reasoning_echo=reasoning_echo)


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "hi"}, USER],
        [USER, call("a", "b"), result("b"), result("a"), USER],
        [USER, call("a"), result("a"), call("a"), result("a")],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    ],
)
def test_a_sound_history_is_taken(messages: list[dict[str, Any]]) -> None:
    check(*messages)


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([USER, call("a")], "did not have response messages: a"),
        ([USER, call("a", "b"), result("a"), USER], "did not have response messages: b"),
        ([USER, call("a"), USER, result("a")], "did not have response messages: a"),
        ([USER, result("a")], "must be a response to a preceding message"),
        ([USER, call("a"), result("b"), result("a")], "must be a response to a preceding message"),
        ([USER, call("a"), result("a"), result("a")], "Duplicate value for 'tool_call_id'"),
        ([USER, call("a", "a"), result("a")], "Duplicate value for 'tool_call_id'"),
        ([USER, {**call("a"), "tool_calls": []}], "empty array"),
        ([{"role": "robot", "content": "hi"}], "Invalid value: 'robot'"),
        ([{"role": "user", "content": None}], "expected a string, got null"),
        ([{"role": "user", "content": 7}], "expected a string or an array"),
    ],
)
def test_a_history_that_providers_refuse_is_refused(messages: list[dict[str, Any]], part: str) -> None:
    """Failures 2, 3 and 15 of the earlier systems: a call without exactly one result, in its place."""
    with pytest.raises(RefusedRequest, match=part):
        check(*messages)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"tools": []}, "non-empty array"),
        ({"tools": [{"type": "function"}]}, "expected a function"),
        ({"tools": [function("no spaces")]}, "does not match pattern"),
        ({"tools": [function(), function()]}, "must be unique"),
        ({"tools": [function(type="string")]}, 'type: "object"'),
        ({"tools": [function(required=["x"])]}, "unknown properties"),
        ({"tool_choice": "auto"}, "only allowed when 'tools'"),
        ({"tools": [function()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "not found"),
        ({"model": ""}, "model parameter"),
        ({"messages": []}, "Missing required parameter: 'messages'"),
    ],
)
def test_a_malformed_request_is_refused(body: dict[str, Any], part: str) -> None:
    data = json.dumps({"model": "m", "messages": [USER], **body}).encode()
    with pytest.raises(RefusedRequest, match=part):
        check_request(read_request(data))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"model": "\\ud800"}', b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedRequest):
        read_request(data)


def test_reasoning_must_come_back_where_the_provider_insists() -> None:
    """LOOP-11"""
    with pytest.raises(RefusedRequest, match="reasoning_content"):
        check(USER, call("a"), result("a"), reasoning_echo=True)
    check(USER, {**call("a"), "reasoning_content": ""}, result("a"), reasoning_echo=True)


FORM = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def asked(schema: object = FORM, *, name: str = "sum", strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": strict}}


@pytest.mark.parametrize(
    "form", [None, {"type": "text"}, {"type": "json_object"}, asked(), asked({"type": "object"}, strict=False)]
)
def test_a_form_of_the_answer_is_taken(form: object) -> None:
    check(USER, response_format=form, reasoning_effort="low")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"reasoning_effort": "hard"}, "Invalid value: 'hard'"),
        ({"response_format": "json"}, "Supported values are: 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name"),
        ({"response_format": asked(name="two words")}, "does not match pattern"),
        ({"response_format": asked({"type": "array"})}, "Invalid schema for response_format 'sum'"),
        ({"response_format": asked({"type": "object"})}, "'additionalProperties' is required"),
        ({"response_format": asked({**FORM, "required": []})}, "include every key in properties. Missing 'a'"),
    ],
)
def test_a_form_that_openai_refuses_is_refused(body: dict[str, Any], part: str) -> None:
    with pytest.raises(RefusedRequest, match=re.escape(part)):
        check(USER, **body)


def in_parts(*parts: object, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}}


def test_an_image_is_taken() -> None:
    check(in_parts({"type": "text", "text": "look"}, IMAGE))


@pytest.mark.parametrize(
    "message",
    [
        in_parts({"type": "image", "data": "x"}),
        in_parts("look"),
        in_parts({"type": "text"}),
        in_parts({"type": "image_url", "image_url": {"url": "data:image/svg;base64,AAAA"}}),
        in_parts({"type": "image_url", "image_url": "data:image/png;base64,iVBORw0K"}),
        in_parts(IMAGE, role="system"),
    ],
)
def test_a_part_that_openai_refuses_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(RefusedRequest, match=r"Invalid|Missing"):
        check(message)
