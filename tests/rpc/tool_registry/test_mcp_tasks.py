"""Tools of MCP servers that are called as tasks: begun once, asked for until they end, through crashes (ASYNC-1)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pawl.chassis.clock import SystemClock
from pawl.chassis.ids import UserId
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2
from tests.files import put
from tests.poll import until
from tests.rpc.tool_registry.mcp_world import SAFE, FakeServer, McpRegistry, a_tool, failure, mcp_registry, policy
from tests.rpc.tool_registry.registry import content, context, outcome

TASK = {"execution": {"taskSupport": "required"}}


class Hurried(SystemClock):
    """A clock with which pauses are short."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 20)


@pytest.fixture
async def mcp(database_url: str, tmp_path: Path) -> AsyncIterator[McpRegistry]:
    async with mcp_registry(database_url, tmp_path, clock=Hurried()) as made:
        yield made


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    made = FakeServer(tmp_path / "fake", ())
    made.describe([a_tool(name, **TASK) for name in ("echo", "fail", "ask", "log_in")] + [a_tool("hang")])
    return made


def end(server: FakeServer, state: str = "completed") -> None:
    put(server.folder / "ends", state)


async def logged(server: FakeServer, line: str, times: int = 1) -> None:
    async def is_there() -> bool:
        return server.log().count(line) >= times

    await until(is_there)


def begun(server: FakeServer) -> int:
    return sum(line.startswith("begun") for line in server.log())


async def test_a_tool_that_demands_a_task_is_begun_and_asked_for_until_it_ends(
    mcp: McpRegistry, server: FakeServer
) -> None:
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {"city": "Oslo"}))
    await logged(server, "get task-0", times=2)
    assert not running.done()
    end(server)
    assert content(await running) == '{"city": "Oslo"}'
    assert begun(server) == 1


async def test_what_a_task_says_of_itself_is_progress(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    responses = mcp.registry.stream("fake.echo", {})
    said = []
    async for response in responses:
        if response.WhichOneof("kind") == "progress":
            said.append(response.progress.message)
            end(server)
    assert said[0] == "it is working"


async def test_a_task_that_fails_says_so_in_its_words(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    end(server, "failed")
    failed = await mcp.run("fake.fail", {})
    assert (outcome(failed), failure(failed)) == ("FAILED TOOL_ERROR", "no such city")
    end(server, "cancelled")
    assert "its server cancelled it" in failure(await mcp.run("fake.echo", {}, call="two"))


async def test_a_call_whose_registry_goes_away_goes_on_and_is_begun_once(
    database_url: str, tmp_path: Path, server: FakeServer
) -> None:
    async with mcp_registry(database_url, tmp_path) as one:
        await one.add(server.config())
        first = asyncio.create_task(one.run("fake.echo", {"city": "Oslo"}))
        await logged(server, "get task-0")
    await asyncio.gather(first, return_exceptions=True)
    (tmp_path / "b").mkdir()
    async with mcp_registry(database_url, tmp_path / "b") as other:
        second = asyncio.create_task(other.run("fake.echo", {"city": "Oslo"}, earlier_attempts=1))
        asked = server.log().count("get task-0")
        await logged(server, "get task-0", times=asked + 1)
        end(server)
        assert content(await second) == '{"city": "Oslo"}'
    assert begun(server) == 1
    assert "cancel task-0" not in server.log()


async def test_a_task_that_fails_after_its_registry_went_away_fails_its_call(
    database_url: str, tmp_path: Path, server: FakeServer
) -> None:
    async with mcp_registry(database_url, tmp_path) as one:
        await one.add(server.config())
        first = asyncio.create_task(one.run("fake.fail", {}))
        await logged(server, "get task-0")
    await asyncio.gather(first, return_exceptions=True)
    end(server, "failed")
    (tmp_path / "b").mkdir()
    async with mcp_registry(database_url, tmp_path / "b") as other:
        assert failure(await other.run("fake.fail", {}, earlier_attempts=1)) == "no such city"
    assert begun(server) == 1


async def test_a_server_that_dies_meanwhile_is_asked_again(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {}))
    await logged(server, "get task-0")
    for _, session in list(mcp.connector.connections.all()):
        session.stop()
    end(server)
    assert content(await running) == "{}"
    assert begun(server) == 1


async def test_a_task_of_which_the_server_knows_nothing_any_more_is_unknown(
    mcp: McpRegistry, server: FakeServer
) -> None:
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {}))
    await logged(server, "get task-0")
    (server.folder / "task-0").unlink()
    assert outcome(await running) == "UNKNOWN OUTCOME_UNKNOWN"


