"""Executions: results, errors, timeouts, progress, secrets. TOOL-4, TOOL-8, LOOP-6 to LOOP-8, C11."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.tools import Category, EffectClass, Tool, ToolContext, ToolError, tool
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, reason, running

SAFE = Category.SAFE
READ = EffectClass.READ_ONLY
EXECUTE = "/pawl.tool.v1.ExecutionService/ExecuteTool"


@tool(category=SAFE, effect=READ)
async def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@tool(category=SAFE, effect=READ)
def thread_name() -> str:
    """Say which thread this is."""
    return threading.current_thread().name


@tool(category=SAFE, effect=READ)
def who(context: ToolContext) -> dict[str, Any]:
    """Say what the context says."""
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


@tool(category=SAFE, effect=READ, allowed_users=["ann"])
def private() -> str:
    """Only for ann."""
    return "for ann"


@tool(category=SAFE, effect=READ, result_bytes_max=10)
def small(size: int) -> str:
    """Return a text with quotes."""
    return "x" * (size - 2)


@tool(category=SAFE, effect=READ)
def spill(context: ToolContext, way: str) -> Any:
    """Say a secret."""
    secret = context.secret("api_key")
    context.progress(0.5, f"using {secret}")
    if way == "error":
        raise ToolError(f"refused: {secret}")
    return {"said": f"the key is {secret}", secret: [secret]}


class Events:
    """What tools of a test did."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.release = threading.Event()


@pytest.fixture
def events() -> Any:
    events = Events()
    yield events
    events.release.set()


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, events: Events) -> Any:
    @tool(category=SAFE, effect=READ)
    async def wait() -> str:
        """Wait for ever."""
        events.happened.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            events.happened.append("cancelled")
        return "never"

    @tool(category=SAFE, effect=READ, timeout_seconds=0.1)
    async def impatient() -> str:
        """Wait for ever, for a short time."""
        await asyncio.Event().wait()
        return "never"

    @tool(category=SAFE, effect=READ)
    async def stubborn() -> str:
        """Do not listen to being cancelled."""
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
        private,
        small,
        spill,
        wait,
        impatient,
        stubborn,
        block,
        report,
    ]
    secrets = {"*": {"api_key": "common-key"}, "acme": {"api_key": "acme-key"}}
    async with running(database_url, tmp_path, tools, secrets=secrets, threads_max=2) as registry:
        yield registry


