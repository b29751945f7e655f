"""Scripts, and requests that the server refuses as OpenAI does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pawl.model_server.request import ChatRequest, RefusedRequest, read_request
from pawl.model_server.script import Fault, Player, Script, ScriptError, load_script, parse_script
from pawl.model_server.strict import check_request
from tests.tables import not_explained, not_refused


def player(*steps: dict[str, Any]) -> Player:
    return Player(parse_script(msgspec.json.encode({"steps": steps})))


def say(text: str, **step: Any) -> dict[str, Any]:
    return {"reply": {"text": text}, **step}


def ask(prompt: str, *, rounds: int = 0) -> ChatRequest:
    messages = [{"role": "user", "content": prompt}, *[{"role": "assistant", "content": "x"}] * rounds]
    return read_request(json.dumps({"model": "m", "messages": messages}).encode())


def play(player: Player, *requests: ChatRequest) -> list[str | None]:
    replies = [player.choose(request) for request in requests]
    return [None if reply is None else reply.text for reply in replies]


def test_steps_are_chosen_by_prompt_round_and_count() -> None:
    assert play(player(say("a"), say("b")), ask("x"), ask("y"), ask("z")) == ["a", "b", None]
    steps = player(
        say("later", when={"user_contains": "Weather", "round": 1}), say("first", when={"user_contains": "weather"})
    )
    asked = (ask("the weather"), ask("the weather", rounds=1), ask("x"))
    assert play(steps, *asked) == ["first", "later", None]
    steps = player(say("fail", when={"round": 0}, times=2), say("ok", when={"round": 0}))
    assert play(steps, *[ask("x"), ask("y")] * 4) == ["fail"] * 4 + ["ok"] * 4
    script = parse_script('{"steps": [{"reply": {"fault": {"type": "status", "status": 429, "retry_after": 1}}}]}')
    assert script.steps[0].reply.fault == Fault(type="status", status=429, retry_after=1)


def test_a_mistake_in_a_script_is_reported_with_its_position(tmp_path: Path) -> None:
    rows = [
        ("{", "malformed|truncated"),
        ('{"stepps": []}', "unknown field `stepps`"),
        ('{"steps": [{"reply": {"txt": ""}}]}', r"unknown field `txt` - at `\$\.steps\[0\]\.reply`"),
        ('{"steps": [{}]}', "missing required field `reply`"),
        ('{"steps": [{"reply": {"fault": {"type": "explode"}}}]}', "explode"),
        ('{"steps": [{"reply": {"chunk_characters": 0}}]}', "chunk_characters"),
    ]
    assert not_explained(ScriptError, parse_script, rows) == []
    with pytest.raises(ScriptError, match="cannot be read"):
        load_script(tmp_path / "none.json")


def test_the_examples_in_the_documentation_are_valid() -> None:
    examples = (Path(__file__).parents[3] / "docs/guides/model-server.md").read_text().split("```json\n")[1:]
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


def parts(*parts: object, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(parts)}]


FORM = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}}


def asked(schema: object = FORM, *, name: str = "sum", strict: bool = True) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": strict}}
    }


def check(body: dict[str, Any], *, reasoning_echo: bool = False) -> None:
    data = json.dumps({"model": "m", "messages": [USER], **body}).encode()
    check_request(read_request(data), reasoning_echo=reasoning_echo)


def test_a_valid_request_is_accepted() -> None:
    histories: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "hi"}, USER],
        [USER, call("a", "b"), result("b"), result("a"), USER],
        [USER, call("a"), result("a"), call("a"), result("a")],
        parts({"type": "text", "text": "look"}, IMAGE),
    ]
    for messages in histories:
        check({"messages": messages})
    for form in ({"response_format": {"type": "json_object"}}, asked(), asked({"type": "object"}, strict=False)):
        check({**form, "reasoning_effort": "low"})


def test_a_history_that_providers_refuse_is_refused() -> None:
    """Every call needs exactly one result, right after the call."""
    rows: list[tuple[list[dict[str, Any]], str]] = [
        ([USER, call("a")], "did not have response messages: a"),
        ([USER, call("a", "b"), result("a"), USER], "did not have response messages: b"),
        ([USER, call("a"), USER, result("a")], "did not have response messages: a"),
        ([USER, result("a")], "must be a response to a preceding message"),
        ([USER, call("a"), result("b"), result("a")], "must be a response to a preceding message"),
        ([USER, call("a"), result("a"), result("a")], "Duplicate value for 'tool_call_id'"),
        ([USER, call("a", "a"), result("a")], "Duplicate value for 'tool_call_id'"),
        ([USER, {**call("a"), "tool_calls": []}], "length >= 1"),
        ([{"role": "robot", "content": "hi"}], "Invalid value 'robot'"),
        ([{"role": "user", "content": None}], "got `null`"),
        ([{"role": "assistant"}], "expected a string, got null"),
        (parts({"type": "image", "data": "x"}), "Invalid value 'image'"),
        (parts({"type": "image_url", "image_url": {"url": "data:image/svg;base64,AAAA"}}), "matching regex"),
        (parts(IMAGE, role="system"), "Invalid value 'image_url'"),
    ]
    assert not_explained(RefusedRequest, lambda messages: check({"messages": messages}), rows) == []


def test_a_malformed_request_is_refused() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"tools": []}, "length >= 1"),
        ({"tools": [{"type": "function"}]}, "missing required field `function`"),
        ({"tools": [function("no spaces")]}, "matching regex"),
        ({"tools": [function(), function()]}, "must be unique"),
        ({"tools": [function(type="string")]}, "Invalid enum value 'string'"),
        ({"tools": [function(required=["x"])]}, "unknown properties"),
        ({"tool_choice": "auto"}, "only allowed when 'tools'"),
        ({"tools": [function()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "not found"),
        ({"messages": []}, "length >= 1"),
        ({"reasoning_effort": "hard"}, "Invalid enum value 'hard'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (asked({"type": "array"}), "Invalid schema for response_format 'sum'"),
        (asked({"type": "object"}), "'additionalProperties' is required"),
        (asked({**FORM, "required": []}), "include every key in properties. Missing 'a'"),
    ]
    assert not_explained(RefusedRequest, check, rows) == []
    bodies = [b"", b"{", b"[]", b"\xff", b'{"model": "\\ud800"}', b"[" * 100_000]
    assert not_refused(RefusedRequest, read_request, bodies) == []


def test_reasoning_must_be_echoed_if_the_provider_requires_it() -> None:
    """LOOP-11: an empty echo is accepted."""
    with pytest.raises(RefusedRequest, match="reasoning_content"):
        check({"messages": [USER, call("a"), result("a")]}, reasoning_echo=True)
    check({"messages": [USER, {**call("a"), "reasoning_content": ""}, result("a")]}, reasoning_echo=True)