async def test_no_task_opens_a_source_anew_that_was_removed(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {}))
    await logged(server, "get task-0")
    await mcp.remove()
    end(server)
    assert outcome(await running) == "UNKNOWN OUTCOME_UNKNOWN"
    assert mcp.open_count == 0


async def test_who_cancels_the_call_cancels_the_task(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {}))
    await logged(server, "get task-0")
    await mcp.registry.cancel()
    assert outcome(await running).startswith("CANCELLED")
    await logged(server, "cancel task-0")


@pytest.mark.parametrize("loss", ["its caller left", "its server forgot it"])
async def test_a_call_that_may_be_made_again_begins_another_task_for_one_that_is_lost(
    mcp: McpRegistry, server: FakeServer, loss: str
) -> None:
    read_only = policy("*", category=SAFE, effect_class=call_pb2.EFFECT_CLASS_READ_ONLY)
    await mcp.add(server.config(policies=[read_only]))
    left = mcp.registry.stream("fake.echo", {"city": "Oslo"})
    await anext(aiter(left))
    await logged(server, "get task-0")
    left.cancel()
    await logged(server, "cancel task-0")
    if loss == "its server forgot it":
        (server.folder / "task-0").rename(server.folder / "forgotten")
        (server.folder / "task-forgotten").touch()
    again = asyncio.create_task(mcp.run("fake.echo", {"city": "Oslo"}, earlier_attempts=1))
    await logged(server, "get task-1")
    end(server)
    assert content(await again) == '{"city": "Oslo"}'
    assert begun(server) == 2


async def test_a_task_is_asked_for_where_it_goes_on_also_while_its_server_is_at_another_call(
    mcp: McpRegistry, server: FakeServer
) -> None:
    """Of a server that asks a further call has a connection alone; another process knows nothing of the task."""
    (server.folder / "forgetful").touch()
    await mcp.add(server.config())
    one = asyncio.create_task(mcp.run("fake.echo", {}, call="one"))
    await logged(server, "get task-0")
    ((_, session),) = mcp.connector.connections.all()
    user_id = UserId(context().user_id)
    session.has_asked, session.owner = True, user_id
    session.take_place(user_id, "another call")
    await logged(server, "get task-0", times=server.log().count("get task-0") + 2)
    two = asyncio.create_task(mcp.run("fake.echo", {}, call="two"))
    await logged(server, "get task-1")
    assert mcp.open_count == 2
    end(server)
    assert [content(await each) for each in (one, two)] == ["{}", "{}"]


@pytest.mark.parametrize("effect", [call_pb2.EFFECT_CLASS_UNSPECIFIED, call_pb2.EFFECT_CLASS_READ_ONLY])
async def test_a_task_that_wants_something_asks_the_user(mcp: McpRegistry, server: FakeServer, effect: Any) -> None:
    await mcp.add(server.config(policies=[policy("*", category=SAFE, effect_class=effect)]))
    end(server, "input_required")
    asked = await mcp.run("fake.ask")
    assert outcome(asked) == "INPUT_REQUIRED"
    said = execution_pb2.Answer(question=asked.question.question, answer="large")
    done = await mcp.run("fake.ask", answers=[said], earlier_attempts=1)
    assert content(done) == '{"action": "accept", "content": {"size": "large"}}'


async def test_a_task_that_wants_something_asks_the_user_after_its_registry_went_away(
    database_url: str, tmp_path: Path, server: FakeServer
) -> None:
    async with mcp_registry(database_url, tmp_path) as one:
        await one.add(server.config())
        first = asyncio.create_task(one.run("fake.ask"))
        await logged(server, "get task-0")
    await asyncio.gather(first, return_exceptions=True)
    end(server, "input_required")
    (tmp_path / "b").mkdir()
    async with mcp_registry(database_url, tmp_path / "b") as other:
        asked = await other.run("fake.ask", earlier_attempts=1)
        assert outcome(asked) == "INPUT_REQUIRED"
        said = execution_pb2.Answer(question=asked.question.question, answer="large")
        done = await other.run("fake.ask", answers=[said], earlier_attempts=2)
        assert content(done) == '{"action": "accept", "content": {"size": "large"}}'
    assert begun(server) == 1


