"""Faults of the model server: each ends the run in its own way, and the conversation goes on.

The server is strict: it refuses a history that a real provider would refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pawl.agent.v1 import agent_pb2
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.fakes.images import PNG
from tests.poll import until
from tests.system.scripting import Model, Step, scripted
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

TWO_ATTEMPTS: dict[str, Any] = {"model_attempts_max": 2}
ANSWER = {"reasoning": "Well.", "text": "one two three four five six seven"}


@pytest_asyncio.fixture(loop_scope="session")
async def model(suite: Suite) -> AsyncIterator[Model]:
    """The model server; afterwards it follows its rules again."""
    async with scripted(suite) as model:
        yield model


async def _run(
    agent: Agent, model: Model, /, *steps: Step, limits: dict[str, Any] | None = None, **options: Any
) -> run_pb2.Run:
    """Play a run to its end, and one more in its conversation, which must complete."""
    prompt = await model.play(*steps)
    asked = run_pb2.RunOptions(limits=run_pb2.RunLimits(**(limits or {})), **options)
    run = await agent.start(prompt, options=asked)
    ended = await agent.until_ended(run.run_id)
    await model.forget()
    after = await agent.start("what is 6 * 7?", conversation_id=run.conversation_id)
    went_on = await agent.until_ended(after.run_id)
    assert went_on.state == run_pb2.RUN_STATE_COMPLETED, went_on.failure
    assert ended.last_seq == (await agent.events(run.run_id))[-1].seq
    return ended


def _failure(run: run_pb2.Run) -> tuple[str, str]:
    assert run.state == run_pb2.RUN_STATE_FAILED
    assert run.failure.message
    name = run_pb2.FailureClass.Name(run.failure.failure_class)
    return name.removeprefix("FAILURE_CLASS_"), run.failure.reason


def _fault(kind: str, **fields: Any) -> Step:
    return {"reply": {**ANSWER, "fault": {"type": kind, **fields}}}


def _calls(*calls: tuple[str, Any], **when: Any) -> Step:
    return {"when": when, "reply": {"tool_calls": [{"name": name, "arguments": what} for name, what in calls]}}


@pytest.mark.parametrize(
    ("step", "failure", "attempts"),
    [
        (_fault("status", status=429), ("RATE", "PROVIDER_RATE_LIMIT"), 2),
        (_fault("status", status=429, retry_after=3600), ("RATE", "PROVIDER_RATE_LIMIT"), 1),
        (_fault("status", status=500), ("PROVIDER", "PROVIDER_ERROR"), 2),
        (_fault("status", status=503, body="<html>"), ("PROVIDER", "PROVIDER_ERROR"), 2),
        (_fault("status", status=400), ("PROVIDER", "PROVIDER_REFUSED"), 1),
        (_fault("status", status=401), ("AUTH", "PROVIDER_AUTH"), 1),
        (_fault("status", status=403), ("AUTH", "PROVIDER_AUTH"), 1),
        (_fault("hang_before_headers"), ("PROVIDER", "PROVIDER_ERROR"), 2),
        (_fault("reset", after_chunks=0), ("PROVIDER", "PROVIDER_ERROR"), 2),
        (_fault("empty_stream"), ("PROVIDER", "PROVIDER_ERROR"), 2),
    ],
    ids=lambda value: str(value.get("reply", {}).get("fault")) if isinstance(value, dict) else None,
)
async def test_a_server_that_does_not_answer_fails_the_run_with_its_class(
    agent: Agent, model: Model, step: Step, failure: tuple[str, str], attempts: int
) -> None:
    """LOOP-6, LOOP-7, C11: retried only where that may help, in one layer."""
    hangs = step["reply"]["fault"]["type"] == "hang_before_headers"
    impatient = {"model_headers_timeout_seconds": 0.4} if hangs else {}
    ended = await _run(agent, model, step, limits=TWO_ATTEMPTS | impatient)
    assert (_failure(ended), ended.usage.model_calls, ended.output_text) == (failure, attempts, "")


async def test_an_image_that_is_refused_goes_out_once_and_the_conversation_goes_on(
    agent: Agent, other_agent: Agent, model: Model
) -> None:
    """The model is told that it was there, in the same words each time, on any replica."""
    image = message_pb2.Part(image=message_pb2.ImagePart(data=PNG))
    prompt = await model.play({"when": {"images": True}, **_fault("status", status=400)})
    refused = await agent.start(prompt, parts=[image])
    assert _failure(await agent.until_ended(refused.run_id)) == ("PROVIDER", "PROVIDER_REFUSED")
    told = []
    for each in (agent, other_agent):
        run = await each.start("what is 6 * 7?", conversation_id=refused.conversation_id)
        ended = await each.until_ended(run.run_id)
        assert ended.state == run_pb2.RUN_STATE_COMPLETED, ended.failure
        told.append(await model.content(prompt))
    assert told[0] == told[1]
    assert "[An image was here (image/png, " in told[0]
    assert "what is 6 * 7?" in told[0]


@pytest.mark.parametrize("kind", ["hang", "reset", "drop", "truncate", "garble", "error_object"])
async def test_an_answer_that_breaks_off_is_retried_and_its_text_kept(agent: Agent, model: Model, kind: str) -> None:
    """LOOP-7: the partial text stays, and watchers are told of the retry (EVT-2)."""
    step = _fault(kind, after_chunks=4)
    # Enough for the first chunks of a busy machine.
    impatient = {"model_idle_timeout_seconds": 2.0} if kind == "hang" else {}
    ended = await _run(agent, model, step, limits=TWO_ATTEMPTS | impatient)
    assert _failure(ended) == ("PROVIDER", "PROVIDER_ERROR")
    assert ended.usage.model_calls == 2
    assert ended.output_text
    assert str(ANSWER["text"]).startswith(ended.output_text.rstrip())
    retries = [event for event in await agent.events(ended.run_id) if event.HasField("round_retrying")]
    assert len(retries) == 1


async def test_a_server_that_recovers_costs_nothing_but_time(agent: Agent, model: Model) -> None:
    """LOOP-7: Retry-After is honoured."""
    limited: Step = {"times": 1, "reply": {"fault": {"type": "status", "status": 429, "retry_after": 1}}}
    ended = await _run(agent, model, limited, {"reply": ANSWER})
    assert (ended.state, ended.output_text) == (run_pb2.RUN_STATE_COMPLETED, ANSWER["text"])
    assert ended.usage.model_calls == 2


async def test_a_filtered_answer_fails_with_the_part_that_came(agent: Agent, model: Model) -> None:
    ended = await _run(agent, model, {"reply": {"text": "some part", "finish_reason": "content_filter"}})
    assert (_failure(ended), ended.output_text) == (("CONTENT_FILTER", "CONTENT_FILTER"), "some part")


@pytest.mark.parametrize("finish_reason", ["stop", "length", "banana"])
async def test_the_finish_reason_is_not_trusted(agent: Agent, model: Model, finish_reason: str) -> None:
    """LOOP-2"""
    step = _calls(("calculate", {"expression": "1 + 1"}), round=0)
    step["reply"]["finish_reason"] = finish_reason
    ended = await _run(agent, model, step)
    (call,) = await agent.calls(ended.run_id)
    assert (ended.state, call.state) == (run_pb2.RUN_STATE_COMPLETED, call_pb2.CALL_STATE_SUCCEEDED)


BAD_CALLS = [
    ("calculate", '{"expression": ', "INVALID_JSON"),
    ("calculate", '{"expression": NaN}', "INVALID_JSON"),
    ("calculate", '{"expression": "1", "expression": "2"}', "INVALID_JSON"),
    ("calculate", '{"expression": "\\u0000"}', "INVALID_JSON"),
    ("calculate", '{"expression": "\\ud800"}', "INVALID_JSON"),
    ("calculate", '{"expression": ' + "[" * 100 + "]" * 100 + "}", "INVALID_JSON"),
    ("calculate", "[1]", "INVALID_ARGUMENTS"),
    ("calculate", {"expression": "1" * 300_000}, "INVALID_ARGUMENTS"),
    ("calculat", {"expression": "1"}, "TOOL_NOT_FOUND"),
    ("no\0thing/é", {}, "TOOL_NOT_FOUND"),
]


async def test_calls_that_cannot_run_become_errors_for_the_model_beside_one_that_can(
    agent: Agent, model: Model
) -> None:
    """LOOP-2, LOOP-7, C14: nothing malformed runs, and nothing of it fails the run."""
    step = _calls(*((name, what) for name, what, _ in BAD_CALLS), ("calculate", {"expression": "2 + 2"}), round=0)
    step["reply"]["argument_characters"] = 50_000
    ended = await _run(agent, model, step)
    calls = await agent.calls(ended.run_id)
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert [call.result.error_reason for call in calls] == [*(reason for *_, reason in BAD_CALLS), ""]


async def test_of_25_calls_of_a_round_20_run(agent: Agent, model: Model) -> None:
    """LOOP-5: the surplus gets an error result."""
    calls = [("calculate", {"expression": f"{number} + 1"}) for number in range(25)]
    ended = await _run(agent, model, _calls(*calls, round=0))
    reasons = Counter(call.result.error_reason for call in await agent.calls(ended.run_id))
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert reasons == {"": 20, "TOO_MANY_CALLS": 5}


@pytest.mark.parametrize("variants", [1, 2])
async def test_a_model_that_repeats_itself_is_stopped(agent: Agent, model: Model, variants: int) -> None:
    """LOOP-5, D2: the fourth identical call is not executed, and two that alternate are caught as well."""
    steps = [_calls(("calculate", {"expression": f"{n % variants} + 1"}), round=n) for n in range(10)]
    ended = await _run(agent, model, *steps)
    states = [call.state for call in await agent.calls(ended.run_id)]
    assert _failure(ended) == ("STUCK", "STUCK_LOOP")
    assert states[-1] == call_pb2.CALL_STATE_CANCELLED
    assert set(states[:-1]) == {call_pb2.CALL_STATE_SUCCEEDED}
    assert len(states) <= 3 * variants + 1


@pytest.mark.parametrize("policy", ["FINAL_ANSWER", "FAIL"])
async def test_the_last_round_is_seen_by_the_model_or_fails_the_run(agent: Agent, model: Model, policy: str) -> None:
    """LOOP-4, C7: the final call has every result and no tools."""
    steps = [_calls(("calculate", {"expression": f"{n} + 1"}), tools=True, round=n) for n in range(5)]
    final: Step = {"when": {"tools": False}, "reply": {"text": "that is all"}}
    chosen = run_pb2.RoundLimitPolicy.Value(f"ROUND_LIMIT_POLICY_{policy}")
    ended = await _run(agent, model, *steps, final, limits={"rounds_max": 3}, round_limit_policy=chosen)
    calls = await agent.calls(ended.run_id)
    assert [call.state for call in calls] == [call_pb2.CALL_STATE_SUCCEEDED] * 3
    if policy == "FAIL":
        assert (_failure(ended), ended.usage.model_calls) == (("LIMIT", "ROUND_LIMIT"), 3)
    else:
        assert (ended.output_text, ended.usage.model_calls) == ("that is all", 4)


@pytest.mark.parametrize(("limit", "reason"), [("run", "RUN_TIMEOUT"), ("round", "ROUND_TIMEOUT")])
async def test_a_slow_answer_is_cut_at_its_limit(agent: Agent, model: Model, limit: str, reason: str) -> None:
    """LOOP-6, D4: the stream is closed, not left to itself."""
    slow: Step = {"reply": {"text": "on and on " * 600, "chunk_delay": 0.1}}
    ended = await _run(agent, model, slow, limits={f"{limit}_timeout_seconds": 4.0})
    assert _failure(ended) == ("LIMIT", reason)
    assert ended.output_text.startswith("on and on")


async def test_a_cancel_closes_the_models_stream(agent: Agent, model: Model) -> None:
    """I12: the server sees the client go."""
    prompt = await model.play({"reply": {"text": "on and on " * 100, "chunk_delay": 0.1}})
    run = await agent.start(prompt)
    async for event in agent.watch(run.run_id):
        if event.output_delta.text:
            break
    await agent.stub.CancelRun(agent_pb2.CancelRunRequest(run_id=run.run_id), metadata=agent.metadata)
    ended = await agent.until_ended(run.run_id)
    assert ended.state == run_pb2.RUN_STATE_CANCELLED
    assert ended.output_text.startswith("on and")

    async def is_gone() -> bool:
        return await model.outcomes(prompt) == ["client_gone"]

    await until(is_gone)
    await model.forget()
    after = await agent.start("what is 6 * 7?", conversation_id=run.conversation_id)
    assert "42" in (await agent.until_ended(after.run_id)).output_text


async def test_a_run_goes_on_with_another_model_which_takes_its_history(agent: Agent, model: Model) -> None:
    """In the middle of its work, and the conversation goes on with a third one."""
    look: Step = {"reasoning": "Well.", "tool_calls": [{"name": "get_current_time", "arguments": {}}]}
    run = await _run(
        agent,
        model,
        {"when": {"model": "first", "round": 0}, "reply": look},
        {**_fault("status", status=503), "when": {"model": "first"}},
        {"when": {"model": "second"}, "reply": ANSWER},
        limits={"model_attempts_max": 1},
        model="first",
        model_fallbacks=["second"],
    )
    assert run.state == run_pb2.RUN_STATE_COMPLETED, run.failure
    assert run.output_text == ANSWER["text"]
    events = await agent.events(run.run_id)
    assert [event.round_retrying.model for event in events if event.HasField("round_retrying")] == ["second"]
    assert [event.warning.reason for event in events if event.HasField("warning")] == ["MODEL_FALLBACK"]
    said = [event.message_added.message for event in events if event.HasField("message_added")]
    assert [message.model for message in said] == ["", "first", "second"]
