"""MCP servers ask the user in the middle of a call (TOOL-3, HITL-1)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pawl.tool.v1 import execution_pb2
from tests.rpc.tool_registry.mcp_world import READ_ONLY, SAFE, FakeServer, McpRegistry, answer, policy
from tests.rpc.tool_registry.registry import content, context, outcome, refusal


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    return FakeServer(tmp_path / "fake", ["ask", "hang", "log_in", "note"])


def who(user: str) -> execution_pb2.CallContext:
    return context(user=user, run=f"of_{user}")


def secret_question(user: str) -> dict[str, Any]:
    """A question that only one user may read."""
    page = {"mode": "url", "message": f"For {user} only.", "url": f"https://{user}.test/", "elicitationId": "1"}
    return {"asks": page}


@pytest.mark.parametrize(("policies", "times"), [([policy("*", category=SAFE)], 1), ([READ_ONLY], 2)])
async def test_the_user_is_asked_and_the_answer_goes_back_into_the_call(
    mcp: McpRegistry, server: FakeServer, policies: list[Any], times: int
) -> None:
    await mcp.add(server.config(policies=policies))
    asked = await mcp.run("fake.ask")
    assert (outcome(asked), asked.question.question) == ("INPUT_REQUIRED", "Which size?")
    done = await mcp.run("fake.ask", answers=[answer(asked, "large")])
    assert json.loads(content(done)) == {"action": "accept", "content": {"size": "large"}}
    assert server.log().count("call ask") == times, "one that may be repeated is run again from its start"


async def test_an_answer_is_checked_before_it_is_given(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    schema = {"type": "object", "properties": {"count": {"type": "integer", "maximum": 5}}, "required": ["count"]}
    asked = await mcp.run("fake.ask", {"asks": {"message": "How many?", "requestedSchema": schema}})
    answer_schema_json = asked.question.answer_schema_json
    assert json.loads(answer_schema_json) == schema
    check = mcp.registry.execution.CheckAnswer
    for text in ("many", "6", "1.5"):
        request = execution_pb2.CheckAnswerRequest(answer_schema_json=answer_schema_json, answer=text)
        assert await refusal(check(request)) == "INVALID_ARGUMENTS"
    await check(execution_pb2.CheckAnswerRequest(answer_schema_json=answer_schema_json, answer="5"))


async def test_a_call_that_wants_a_page_opened_first_is_made_again_once_it_is(
    mcp: McpRegistry, server: FakeServer
) -> None:
    await mcp.add(server.config())
    refused = await mcp.run("fake.log_in", call="refused")
    assert "https://login.example.com/" in refused.question.question
    await mcp.run("fake.log_in", call="refused", answers=[answer(refused, None)])
    assert server.log().count("call log_in") == 1
    (server.folder / "log").write_text("")
    asked = await mcp.run("fake.log_in")
    assert content(await mcp.run("fake.log_in", answers=[answer(asked, "done")])) == "welcome"


async def test_secrets_of_the_server_are_not_in_its_questions(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config(secret_environment={"TOKEN": "token"}))
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "s3cret-token?"}}}
    asked = await mcp.run("fake.ask", {"asks": {"message": "Is it s3cret-token?", "requestedSchema": schema}})
    assert "[secret]" in asked.question.question
    assert "s3cret-token" not in str(asked)


async def test_a_call_that_is_cancelled_takes_its_question_back(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    await mcp.run("fake.ask")
    assert (await mcp.registry.cancel()).stopped
    await server.logged("answer cancel")
    assert content(await mcp.run("fake.note", call="two")) == "noted"


async def test_each_user_is_asked_while_questions_of_others_are_open(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    users = ["ann", "bob", "eve"]
    asked = {}
    for user in users:
        asked[user] = await mcp.run("fake.ask", secret_question(user), call=user, who=who(user))
        assert outcome(asked[user]) == "INPUT_REQUIRED"
        assert [other for other in users if f"For {other} only." in str(asked[user])] == [user]
    for user in reversed(users):
        said = [answer(asked[user], "done")]
        done = await mcp.run("fake.ask", secret_question(user), call=user, who=who(user), answers=said)
        assert content(done) == '{"action": "accept"}'


async def test_a_question_on_a_connection_of_all_users_reaches_none(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config(stateless=True))
    result = await mcp.run("fake.ask", secret_question("ann"))
    assert json.loads(content(result)) == {"action": "decline"}


async def test_a_question_that_may_be_of_another_conversation_is_declined(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    elsewhere = context(run="elsewhere")
    elsewhere.conversation_id = "elsewhere"
    other = asyncio.create_task(mcp.run("fake.hang", call="other", who=elsewhere, timeout_seconds=60))
    await server.logged("call hang")
    result = await mcp.run("fake.ask", secret_question("ann"))
    assert json.loads(content(result)) == {"action": "decline"}
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