async def refused(stream: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in stream:
            pass
    code, why, _ = reason(error.value)
    return code, why


async def test_a_tool_returns_its_result(registry: Registry) -> None:
    result = await registry.run("add", {"a": 2})
    assert (outcome(result), content(result), result.result.is_error) == ("SUCCEEDED", 3, False)
    assert result.duration_seconds > 0


async def test_sync_tools_run_in_threads(registry: Registry) -> None:
    assert content(await registry.run("thread_name")) == "tool"


async def test_a_tool_is_told_for_whom_it_works(registry: Registry) -> None:
    """TOOL-4."""
    told = content(await registry.run("who", call="c1", earlier_attempts=2, timeout_seconds=7))
    assert told["ids"] == ["acme", "ann", "conversation", "run", "c1"]
    assert (told["key"], told["attempt"]) == ("c1", 3)
    assert 5 < told["left"] <= 7


async def test_the_text_of_a_tool_error_is_for_the_model(registry: Registry) -> None:
    """LOOP-7: a failing tool is a result, not an error of the request."""
    result = await registry.run("fail", {"how": "tool_error"})
    assert outcome(result) == "FAILED TOOL_ERROR"
    assert result.result.is_error
    assert content(result) == {"error": "the city is unknown; did you mean Oslo?"}


@pytest.mark.parametrize("name", ["fail", "fail_in_thread"])
async def test_of_any_other_exception_only_the_type_is_told(
    registry: Registry, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """I22. Neither the model nor the log gets the text."""
    result = await registry.run(name, {"how": "exception"})
    assert outcome(result) == "FAILED TOOL_ERROR"
    assert content(result)["error"].startswith("TOOL_ERROR: RuntimeError.")
    captured = capsys.readouterr()
    assert "hunter2" not in repr(result) + captured.out + captured.err


@pytest.mark.parametrize(("name", "how"), [("fail", "exit"), ("fail", "cancel"), ("fail_in_thread", "exit")])
async def test_a_tool_cannot_end_the_process_or_the_call(registry: Registry, name: str, how: str) -> None:
    assert outcome(await registry.run(name, {"how": how})) == "FAILED TOOL_ERROR"
    assert outcome(await registry.run("add", {"a": 1}, call="next")) == "SUCCEEDED"


@pytest.mark.parametrize("how", ["nan", "object"])
async def test_a_result_that_is_not_json_is_an_error_result(registry: Registry, how: str) -> None:
    result = await registry.run("fail", {"how": how})
    assert outcome(result) == "FAILED TOOL_ERROR"
    assert "cannot be passed on" in content(result)["error"]


async def test_a_result_over_the_limit_is_an_error_result(registry: Registry) -> None:
    """LOOP-8."""
    assert outcome(await registry.run("fail", {"how": "large"}, call="a")) == "FAILED RESULT_TOO_LARGE"
    assert outcome(await registry.run("small", {"size": 10}, call="b")) == "SUCCEEDED"
    assert outcome(await registry.run("small", {"size": 11}, call="c")) == "FAILED RESULT_TOO_LARGE"


async def test_a_secret_is_taken_out_of_all_that_a_tool_says(registry: Registry) -> None:
    """TOOL-4, I22."""
    responses = [response async for response in registry.stream("spill", {"way": "result"})]
    assert content(responses[-1].result) == {"said": "the key is [secret]", "[secret]": ["[secret]"]}
    assert [r.progress.message for r in responses if r.HasField("progress")] in ([], ["using [secret]"])
    failed = await registry.run("spill", {"way": "error"}, call="other")
    assert content(failed) == {"error": "refused: [secret]"}
    assert "acme-key" not in repr(responses)


async def test_the_shorter_limit_holds_and_the_work_is_cancelled(registry: Registry, events: Events) -> None:
    """LOOP-6, C11: a timeout once freed the slot and cancelled nothing."""
    await registry.run_out_of_time("wait")
    assert events.happened == ["began", "cancelled"]
    assert outcome(await registry.run("impatient", call="other", timeout_seconds=60)) == "FAILED TOOL_TIMEOUT"


async def test_a_tool_that_does_not_listen_to_its_timeout_keeps_nobody_waiting(
    registry: Registry, events: Events
) -> None:
    _, result = await registry.run_out_of_time("stubborn")
    assert "was asked to stop, but goes on" in content(result)["error"]
    assert events.happened == ["ignored"]
    events.release.set()


async def test_a_thread_over_its_time_is_told_so_and_counts_until_it_ends(registry: Registry, events: Events) -> None:
    await registry.run_out_of_time("block", call="a")
    assert registry.runner.threads_busy == 1
    await registry.run_out_of_time("block", call="b")
    # Both threads are occupied: the next one waits for its turn within its own time.
    assert outcome(await registry.run("thread_name", timeout_seconds=0.1, call="c")) == "FAILED TOOL_TIMEOUT"
    assert b"tool_threads_busy 2.0" in registry.metrics.text()
    events.release.set()
    assert content(await registry.run("thread_name", call="d")) == "tool"

    async def are_free() -> bool:
        return registry.runner.threads_busy == 0

    await until(are_free)
    assert events.happened == ["began", "began", "cancelled=True", "cancelled=True"]


async def test_a_caller_that_leaves_ends_a_call_without_a_journal(registry: Registry, events: Events) -> None:
    stream = registry.stream("wait", timeout_seconds=300)

    async def began() -> bool:
        return events.happened == ["began"]

    async def ended() -> bool:
        return events.happened == ["began", "cancelled"] and registry.executor.running_count == 0

    reading = asyncio.ensure_future(stream.read())
    await until(began)
    stream.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(ended)


async def test_two_callers_of_one_call_get_one_execution(registry: Registry, events: Events) -> None:
    callers = [asyncio.ensure_future(registry.run("block")) for _ in range(3)]

    async def all_listen() -> bool:
        return registry.metrics.rpc.in_flight.labels(EXECUTE)._value.get() == len(callers) and bool(events.happened)

    await until(all_listen)
    events.release.set()
    results = await asyncio.gather(*callers)
    assert [content(result) for result in results] == ["late"] * 3
    assert events.happened.count("began") == 1


async def test_progress_is_shown_newest_first_and_not_each_time(registry: Registry) -> None:
    """TOOL-8, C12."""
    responses = [response async for response in registry.stream("report", {"times": 1000})]
    shown = [response.progress for response in responses[:-1]]
    assert 1 <= len(shown) <= 5
    assert all(len(progress.message.encode()) <= 1024 for progress in shown)
    assert responses[-1].WhichOneof("kind") == "result"


async def test_a_user_who_may_not_call_a_tool_cannot_run_it(registry: Registry) -> None:
    """TOOL-6: enforced where it runs, not only where it is checked. C6."""
    assert content(await registry.run("private")) == "for ann"
    foreign = registry.stream("private", who=context(user="bob"), call="other")
    assert await refused(foreign) == (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")


@pytest.mark.parametrize(
    ("name", "arguments", "more", "expected"),
    [
        ("nope", {}, {}, (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")),
        ("add", {"a": 1}, {"version": 2}, (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")),
        ("add", {"a": "x"}, {}, (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENTS")),
        ("add", b"{", {}, (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENTS")),
        ("add", {"a": 1}, {"timeout_seconds": -1}, (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")),
        ("add", {"a": 1}, {"timeout_seconds": float("nan")}, (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")),
        ("add", {"a": 1}, {"call": "a/b"}, (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ID")),
        ("add", {"a": 1}, {"who": context(run="")}, (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ID")),
    ],
)
async def test_a_call_that_may_not_run_is_an_error(
    registry: Registry, name: str, arguments: Any, more: dict[str, Any], expected: Any
) -> None:
    assert await refused(registry.stream(name, arguments, **more)) == expected


async def test_executions_are_counted_by_tool_and_outcome(registry: Registry) -> None:
    """OPS-2."""
    await registry.run("add", {"a": 1})
    await registry.run("fail", {"how": "exception"}, call="other")
    text = registry.metrics.text().decode()
    assert 'executions_total{outcome="SUCCEEDED",tool="add"} 1.0' in text
    assert 'executions_total{outcome="FAILED",tool="fail"} 1.0' in text
    assert "executions_in_flight 0.0" in text
