"""Scripts, and the requests that strict mode refuses as OpenAI does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pawl.model_server.reply import Status
from pawl.model_server.request import ChatRequest, RefusedRequest, read_request
from pawl.model_server.script import Player, Script, ScriptError, load_script, parse_script
from pawl.model_server.strict import check_request
from tests.tables import not_explained, not_refused


def player(*steps: dict[str, Any]) -> Player:
    return Player(parse_script(msgspec.json.encode({"steps": steps})))


def say(text: str, **step: Any) -> dict[str, Any]:
    return {"reply": {"text": text}, **step}


def ask(prompt: str, *, rounds: int = 0) -> ChatRequest:
    answers = [{"role": "assistant", "content": "x"}] * rounds
    return ChatRequest(model="m", messages=({"role": "user", "content": prompt}, *answers))


def play(player: Player, *requests: ChatRequest) -> list[str | None]:
    replies = [player.choose(request) for request in requests]
    return [None if reply is None else reply.text for reply in replies]


def test_steps_without_a_condition_are_played_once_each_in_order() -> None:
    assert play(player(say("a"), say("b")), ask("x"), ask("y"), ask("z")) == ["a", "b", None]


def test_a_condition_looks_at_the_last_user_message_and_the_round() -> None:
    steps = player(
        say("later", when={"user_contains": "Weather", "round": 1}),
        say("first", when={"user_contains": "weather"}),
        say("number", when={"user_matches": r"^\d+$"}),
    )
    asked = (ask("the weather"), ask("the weather", rounds=1), ask("12"), ask("x"))
    assert play(steps, *asked) == ["first", "later", "number", None]


def test_a_condition_looks_for_images_in_every_message() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    shown = ChatRequest(model="m", messages=({"role": "user", "content": [image]}, {"role": "user", "content": "x"}))
    steps = player(say("seen", when={"images": True}), say("none", when={"images": False}))
    assert play(steps, shown, ask("x")) == ["seen", "none"]


def test_each_request_or_all_together_fail_as_often_as_told() -> None:
    steps = player(say("fail", when={"round": 0}, times=2), say("ok", when={"round": 0}))
    assert play(steps, *[ask("x"), ask("y")] * 4) == ["fail"] * 4 + ["ok"] * 4
    assert play(player(say("fail", times=2, per="script")), ask("x"), ask("y"), ask("z")) == ["fail", "fail", None]
    script = parse_script('{"steps": [{"reply": {"fault": {"type": "status", "status": 429, "retry_after": 1}}}]}')
    assert script.steps[0].reply.fault == Status(status=429, retry_after=1)


def test_a_mistake_is_reported_with_its_place(tmp_path: Path) -> None:
    rows = [
        ("{", "malformed|truncated"),
        ('{"stepps": []}', "unknown field `stepps`"),
        ('{"steps": [{"reply": {"txt": ""}}]}', r"unknown field `txt` - at `\$\.steps\[0\]\.reply`"),
        ('{"steps": [{}]}', "missing required field `reply`"),
        ('{"steps": [{"reply": {"fault": {"type": "explode"}}}]}', "explode"),
        ('{"steps": [{"reply": {}, "when": {"user_matches": "("}}]}', r"\$\.steps\[0\]\.when\.user_matches"),
        ('{"steps": [{"reply": {}, "times": 0}]}', r">= 1 - at `\$\.steps\[0\]\.times`"),
        ('{"steps": [{"reply": {"chunk_characters": 0}}]}', "chunk_characters"),
        ('{"steps": [{"reply": {"chunk_delay": -1}}]}', "chunk_delay"),
        ('{"steps": [{"reply": {"fault": {"type": "hang", "after_chunks": -1}}}]}', "after_chunks"),
    ]
    assert not_explained(ScriptError, parse_script, rows) == []
    with pytest.raises(ScriptError, match="cannot be read: No such file"):
        load_script(tmp_path / "absent.json")


def test_the_example_in_the_documentation_is_valid() -> None:
    page = Path(__file__).parents[3] / "docs" / "model-server.md"
    examples = page.read_text().split("```json\n")[1:]
    assert examples
    for example in examples:
        assert parse_script(example.split("```", maxsplit=1)[0]) != Script()


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


def test_a_sound_history_is_taken() -> None:
    histories: list[list[dict[str, Any]]] = [
        [USER],
        [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "hi"}, USER],
        [USER, call("a", "b"), result("b"), result("a"), USER],
        [USER, call("a"), result("a"), call("a"), result("a")],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    ]
    for messages in histories:
        check(*messages)


def test_a_history_that_providers_refuse_is_refused() -> None:
    """Failures 2, 3 and 15 of the earlier systems: a call without exactly one result, in its place."""
    rows: list[tuple[list[dict[str, Any]], str]] = [
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
    ]
    assert not_explained(RefusedRequest, lambda messages: check(*messages), rows) == []


def test_a_malformed_request_is_refused() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
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
    ]

    def ask(body: dict[str, Any]) -> None:
        check_request(read_request(json.dumps({"model": "m", "messages": [USER], **body}).encode()))

    assert not_explained(RefusedRequest, ask, rows) == []
    bodies = [b"", b"{", b"[]", b"\xff", b'{"model": "\\ud800"}', b"[" * 100_000]
    assert not_refused(RefusedRequest, read_request, bodies) == []


def test_reasoning_must_come_back_where_the_provider_insists() -> None:
    """LOOP-11"""
    with pytest.raises(RefusedRequest, match="reasoning_content"):
        check(USER, call("a"), result("a"), reasoning_echo=True)
    check(USER, {**call("a"), "reasoning_content": ""}, result("a"), reasoning_echo=True)


FORM = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def asked(schema: object = FORM, *, name: str = "sum", strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": strict}}


def test_a_form_of_the_answer_is_taken() -> None:
    forms: list[object] = [
        None,
        {"type": "text"},
        {"type": "json_object"},
        asked(),
        asked({"type": "object"}, strict=False),
    ]
    for form in forms:
        check(USER, response_format=form, reasoning_effort="low")


def test_a_form_that_openai_refuses_is_refused() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"reasoning_effort": "hard"}, "Invalid value: 'hard'"),
        ({"response_format": "json"}, "Supported values are: 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name"),
        ({"response_format": asked(name="two words")}, "does not match pattern"),
        ({"response_format": asked({"type": "array"})}, "Invalid schema for response_format 'sum'"),
        ({"response_format": asked({"type": "object"})}, "'additionalProperties' is required"),
        ({"response_format": asked({**FORM, "required": []})}, "include every key in properties. Missing 'a'"),
    ]
    plain = [(body, re.escape(part)) for body, part in rows]
    assert not_explained(RefusedRequest, lambda body: check(USER, **body), plain) == []


def in_parts(*parts: object, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}}


def test_a_part_that_openai_refuses_is_refused() -> None:
    check(in_parts({"type": "text", "text": "look"}, IMAGE))
    messages: list[dict[str, Any]] = [
        in_parts({"type": "image", "data": "x"}),
        in_parts("look"),
        in_parts({"type": "text"}),
        in_parts({"type": "image_url", "image_url": {"url": "data:image/svg;base64,AAAA"}}),
        in_parts({"type": "image_url", "image_url": "data:image/png;base64,iVBORw0K"}),
        in_parts(IMAGE, role="system"),
    ]
    assert not_explained(RefusedRequest, check, [(message, "Invalid|Missing") for message in messages]) == []
