"""Refused parameters of other systems get a hint that names Pawl's background parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import hints
from pawl.agent_loop.loop.rules.run import RunOptions
from pawl.agent_loop.loop.rules.tool import Tool, Verdict
from pawl.values import ExecutionContext
from tests.fakes.model import calls, says
from tests.fakes.registry import FakeRegistry, tool
from tests.unit.agent_loop.scenario import present
from tests.unit.agent_loop.test_jobs import Story

REFUSED = tool("REFUSE", error_reason="INVALID_ARGUMENTS", error_message="the arguments do not fit")
OTHERS = [
    *("interval_seconds", "duration_minutes", "run_in_background", "is_background", "async", "interval", "duration"),
    *("runInBackground", "isAsync", "poll_interval", "_execute_async", "_runInBackground", "max_iterations", "_async"),
]
PARAMETERS = ("_interval", "_duration", "_executeAsync")
_NAMES = st.sampled_from([*OTHERS, *PARAMETERS, "n", "page", "background_color", "interval" * 10])


def schema_of(*names: str, **more: Any) -> bytes:
    properties: dict[str, Any] = {name: {} for name in names}
    return json.dumps({"type": "object", "properties": properties, "additionalProperties": False, **more}).encode()


def hint(arguments: object, schema: bytes, verdict: Verdict = REFUSED) -> str:
    given_json = arguments if isinstance(arguments, bytes) else json.dumps(arguments).encode()
    return hints.for_request(verdict, given_json, schema).error_message.removeprefix(verdict.error_message)


@pytest.mark.parametrize("name", OTHERS)
def test_a_refused_parameter_of_another_system_gets_a_hint(name: str) -> None:
    assert "interval_seconds" in hint({"n": 1, name: 5}, schema_of("n"))


@given(st.dictionaries(_NAMES, st.just(1), max_size=4), st.sets(_NAMES, max_size=4), st.booleans())
def test_only_parameters_that_the_tool_does_not_have_get_a_hint(
    arguments: dict[str, int], known: set[str], is_open: bool
) -> None:
    """A tool that has one of Pawl's own parameters cannot run in the background."""
    unknown = ({*OTHERS, *PARAMETERS} & arguments.keys()) - known
    expected = not is_open and known.isdisjoint(PARAMETERS) and bool(unknown)
    assert bool(hint(arguments, schema_of(*known, additionalProperties=is_open))) is expected


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_any_bytes_are_accepted_as_arguments_and_schema(arguments: bytes, schema: bytes) -> None:
    assert hint(arguments, schema) == ""


@pytest.mark.parametrize(
    "verdict",
    [
        tool("RUN"),
        replace(REFUSED, error_reason="NOT_ALLOWED"),
        replace(REFUSED, without_background=True),
        replace(REFUSED, context=ExecutionContext.HUMAN),
    ],
)
def test_no_hint_if_the_call_could_not_run_in_the_background(verdict: Verdict) -> None:
    assert hint({"async": True}, schema_of(), verdict) == ""


async def _result(monkeypatch: pytest.MonkeyPatch, *, as_tool: bool = False, **options: Any) -> str:
    found = Tool(name="strict", version=1, context=ExecutionContext.BACKEND, arguments_schema_json=schema_of("n"))
    monkeypatch.setattr(FakeRegistry, "_tool", lambda _, __: found)
    story = Story(calls('strict {"n": 1, "run_in_background": true}'), says("I see."), as_tool=as_tool)
    story.world.registry.verdicts = {"strict": REFUSED}
    key = story.say("do it", RunOptions(**options))
    await story.until(lambda: story.is_over)
    (call,) = story.calls(story.world.ledger.run(key))
    shown = story.world.model.requests[1].messages[-1]["content"]
    assert json.loads(present(call.result).content_json)["error"] in json.loads(shown)["error"]
    return str(json.loads(shown)["error"])


async def test_the_model_reads_the_hint_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = await _result(monkeypatch)
    assert refusal.startswith("the arguments do not fit\nTo run the call in the background, add")
    assert all(f'"{name}"' in refusal for name in PARAMETERS)
    refusal = await _result(monkeypatch, as_tool=True)
    assert "use in_background instead" in refusal
    assert not any(name in refusal for name in PARAMETERS)
    assert await _result(monkeypatch, without_background=True) == "the arguments do not fit"