async def test_a_task_that_nobody_may_ask_for_any_more_is_unknown(
    database_url: str, tmp_path: Path, server: FakeServer
) -> None:
    """A secret of its server was taken away: the task goes on all the same."""
    async with mcp_registry(database_url, tmp_path, secrets={"acme": {"key": "s3cret-key"}}) as one:
        await one.add(server.config(secret_environment={"TOKEN": "key"}))
        first = asyncio.create_task(one.run("fake.echo", {}))
        await logged(server, "get task-0")
    await asyncio.gather(first, return_exceptions=True)
    (tmp_path / "b").mkdir()
    async with mcp_registry(database_url, tmp_path / "b") as other:
        assert outcome(await other.run("fake.echo", {}, earlier_attempts=1)) == "UNKNOWN OUTCOME_UNKNOWN"
    assert begun(server) == 1


@pytest.mark.parametrize("effect", [call_pb2.EFFECT_CLASS_UNSPECIFIED, call_pb2.EFFECT_CLASS_READ_ONLY])
async def test_a_task_that_wants_a_page_opened_first_is_begun_once_it_is(
    mcp: McpRegistry, server: FakeServer, effect: Any
) -> None:
    await mcp.add(server.config(policies=[policy("*", category=SAFE, effect_class=effect)]))
    asked = await mcp.run("fake.log_in")
    assert "https://login.example.com/" in asked.question.question
    assert begun(server) == 0
    end(server)
    said = execution_pb2.Answer(question=asked.question.question, answer="done")
    assert content(await mcp.run("fake.log_in", answers=[said], earlier_attempts=1)) == "welcome"
    assert begun(server) == 1


@pytest.mark.parametrize(
    "effect",
    [call_pb2.EFFECT_CLASS_READ_ONLY, call_pb2.EFFECT_CLASS_IDEMPOTENT, call_pb2.EFFECT_CLASS_AT_MOST_ONCE],
)
async def test_a_server_that_dies_while_its_page_is_open_is_started_again(
    mcp: McpRegistry, server: FakeServer, effect: Any
) -> None:
    """It has done nothing: it wants the page first."""
    await mcp.add(server.config(policies=[policy("*", category=SAFE, effect_class=effect)]))
    asked = await mcp.run("fake.log_in")
    pids = [int(line.split()[1]) for line in server.log() if line.startswith("started")]
    os.kill(pids[-1], signal.SIGKILL)

    async def is_gone() -> bool:
        return mcp.open_count == 0

    await until(is_gone)
    end(server)
    said = execution_pb2.Answer(question=asked.question.question, answer="done")
    assert content(await mcp.run("fake.log_in", answers=[said], earlier_attempts=1)) == "welcome"
    assert begun(server) == 1


async def test_a_task_whose_page_nobody_opens_is_not_begun(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    asked = await mcp.run("fake.log_in")
    said = execution_pb2.Answer(question=asked.question.question, declined=True)
    refused = await mcp.run("fake.log_in", answers=[said], earlier_attempts=1)
    assert outcome(refused) == "FAILED TOOL_ERROR"
    assert "log in first" in failure(refused)
    assert begun(server) == 0


async def test_a_server_that_always_wants_another_page_is_not_asked_for_ever(
    mcp: McpRegistry, server: FakeServer
) -> None:
    (server.folder / "closed").touch()
    await mcp.add(server.config())
    result = await mcp.run("fake.log_in")
    answers: list[execution_pb2.Answer] = []
    while outcome(result) == "INPUT_REQUIRED":
        answers.append(execution_pb2.Answer(question=result.question.question, answer="done"))
        result = await mcp.run("fake.log_in", answers=answers, earlier_attempts=1)
    assert "it asked for more than 10 times before it answered" in failure(result)
    assert begun(server) == 0


UNKNOWN = "UNKNOWN OUTCOME_UNKNOWN"
TOO_LARGE = "FAILED RESULT_TOO_LARGE"


@pytest.mark.parametrize(
    ("fault", "expected", "asked"),
    [
        ("get die", UNKNOWN, 3),
        ("get busy", UNKNOWN, 3),
        ("get unknown", UNKNOWN, 1),
        ("get wrong", UNKNOWN, 1),
        ("get another", UNKNOWN, 1),
        ("get huge", TOO_LARGE, 1),
        ("result die", UNKNOWN, 3),
        ("result busy", UNKNOWN, 3),
        ("result unknown", UNKNOWN, 3),
        ("result wrong", UNKNOWN, 1),
        ("result another", UNKNOWN, 1),
        ("result huge", TOO_LARGE, 1),
    ],
)
async def test_a_task_that_cannot_be_followed_has_a_typed_end_and_no_second_effect(
    mcp: McpRegistry, server: FakeServer, fault: str, expected: str, asked: int
) -> None:
    method, kind = fault.split()
    end(server)
    put(server.folder / f"fault-{method}", kind)
    await mcp.add(server.config())
    assert outcome(await mcp.run("fake.echo", {}, timeout_seconds=60)) == expected
    assert server.log().count(f"{method} task-0") == asked
    assert begun(server) == 1


async def test_a_task_that_may_be_begun_again_is_not_begun_for_ever(mcp: McpRegistry, server: FakeServer) -> None:
    read_only = policy("*", category=SAFE, effect_class=call_pb2.EFFECT_CLASS_READ_ONLY)
    put(server.folder / "fault-get", "busy")
    await mcp.add(server.config(policies=[read_only]))
    failed = await mcp.run("fake.echo", {}, timeout_seconds=60)
    assert (outcome(failed), begun(server)) == ("FAILED TOOL_ERROR", 3)
    assert "come back later" in failure(failed)


async def test_a_server_that_cannot_answer_for_a_while_is_asked_again(mcp: McpRegistry, server: FakeServer) -> None:
    end(server)
    put(server.folder / "fault-result", "busy")
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {"city": "Oslo"}))
    await logged(server, "result task-0")
    (server.folder / "fault-result").unlink()
    assert content(await running) == '{"city": "Oslo"}'
    assert begun(server) == 1


