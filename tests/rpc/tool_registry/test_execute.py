"""Executions: results, errors, timeouts, progress, secrets (TOOL-4, TOOL-8, LOOP-6 to LOOP-8, C11)."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from pawl.tool_registry.sources.python import tool_loop
from pawl.tools import Category, EffectClass, Inverse, Reversible, Tool, ToolContext, ToolError, tool
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, refusal, running

SAFE = Category.SAFE
READ = EffectClass.READ_ONLY


@tool(category=SAFE, effect=READ)
async def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@tool(category=SAFE, effect=READ)
def thread_name() -> str:
    """Return the thread name."""
    return threading.current_thread().name


@tool(category=SAFE, effect=READ)
def who(context: ToolContext) -> dict[str, Any]:
    """Return the context."""
    return {
        "ids": [context.store_id, context.user_id, context.conversation_id, context.run_id, context.call_id],
        "key": context.idempotency_key,
        "attempt": context.attempt,
        "left": (context.deadline.timestamp() - time.time()),
    }


@tool(category=SAFE, effect=READ)
async def fail(how: str) -> Any:
    """Fail in some way."""
    match how:
        case "tool_error":
            raise ToolError("the city is unknown; did you mean Oslo?")
        case "exception":
            raise RuntimeError("password=hunter2 at /srv/db")
        case "exit":
            sys.exit(3)
        case "cancel":
            raise asyncio.CancelledError
        case "nan":
            return float("nan")
        case "object":
            return object()
        case "large":
            return "x" * 2_000_000
        case _:
            return "fine"


@tool(category=SAFE, effect=READ)
def fail_in_thread(how: str) -> Any:
    """Fail in some way."""
    if how == "exit":
        sys.exit(3)
    raise RuntimeError("password=hunter2")


@tool(category=SAFE, effect=READ, result_bytes_max=10)
def small(size: int) -> str:
    """Return a text with quotes."""
    return "x" * (size - 2)


@tool(category=SAFE, effect=READ)
def spill(context: ToolContext, way: str) -> Any:
    """Return a secret."""
    secret = context.secret("api_key")
    context.progress(0.5, f"using {secret}")
    if way == "error":
        raise ToolError(f"refused: {secret}")
    return {"said": f"the key is {secret}", secret: [secret]}


@dataclass
class Events:
    happened: list[str] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def events() -> Any:
    events = Events()
    yield events
    events.release.set()


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, events: Events) -> Any:
    @tool(category=SAFE, effect=READ)
    async def wait() -> str:
        """Wait forever."""
        events.happened.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            events.happened.append("cancelled")
        return "never"

    @tool(category=SAFE, effect=READ, timeout_seconds=0.1)
    async def impatient() -> str:
        """Wait forever with a short timeout."""
        await asyncio.Event().wait()
        return "never"

    @tool(category=SAFE, effect=READ)
    async def stubborn() -> str:
        """Ignore cancellation."""
        while not events.release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                events.happened.append("ignored")
        return "late"

    @tool(category=SAFE, effect=READ)
    def block(context: ToolContext) -> str:
        """Block a thread."""
        events.happened.append("began")
        events.release.wait(30)
        events.happened.append(f"cancelled={context.cancelled}")
        return "late"

    @tool(category=SAFE, effect=READ)
    async def hog() -> None:
        """Block an event loop."""
        events.release.wait(30)

    @tool(category=SAFE, effect=READ)
    async def report(context: ToolContext, times: int) -> str:
        """Report progress often."""
        for number in range(times):
            context.progress((number + 1) / times, f"step {number + 1}" + "!" * 2000)
            await asyncio.sleep(0)
        return "done"

    tools: list[Tool[..., Any]] = [
        add,
        thread_name,
        who,
        fail,
        fail_in_thread,
        small,
        spill,
        *(replace(one, on_tool_loop=True) for one in (wait, impatient, stubborn, hog)),
        block,
        report,
    ]
    secrets = {"*": {"api_key": "common-key"}, "acme": {"api_key": "acme-key"}}
    async with running(database_url, tmp_path, tools, secrets=secrets, threads_max=2) as registry:
        yield registry


async def test_tool_gets_the_user_and_store_of_its_call(registry: Registry) -> None:
    """TOOL-4: the tool also gets the attempt and the deadline."""
    seen = content(await registry.run("who", call="c1", earlier_attempts=2, timeout_seconds=7))
    assert (seen["ids"], seen["key"], seen["attempt"]) == (["acme", "ann", "conversation", "run", "c1"], "c1", 3)
    assert 5 < seen["left"] <= 7


async def test_secrets_are_redacted_from_all_tool_output(registry: Registry) -> None:
    """TOOL-4, I22: results, errors and progress contain no secret."""
    responses = [response async for response in registry.stream("spill", {"way": "result"})]
    assert content(responses[-1].result) == {"said": "the key is [secret]", "[secret]": ["[secret]"]}
    assert [r.progress.message for r in responses if r.HasField("progress")] in ([], ["using [secret]"])
    assert content(await registry.run("spill", {"way": "error"}, call="other")) == {"error": "refused: [secret]"}
    assert "acme-key" not in repr(responses)


async def test_shorter_timeout_applies_and_cancels_the_work(registry: Registry, events: Events) -> None:
    """LOOP-6, C11: a timeout cancels the work and does not only free the slot."""
    await registry.run_out_of_time("wait")
    assert events.happened == ["began", "cancelled"]
    assert outcome(await registry.run("impatient", call="other", timeout_seconds=60)) == "FAILED TOOL_TIMEOUT"
    await registry.run_out_of_time("stubborn", call="deaf")
    assert events.happened == ["began", "cancelled", "ignored"]
    events.release.set()


async def test_blocking_async_tool_is_reported_and_delays_only_async_tools(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_loop, "BLOCKED_SECONDS", 0.05)
    for call, name in enumerate(("hog", "wait")):
        with structlog.testing.capture_logs() as logged:
            result = await registry.run(name, timeout_seconds=1, call=str(call))
        assert "hog blocks the event loop of async tools" in content(result)["error"]
        assert any(event["event"] == "tool.blocks" and event["tool"] == "hog" for event in logged) == (name == "hog")
    assert content(await registry.run("add", {"a": 1})) == 2


async def test_a_timed_out_thread_is_cancelled_but_keeps_its_slot_until_it_ends(
    registry: Registry, events: Events
) -> None:
    await registry.run_out_of_time("block", call="a")
    assert registry.runner.threads_busy == 1
    await registry.run_out_of_time("block", call="b")
    # Both threads are busy, so the next call waits for a thread within its own timeout.
    assert outcome(await registry.run("thread_name", timeout_seconds=0.1, call="c")) == "FAILED TOOL_TIMEOUT"
    assert b"tool_threads_busy 2.0" in registry.metrics.text()
    events.release.set()
    assert content(await registry.run("thread_name", call="d")) == "tool"

    await until(lambda: registry.runner.threads_busy == 0)
    assert events.happened == ["began", "began", "cancelled=True", "cancelled=True"]


async def test_caller_disconnect_cancels_an_unjournaled_call(registry: Registry, events: Events) -> None:
    stream = registry.stream("wait", timeout_seconds=300)

    reading = asyncio.ensure_future(stream.read())
    await until(lambda: events.happened == ["began"])
    stream.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: events.happened == ["began", "cancelled"] and registry.executor.running_count == 0)


async def test_progress_is_sampled_and_the_newest_report_comes_first(registry: Registry) -> None:
    """TOOL-8, C12: of 1000 reports, fewer than 500 are sent, each with at most 1024 bytes."""
    responses = [response async for response in registry.stream("report", {"times": 1000})]
    shown = [response.progress for response in responses[:-1]]
    assert 1 <= len(shown) < 500
    assert all(len(progress.message.encode()) <= 1024 for progress in shown)
    assert responses[-1].WhichOneof("kind") == "result"


async def test_a_returned_value_or_exception_becomes_the_result(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    """LOOP-7, LOOP-8, I22: of an unexpected exception, only the type reaches the model and the log."""
    ended = await registry.run("add", {"a": 2})
    assert (outcome(ended), content(ended), ended.result.is_error) == ("SUCCEEDED", 3, False)
    assert ended.duration_seconds > 0
    rows: list[tuple[str, dict[str, Any], str, str]] = [
        ("fail", {"how": "tool_error"}, "TOOL_ERROR", "the city is unknown; did you mean Oslo?"),
        ("fail", {"how": "exception"}, "TOOL_ERROR", "TOOL_ERROR: RuntimeError."),
        ("fail", {"how": "exit"}, "TOOL_ERROR", "TOOL_ERROR: "),
        ("fail", {"how": "cancel"}, "TOOL_ERROR", ""),
        ("fail", {"how": "nan"}, "TOOL_ERROR", "fail returned a value that cannot be passed on"),
        ("fail", {"how": "object"}, "TOOL_ERROR", "fail returned a value that cannot be passed on"),
        ("fail", {"how": "large"}, "RESULT_TOO_LARGE", ""),
        ("small", {"size": 11}, "RESULT_TOO_LARGE", ""),
        ("fail_in_thread", {"how": "exception"}, "TOOL_ERROR", "TOOL_ERROR: RuntimeError."),
        ("fail_in_thread", {"how": "exit"}, "TOOL_ERROR", "TOOL_ERROR: "),
    ]
    for number, (name, arguments, why, said) in enumerate(rows):
        failed = await registry.run(name, arguments, call=f"c{number}")
        assert (outcome(failed), failed.result.is_error) == (f"FAILED {why}", True), arguments
        assert content(failed)["error"].startswith(said), arguments
        assert "hunter2" not in repr(failed)
    assert outcome(await registry.run("small", {"size": 10}, call="fits")) == "SUCCEEDED"
    captured = capsys.readouterr()
    assert "hunter2" not in captured.out + captured.err
    text = registry.metrics.text().decode()
    lines = (
        'executions_total{outcome="SUCCEEDED",store="acme",tool="add"} 1.0',
        'executions_total{outcome="FAILED",store="acme",tool="fail_in_thread"} 2.0',
        "executions_in_flight 0.0",
    )
    assert [line for line in lines if line not in text] == []


async def test_refused_call_is_an_error(registry: Registry) -> None:
    rows: list[tuple[str, Any, dict[str, Any], str]] = [
        ("nope", {}, {}, "TOOL_NOT_FOUND"),
        ("add", {"a": 1}, {"version": 2}, "TOOL_NOT_FOUND"),
        ("add", {"a": "x"}, {}, "INVALID_ARGUMENTS"),
        ("add", b"{", {}, "INVALID_ARGUMENTS"),
        ("add", {"a": 1}, {"timeout_seconds": -1}, "INVALID_FIELD"),
        ("add", {"a": 1}, {"timeout_seconds": float("nan")}, "INVALID_FIELD"),
        ("add", {"a": 1}, {"call": "a/b"}, "INVALID_ID"),
        ("add", {"a": 1}, {"who": context(run="")}, "INVALID_ID"),
    ]
    for name, arguments, more, expected in rows:
        assert await refusal(registry.stream(name, arguments, **more)) == expected, (name, arguments, more)


async def test_stopped_call_that_took_effect_reports_its_inverse(database_url: str, tmp_path: Path) -> None:
    """Otherwise, an undo of the run would miss it."""
    loop, began = asyncio.get_running_loop(), asyncio.Event()

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    def move(context: ToolContext, *, is_slow: bool = False) -> Reversible:
        """Move."""
        loop.call_soon_threadsafe(began.set)
        if is_slow:
            context.wait_cancelled(30)
        return Reversible(value="moved", inverse=Inverse(tool_name="move", arguments={}, summary="move it back"))

    async with running(database_url, tmp_path, [move]) as registry:
        asked = asyncio.ensure_future(registry.run("move", {"is_slow": True}, call="slow"))
        await began.wait()
        answer = await registry.cancel("slow")
        assert (answer.stopped, outcome(answer.result), content(answer.result)) == (True, "SUCCEEDED", "moved")
        assert (answer.result.result.inverse.tool_name, await asked) == ("move", answer.result)
        ended = await registry.run("move", call="ended")
        assert (await registry.cancel("ended")).result == ended
