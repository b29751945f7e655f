"""Faults of the model server: each ends the run in its own way, and the conversation goes on.

The server is strict: it refuses a history that a real provider would refuse.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.event.v1 import run_pb2
from tests.poll import until
from tests.system.scripting import Model, Step
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANSWER = {"reasoning": "Well.", "text": "one two three four five six seven"}
LOOK = {"tool_calls": [{"name": "get_current_time", "arguments": {}}]}


def fault(kind: str, **fields: Any) -> Step:
    return {"reply": {**ANSWER, "fault": {"type": kind, **fields}}}


FAILURES: list[tuple[Step, str, int, bool]] = [
    # fault, reason of the failure, attempts, whether the beginning of the answer is kept
    (fault("status", status=429), "PROVIDER_RATE_LIMIT", 2, False),
    (fault("status", status=429, retry_after=3600), "PROVIDER_RATE_LIMIT", 1, False),
    (fault("status", status=503, body="<html>"), "PROVIDER_ERROR", 2, False),
    (fault("status", status=400), "PROVIDER_REFUSED", 1, False),
    (fault("status", status=401), "PROVIDER_AUTH", 1, False),
    (fault("hang_before_headers"), "PROVIDER_ERROR", 2, False),
    (fault("empty_stream"), "PROVIDER_ERROR", 2, False),
    (fault("reset", after_chunks=4), "PROVIDER_ERROR", 2, True),
    (fault("drop", after_chunks=4), "PROVIDER_ERROR", 2, True),
    (fault("garble", after_chunks=4), "PROVIDER_ERROR", 2, True),
    (fault("error_object", after_chunks=4), "PROVIDER_ERROR", 2, True),
    ({"reply": {"text": ANSWER["text"], "finish_reason": "content_filter"}}, "CONTENT_FILTER", 1, True),
]


async def test_each_fault_of_a_model_server_fails_its_run_with_its_reason(agent: Agent, model: Model) -> None:
    """LOOP-6, LOOP-7: retried only where that may help; what came is kept; the conversation goes on."""
    prompts = await model.play_all([[step] for step, *_ in FAILURES])

    async def play(prompt: str, expected: tuple[Step, str, int, bool]) -> str:
        step, reason, attempts, is_kept = expected
        limits: dict[str, Any] = {"model_attempts_max": 2, "provider_wait_seconds": 0}
        if step["reply"].get("fault", {}).get("type") == "hang_before_headers":
            limits["model_headers_timeout_seconds"] = 0.4
        run = await agent.start(prompt, options=run_pb2.RunOptions(limits=run_pb2.RunLimits(**limits)))
        ended = await agent.until_ended(run.run_id)
        found = (ended.failure.reason, ended.usage.model_calls, bool(ended.output_text))
        assert found == (reason, attempts, is_kept), step
        assert ended.state == run_pb2.RUN_STATE_FAILED
        assert str(ANSWER["text"]).startswith(ended.output_text.rstrip())
        return run.conversation_id

    conversations = await asyncio.gather(*map(play, prompts, FAILURES))
    await model.forget()
    after = [await agent.start("what is 6 * 7?", conversation_id=each) for each in conversations]
    for run in after:
        assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED


BAD_CALLS: list[tuple[str, Any, str]] = [
    ("calculate", '{"expression": ', "INVALID_JSON"),
    ("calculate", '{"expression": "\\u0000"}', "INVALID_JSON"),
    ("calculate", "[1]", "INVALID_ARGUMENTS"),
    ("calculat", {"expression": "1"}, "TOOL_NOT_FOUND"),
    ("no\0thing/é", {}, "TOOL_NOT_FOUND"),
    ("calculate", {"expression": "2 + 2"}, ""),
]


async def test_calls_that_cannot_run_become_errors_for_the_model_beside_one_that_can(
    agent: Agent, model: Model
) -> None:
    """LOOP-2, LOOP-7: nothing malformed runs, nothing of it fails the run, and the finish reason is not trusted."""
    calls = [{"name": name, "arguments": arguments} for name, arguments, _ in BAD_CALLS]
    prompt = await model.play({"when": {"round": 0}, "reply": {"tool_calls": calls, "finish_reason": "banana"}})
    run = await agent.start(prompt)
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    reasons = [call.result.error_reason for call in await agent.calls(run.run_id)]
    assert reasons == [reason for *_, reason in BAD_CALLS]


async def test_a_run_goes_on_with_another_model_which_takes_its_history(agent: Agent, model: Model) -> None:
    """LOOP-7: in the middle of its work, after a server that recovered; and the conversation goes on with a third."""
    busy: Step = {"times": 1, **fault("status", status=429, retry_after=1), "when": {"model": "first", "round": 0}}
    prompt = await model.play(
        busy,
        {"when": {"model": "first", "round": 0}, "reply": LOOK},
        {**fault("status", status=400), "when": {"model": "first"}},
        {**fault("status", status=503), "when": {"model": "first"}},
        {"when": {"model": "second"}, "reply": ANSWER},
    )
    limits = run_pb2.RunLimits(model_attempts_max=2)
    options = run_pb2.RunOptions(limits=limits, model="first", model_fallbacks=["second"])
    run = await agent.start(prompt, options=options)
    ended = await agent.until_ended(run.run_id)
    assert (ended.state, ended.output_text) == (run_pb2.RUN_STATE_COMPLETED, ANSWER["text"]), ended.failure
    events = await agent.events(run.run_id)
    assert [event.warning.reason for event in events if event.HasField("warning")] == ["MODEL_FALLBACK"]
    said = [event.message_added.message for event in events if event.HasField("message_added")]
    assert [message.model for message in said] == ["", "first", "second"]
    after = await agent.start("what is 6 * 7?", conversation_id=run.conversation_id)
    assert "42" in (await agent.until_ended(after.run_id)).output_text


async def test_a_cancel_closes_the_stream_of_the_model(agent: Agent, model: Model) -> None:
    """I12: the server sees the client go, what came is kept, and the conversation goes on."""
    prompt = await model.play({"reply": {"text": "on and on " * 600, "chunk_delay": 0.1}})
    run = await agent.start(prompt)
    async for event in agent.watch(run.run_id):
        if event.output_delta.text:
            break
    ended = await agent.cancel(run.run_id)
    assert (ended.state, ended.output_text[:6]) == (run_pb2.RUN_STATE_CANCELLED, "on and")

    async def is_gone() -> bool:
        return await model.outcomes(prompt) == ["client_gone"]

    await until(is_gone)
    await model.forget()
    after = await agent.start("what is 6 * 7?", conversation_id=run.conversation_id)
    assert "42" in (await agent.until_ended(after.run_id)).output_text


async def test_a_run_that_takes_too_long_is_cut(agent: Agent, model: Model) -> None:
    """LOOP-6"""
    slow: Step = {"reply": {"text": "on and on " * 600, "chunk_delay": 0.1}}
    prompt = await model.play(slow)
    limits = run_pb2.RunLimits(run_timeout_seconds=4.0)
    run = await agent.start(prompt, options=run_pb2.RunOptions(limits=limits))
    ended = await agent.until_ended(run.run_id)
    assert (ended.state, ended.failure.reason) == (run_pb2.RUN_STATE_FAILED, "RUN_TIMEOUT")
