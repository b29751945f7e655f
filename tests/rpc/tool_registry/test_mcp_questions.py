"""MCP servers ask the user in the middle of a call (TOOL-3, HITL-1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2
from pawl.tool_registry.adapters.mcp import pool
from tests.poll import until
from tests.rpc.tool_registry.mcp_world import SAFE, FakeServer, McpRegistry, failure, mcp_registry, policy
from tests.rpc.tool_registry.registry import content, context, outcome

READ_ONLY = [policy("*", category=SAFE, effect_class=call_pb2.EFFECT_CLASS_READ_ONLY)]
AT_MOST_ONCE = [policy("*", category=SAFE)]


@pytest.fixture
async def mcp(database_url: str, tmp_path: Path) -> AsyncIterator[McpRegistry]:
    async with mcp_registry(database_url, tmp_path, secrets={"acme": {"key": "s3cret-key"}}) as made:
        yield made


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    return FakeServer(tmp_path / "fake", ["ask", "hang", "log_in", "note"])


def answer(question: execution_pb2.ExecutionResult, text: str | None) -> execution_pb2.Answer:
    """What a person says to a question; None refuses."""
    return execution_pb2.Answer(question=question.question.question, answer=text or "", declined=text is None)


def got(result: execution_pb2.ExecutionResult) -> Any:
    """What the server got."""
    return json.loads(content(result))


def calls(server: FakeServer, line: str) -> int:
    return server.log().count(line)


async def logged(server: FakeServer, line: str) -> None:
    async def is_there() -> bool:
        return line in server.log()

    await until(is_there)


@pytest.mark.parametrize(("policies", "times"), [(AT_MOST_ONCE, 1), (READ_ONLY, 2)])
async def test_the_user_is_asked_and_the_answer_goes_back_into_the_call(
    mcp: McpRegistry, server: FakeServer, policies: list[Any], times: int
) -> None:
    await mcp.add(server.config(policies=policies))
    asked = await mcp.run("fake.ask")
    assert outcome(asked) == "INPUT_REQUIRED"
    assert asked.question.question == "Which size?"
    assert "MCP server of fake.ask" in asked.question.why
    done = await mcp.run("fake.ask", answers=[answer(asked, "large")])
    assert got(done) == {"action": "accept", "content": {"size": "large"}}
    assert calls(server, "call ask") == times, "one that may be repeated is run again from its start"


async def test_who_refuses_declines(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    asked = await mcp.run("fake.ask")
    assert got(await mcp.run("fake.ask", answers=[answer(asked, None)])) == {"action": "decline"}


async def test_an_answer_that_does_not_fit_is_asked_for_once_more(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config(policies=READ_ONLY))
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    arguments = {"asks": {"message": "How many?", "requestedSchema": schema}}
    first = await mcp.run("fake.ask", arguments)
    second = await mcp.run("fake.ask", arguments, answers=[answer(first, "many")])
    assert second.question.question.startswith("That does not fit: ")
    answers = [answer(first, "many"), answer(second, "3")]
    assert got(await mcp.run("fake.ask", arguments, answers=answers))["content"] == {"count": 3}


async def test_an_answer_is_checked_before_it_is_given(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    schema = {"type": "object", "properties": {"count": {"type": "integer", "maximum": 5}}, "required": ["count"]}
    asked = await mcp.run("fake.ask", {"asks": {"message": "How many?", "requestedSchema": schema}})
    answer_schema_json = asked.question.answer_schema_json
    assert json.loads(answer_schema_json) == schema
    for text in ("many", "6", "1.5"):
        request = execution_pb2.CheckAnswerRequest(answer_schema_json=answer_schema_json, answer=text)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mcp.registry.execution.CheckAnswer(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(refused.value.details()).startswith("the answer does not fit: ")
    await mcp.registry.execution.CheckAnswer(
        execution_pb2.CheckAnswerRequest(answer_schema_json=answer_schema_json, answer="5")
    )
    await mcp.registry.cancel()


async def test_an_answer_that_takes_long_to_check_holds_up_nobody_else(mcp: McpRegistry) -> None:
    """Whoever wrote the schema, and whoever answers."""
    numbers = {"oneOf": [{"not": {"minimum": least}} for least in range(50)]}
    defs = {"numbers": numbers, "more": {"oneOf": [{"$ref": "#/$defs/numbers"}] * 20}}
    properties = {"a": {"type": "array", "items": {"$ref": "#/$defs/more"}}, "b": {"type": "string"}}
    request = execution_pb2.CheckAnswerRequest(
        store_id="acme",
        answer_schema_json=json.dumps({"type": "object", "properties": properties, "$defs": defs}).encode(),
        answer=json.dumps({"a": [-1] * 15_000}),
    )
    checking = asyncio.ensure_future(mcp.registry.execution.CheckAnswer(request, timeout=60))
    listed = 0
    while not checking.done():
        await mcp.listed()
        listed += 1
    with pytest.raises(grpc.aio.AioRpcError, match="it takes too long to be checked") as refused:
        await checking
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert listed > 5


async def test_a_page_to_open_is_shown(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    url = "https://login.example.com/?state=1"
    page = {"mode": "url", "message": "Log in first.", "url": url, "elicitationId": "e1"}
    asked = await mcp.run("fake.ask", {"asks": page})
    assert url in asked.question.question
    assert got(await mcp.run("fake.ask", {"asks": page}, answers=[answer(asked, "done")])) == {"action": "accept"}


async def test_a_call_that_wants_a_page_opened_first_is_made_again_once_it_is(
    mcp: McpRegistry, server: FakeServer
) -> None:
    await mcp.add(server.config())
    asked = await mcp.run("fake.log_in")
    assert "Log in." in asked.question.question
    assert "https://login.example.com/" in asked.question.question
    assert content(await mcp.run("fake.log_in", answers=[answer(asked, "done")])) == "welcome"


async def test_a_page_that_nobody_opens_is_an_error_in_the_words_of_the_server(
    mcp: McpRegistry, server: FakeServer
) -> None:
    await mcp.add(server.config())
    asked = await mcp.run("fake.log_in")
    assert "log in first" in failure(await mcp.run("fake.log_in", answers=[answer(asked, None)]))
    assert calls(server, "call log_in") == 1


async def test_secrets_of_the_server_are_not_in_its_questions(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config(secret_environment={"TOKEN": "key"}))
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "s3cret-key?"}}}
    asked = await mcp.run("fake.ask", {"asks": {"message": "Is it s3cret-key?", "requestedSchema": schema}})
    assert "[secret]" in asked.question.question
    assert "s3cret-key" not in str(asked)
    await mcp.registry.cancel()


async def test_time_stands_still_while_the_user_is_asked(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    asked = await mcp.run("fake.ask", timeout_seconds=5)
    await asyncio.sleep(5.1)
    assert outcome(await mcp.run("fake.ask", answers=[answer(asked, "large")])) == "SUCCEEDED"


async def test_a_call_that_is_cancelled_takes_its_question_back(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    await mcp.run("fake.ask")
    assert (await mcp.registry.cancel()).stopped
    await logged(server, "answer cancel")
    assert content(await mcp.run("fake.note", call="two")) == "noted"


async def test_a_server_that_does_not_wait_for_the_answer_ends_the_call(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    result = await mcp.run("fake.ask", {"forgets": True})
    if outcome(result) == "INPUT_REQUIRED":
        result = await mcp.run("fake.ask", {"forgets": True}, answers=[answer(result, "large")])
    assert content(result) == "never mind"


def who(user: str) -> execution_pb2.CallContext:
    return context(user=user, run=f"of_{user}")


def secret_question(user: str) -> dict[str, Any]:
    """A question that only one user may read."""
    page = {"mode": "url", "message": f"For {user} only.", "url": f"https://{user}.test/", "elicitationId": "1"}
    return {"asks": page}


async def test_each_user_is_asked_while_questions_of_others_are_open(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    users = ["ann", "bob", "eve"]
    asked = {}
    for user in users:
        asked[user] = await mcp.run("fake.ask", secret_question(user), call=user, who=who(user))
        assert outcome(asked[user]) == "INPUT_REQUIRED"
        assert [other for other in users if f"For {other} only." in str(asked[user])] == [user]
    for user in reversed(users):
        done = await mcp.run(
            "fake.ask", secret_question(user), call=user, who=who(user), answers=[answer(asked[user], "done")]
        )
        assert content(done) == '{"action": "accept"}'


async def test_a_user_is_asked_by_several_calls_at_once(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    asked = {name: await mcp.run("fake.ask", call=name) for name in ("a", "b")}
    for name in ("b", "a"):
        done = await mcp.run("fake.ask", call=name, answers=[answer(asked[name], name)])
        assert got(done)["content"] == {"size": name}


async def test_calls_of_others_go_on_while_a_question_is_open(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    await mcp.run("fake.ask", call="open")
    assert content(await mcp.run("fake.note", call="two", who=who("bob"))) == "noted"
    await mcp.registry.cancel("open")


async def test_one_user_cannot_hold_all_connections(
    mcp: McpRegistry, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SESSIONS_OF_USER_MAX", 2)
    await mcp.add(server.config())
    calls = ["first", "second", "third"]
    asked = [await mcp.run("fake.ask", call=call) for call in calls]
    assert [outcome(one) for one in asked] == ["INPUT_REQUIRED", "INPUT_REQUIRED", "FAILED TOOL_ERROR"]
    assert "2 connections of this user are in use" in failure(asked[2])
    assert outcome(await mcp.run("fake.ask", call="of_bob", who=who("bob"))) == "INPUT_REQUIRED"


async def test_a_question_that_may_be_of_another_call_reaches_nobody(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    other = asyncio.create_task(mcp.run("fake.hang", call="of_bob", who=who("bob"), timeout_seconds=60))
    await logged(server, "call hang")
    result = content(await mcp.run("fake.ask", secret_question("ann")))
    assert "decline" in str(result["result"])
    assert "nobody was asked" in result["note"]
    await mcp.registry.cancel("of_bob", user="bob", run="of_bob")
    assert "For ann only." not in str(await other)
    # From now on it is known to ask, so each call has a connection of its own.
    assert outcome(await mcp.run("fake.ask", secret_question("ann"), call="again")) == "INPUT_REQUIRED"


async def test_a_call_that_may_be_repeated_is_asked_on_a_connection_of_its_own(
    mcp: McpRegistry, server: FakeServer
) -> None:
    await mcp.add(server.config(policies=READ_ONLY))
    other = asyncio.create_task(mcp.run("fake.hang", call="of_bob", who=who("bob"), timeout_seconds=60))
    await logged(server, "call hang")
    assert outcome(await mcp.run("fake.ask")) == "INPUT_REQUIRED"
    await mcp.registry.cancel("of_bob", user="bob", run="of_bob")
    await other


async def test_a_call_that_was_left_is_not_taken_for_the_one_under_way(mcp: McpRegistry, server: FakeServer) -> None:
    """The server may still be at it, and what it asks then is not for somebody else."""
    await mcp.add(server.config())
    left = asyncio.create_task(mcp.run("fake.hang", call="1", who=who("bob"), timeout_seconds=60))
    await logged(server, "call hang")
    await mcp.registry.cancel("1", user="bob", run="of_bob")
    assert outcome(await left) == "CANCELLED CANCELLED"
    assert "nobody was asked" in content(await mcp.run("fake.ask", call="2"))["note"]
    # From now on it is known to ask, so the next one has a connection of its own.
    asked = await mcp.run("fake.ask", call="3")
    assert outcome(asked) == "INPUT_REQUIRED"
    assert got(await mcp.run("fake.ask", call="3", answers=[answer(asked, "s")]))["action"] == "accept"


async def test_users_are_asked_one_after_the_other_by_calls_that_are_run_again(
    mcp: McpRegistry, server: FakeServer
) -> None:
    await mcp.add(server.config(policies=READ_ONLY))
    for user in ("ann", "bob", "ann"):
        caller = context(user=user, run=f"of_{user}_{len(server.log())}")
        asked = await mcp.run("fake.ask", who=caller)
        assert outcome(asked) == "INPUT_REQUIRED"
        done = await mcp.run("fake.ask", who=caller, answers=[answer(asked, user)])
        assert got(done)["content"] == {"size": user}


async def test_what_cannot_be_asked_goes_to_the_model(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    told = failure(await mcp.run("fake.ask", {"asks": {"message": "Which?", "requestedSchema": schema}}))
    assert "Which?" in told
    assert "It was declined because" in told
    assert "ask_user" in told