async def test_a_task_that_is_too_large_to_be_looked_at_ends_its_call_also_beside_others(
    mcp: McpRegistry, server: FakeServer
) -> None:
    """The first time it could have been another call's fault; the second time it is alone on its connection."""
    put(server.folder / "fault-get", "huge")
    await mcp.add(server.config())
    beside = asyncio.create_task(mcp.run("fake.hang", call="beside", timeout_seconds=60))
    await logged(server, "call hang")
    running = asyncio.create_task(mcp.run("fake.echo", {}, timeout_seconds=60))
    assert outcome(await beside) == UNKNOWN
    later = asyncio.create_task(mcp.run("fake.hang", call="later", timeout_seconds=60))
    assert outcome(await running) == TOO_LARGE
    assert server.log().count("get task-0") == 2
    assert not later.done()
    await mcp.registry.cancel("later")
    await later


@pytest.mark.parametrize("said", [None, "soon", 7, {"taskId": 7}])
async def test_a_result_in_place_of_a_task_is_the_result_whatever_it_says_of_one(
    mcp: McpRegistry, server: FakeServer, said: Any
) -> None:
    """A server may do at once what it was asked to do as a task."""
    put(server.folder / "at_once", json.dumps({"content": [{"type": "text", "text": "done"}], "task": said}))
    await mcp.add(server.config())
    assert content(await mcp.run("fake.echo", {}, timeout_seconds=60)) == "done"


@pytest.mark.parametrize("task_id", ["", "a\nb", "x" * 20_000])
async def test_a_task_that_cannot_be_named_is_unknown(mcp: McpRegistry, server: FakeServer, task_id: str) -> None:
    put(server.folder / "task_id", json.dumps(task_id))
    await mcp.add(server.config())
    assert outcome(await mcp.run("fake.echo", {}, timeout_seconds=60)) == UNKNOWN


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"pollInterval": 0}, None),
        ({"pollInterval": -5}, None),
        ({"ttl": 10**400}, None),
        ({"pollInterval": 365 * 24 * 3600 * 1000}, "FAILED TOOL_TIMEOUT"),
        ({"pollInterval": 10**400}, "FAILED TOOL_TIMEOUT"),
        ({"pollInterval": "soon"}, UNKNOWN),
        ({"ttl": float("nan")}, UNKNOWN),
    ],
)
async def test_what_a_server_says_of_a_task_is_kept_within_limits(
    mcp: McpRegistry, server: FakeServer, said: dict[str, Any], expected: str | None
) -> None:
    put(server.folder / "fault-get", json.dumps(said))
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {}, timeout_seconds=2 if expected else 60))
    await logged(server, "get task-0", times=1 if expected else 3)
    if expected is None:
        (server.folder / "fault-get").unlink()
        end(server)
    assert outcome(await running) == (expected or "SUCCEEDED")
