"""Which step of a script takes which request, how often, and what is said about a script with a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pawl.model_server.reply import Status
from pawl.model_server.request import ChatRequest
from pawl.model_server.script import Player, Script, ScriptError, load_script, parse_script


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


def test_a_step_with_a_condition_is_played_any_number_of_times() -> None:
    assert play(player(say("a", when={"round": 0})), *[ask("x")] * 3) == ["a", "a", "a"]


def test_each_request_fails_as_often_as_told_however_they_are_mixed() -> None:
    steps = player(say("fail", when={"round": 0}, times=2), say("ok", when={"round": 0}))
    mixed = [ask("x"), ask("y"), ask("x"), ask("y"), ask("x"), ask("y")]
    assert play(steps, *mixed) == ["fail", "fail", "fail", "fail", "ok", "ok"]


def test_uses_can_be_counted_over_all_requests() -> None:
    steps = player(say("fail", times=2, per="script"))
    assert play(steps, ask("x"), ask("y"), ask("z")) == ["fail", "fail", None]


def test_a_fault_is_read_by_its_type() -> None:
    script = parse_script('{"steps": [{"reply": {"fault": {"type": "status", "status": 429, "retry_after": 1}}}]}')
    assert script.steps[0].reply.fault == Status(status=429, retry_after=1)


@pytest.mark.parametrize(
    ("text", "part"),
    [
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
    ],
)
def test_a_mistake_is_reported_with_its_place(text: str, part: str) -> None:
    with pytest.raises(ScriptError, match=part):
        parse_script(text)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="cannot be read: No such file"):
        load_script(tmp_path / "absent.json")


def test_the_example_in_the_documentation_is_valid() -> None:
    page = Path(__file__).parents[3] / "docs" / "model-server.md"
    examples = page.read_text().split("```json\n")[1:]
    assert examples
    for example in examples:
        assert parse_script(example.split("```", maxsplit=1)[0]) != Script()
