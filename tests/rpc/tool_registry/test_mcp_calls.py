"""Calls of MCP tools on good and faulty servers, and questions that servers ask the user (TOOL-3, HITL-1)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from pawl.chassis.ids import StoreId
from pawl.errors import PawlError
from pawl.tool.v1 import execution_pb2
from tests.poll import put, until
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.mcp_world import (
    READ_ONLY,
    SAFE,
    UNKNOWN,
    FakeServer,
    McpRegistry,
    answer,
    failure,
    mcp_registry,
    policy,
)
from tests.rpc.tool_registry.registry import content, context, outcome, refusal

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
NAMES = (
    "echo note environment fail refuse hang die die_once flood say_nothing answer_others terminate huge brackets deep"
    " wrong progress kinds change garbage"
)


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    return FakeServer(tmp_path / "fake", NAMES.split())


async def test_server_gets_only_its_own_environment(
    mcp: McpRegistry, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_LEAK", "must not be seen")
    await mcp.add(server.config(environment={"CITY": "Oslo"}))
    seen: Mapping[str, str] = json.loads(content(await mcp.run("fake.environment")))
    assert set(seen) - {"LC_CTYPE"} == {"PATH", "HOME", "TMPDIR", "LANG", "CITY", "cwd"}
    assert seen["HOME"] == seen["TMPDIR"] == seen["cwd"] != str(Path.home())


@pytest.fixture
async def added(mcp: McpRegistry, server: FakeServer) -> FakeServer:
    await mcp.add(server.config())
    return server


@pytest.mark.parametrize(("stateless", "starts"), [(False, 3), (True, 2)])
async def test_users_share_a_process_only_if_the_server_is_stateless(
    mcp: McpRegistry, server: FakeServer, *, stateless: bool, starts: int
) -> None:
    await mcp.add(server.config(stateless=stateless))
    for user in ("ann", "bob", "ann"):
        await mcp.run("fake.note", call=f"{user}{server.starts}", who=context(user=user))
    assert server.starts == starts, "discovery had its own process"


async def test_all_kinds_of_answers_are_passed_on(mcp: McpRegistry, added: FakeServer) -> None:
    failed = await mcp.run("fake.fail")
    assert (outcome(failed), failure(failed)) == ("FAILED TOOL_ERROR", "no such city")
    left_out = {"note": "The bytes are left out, because models read text only."}
    kinds = {
        "content": [
            {"type": "text", "text": "words"},
            {"type": "image", "mimeType": "image/png", "bytes": 8} | left_out,
            {"type": "audio", "mimeType": "audio/wav", "bytes": 3} | left_out,
            {"type": "resource_link", "uri": "file:///a", "name": "a", "size": 3},
            {"type": "resource", "uri": "file:///b", "mimeType": "text/plain", "text": "b"},
            {"type": "resource", "uri": "file:///c", "mimeType": "x/y", "bytes": 3} | left_out,
        ],
        "structured": {"answer": 42, "big": str(2**70)},
    }
    assert content(await mcp.run("fake.kinds", call="three")) == kinds
    responses = [response async for response in mcp.registry.stream("fake.progress", call="five")]
    seen = [(one.progress.fraction, one.progress.message) for one in responses if one.HasField("progress")]
    assert (0.5, "step 2") in seen
    os.kill(added.process_id, 9)
    await until(lambda: mcp.open_count == 0)
    assert content(await mcp.run("fake.note", call="six")) == "noted", "it is restarted after a crash"


async def test_cancelled_or_timed_out_call_is_cancelled_at_the_server(mcp: McpRegistry, added: FakeServer) -> None:
    call = asyncio.create_task(mcp.run("fake.hang"))
    await added.logged("call hang")
    assert content(await mcp.run("fake.note", call="beside")) == "noted"
    assert (await mcp.registry.cancel()).stopped
    assert outcome(await call) == "CANCELLED CANCELLED"
    await added.logged("cancelled")
    _, result = await mcp.registry.run_out_of_time("fake.hang", call="late")
    assert "was asked to stop; it may keep running and may still take effect" in failure(result)
    await added.logged("cancelled", times=2)
    assert content(await mcp.run("fake.note", call="after")) == "noted"
    assert added.starts == 2, "the calls had one connection"


async def test_a_crashed_server_restarts_while_its_call_has_an_unknown_outcome(
    mcp: McpRegistry, added: FakeServer
) -> None:
    assert (outcome(await mcp.run("fake.die_once")), added.log().count("call die_once")) == (UNKNOWN, 1)
    assert content(await mcp.run("fake.note", call="two")) == "noted"
    # Over HTTP, the status shows that nothing ran. The text alone could also come after the effect.
    assert "Session terminated" in failure(await mcp.run("fake.terminate", call="four"))
    assert added.log().count("call terminate") == 1


async def test_a_programs_stderr_does_not_reach_logs_or_results(mcp: McpRegistry, server: FakeServer) -> None:
    with structlog.testing.capture_logs() as logged_events:
        await mcp.add(server.config(policies=[READ_ONLY]))
        result = await mcp.run("fake.die")
    assert "hello from the server" not in str(result)
    server_events = [event for event in logged_events if "hello from the server" in str(event)]
    assert {event["log_level"] for event in server_events} <= {"debug"}


async def test_an_unreadable_answer_becomes_a_bounded_and_typed_error(mcp: McpRegistry, added: FakeServer) -> None:
    for tool, expected in {
        "garbage": UNKNOWN,
        "huge": "FAILED RESULT_TOO_LARGE",
        "brackets": "FAILED RESULT_TOO_LARGE",
        "deep": "FAILED RESULT_TOO_LARGE",
        "wrong": UNKNOWN,
    }.items():
        assert outcome(await mcp.run(f"fake.{tool}", call=tool)) == expected, tool
        await mcp.connector.forget(StoreId("acme"), "fake")  # Otherwise the next start would be delayed


async def test_flooding_server_does_not_affect_others(mcp: McpRegistry, server: FakeServer, tmp_path: Path) -> None:
    other = FakeServer(tmp_path / "other", ["note"])
    await mcp.add(server.config())
    await mcp.add(other.config("other"))
    for tool in ("flood", "say_nothing", "answer_others"):
        flood = asyncio.create_task(mcp.run(f"fake.{tool}", call=tool, timeout_seconds=100))
        await server.logged(f"call {tool}")
        for number in range(5):
            assert content(await mcp.run("other.note", call=f"{tool}{number}")) == "noted"
        assert not flood.done()
        await mcp.connector.forget(StoreId("acme"), "fake")
        await flood


async def test_endless_tool_list_is_cut_off(mcp: McpRegistry, server: FakeServer) -> None:
    put(server.folder / "mode", "endless")
    await raises(PawlError, mcp.add(server.config()), match="its tool descriptions are larger than 16777216 bytes")


async def test_a_tool_change_that_the_server_announces_stops_the_tool_immediately(
    mcp: McpRegistry, added: FakeServer
) -> None:
    await mcp.run("fake.change", {"tool": "echo"})

    async def is_refused() -> bool:
        result = await mcp.run("fake.echo", call=f"call{os.urandom(3).hex()}")
        return bool(result.result.is_error) and "NOT_ALLOWED" in failure(result)

    await until(is_refused)
    assert content(await mcp.run("fake.note", call="two", traceparent=TRACEPARENT)) == "noted"
    assert f"traceparent {TRACEPARENT}" in (added.folder / "log").read_text()


async def test_replaced_configuration_applies_to_all_replicas_immediately(database_url: str, tmp_path: Path) -> None:
    server = FakeServer(tmp_path / "fake", ["environment"])
    async with (
        mcp_registry(database_url, tmp_path, name="a", idle_seconds=0.2) as one,
        mcp_registry(database_url, tmp_path, name="b") as two,
    ):
        await one.add(server.config(environment={"CITY": "Oslo"}))
        await until(lambda: one.open_count == 0)
        for registry, call in ((one, "0"), (two, "1")):
            assert json.loads(content(await registry.run("fake.environment", call=call)))["CITY"] == "Oslo"
        await one.add(server.config(environment={"CITY": "Bergen"}), replace=True)
        assert json.loads(content(await two.run("fake.environment", call="2")))["CITY"] == "Bergen"
        await one.remove()
        assert await refusal(two.run("fake.environment", call="3")) == "TOOL_NOT_FOUND"


@pytest.fixture
def asker(tmp_path: Path) -> FakeServer:
    return FakeServer(tmp_path / "fake", ["ask", "hang", "log_in", "note"])


@pytest.fixture
async def added_asker(mcp: McpRegistry, asker: FakeServer) -> FakeServer:
    await mcp.add(asker.config())
    return asker


def who(user: str) -> execution_pb2.CallContext:
    return context(user=user, run=f"of_{user}")


def secret_question(user: str) -> dict[str, Any]:
    page = {"mode": "url", "message": f"For {user} only.", "url": f"https://{user}.test/", "elicitationId": "1"}
    return {"asks": page}


@pytest.mark.parametrize(("policies", "times"), [([policy("*", category=SAFE)], 1), ([READ_ONLY], 2)])
async def test_the_users_answer_is_returned_to_the_call_that_asked(
    mcp: McpRegistry, asker: FakeServer, policies: list[Any], times: int
) -> None:
    await mcp.add(asker.config(policies=policies))
    asked = await mcp.run("fake.ask")
    assert (outcome(asked), asked.question.question) == ("INPUT_REQUIRED", "Which size?")
    done = await mcp.run("fake.ask", answers=[answer(asked, "large")])
    assert json.loads(content(done)) == {"action": "accept", "content": {"size": "large"}}
    assert asker.log().count("call ask") == times, "a repeatable call is run again from the start"


async def test_answer_is_checked_before_it_is_sent(mcp: McpRegistry, added_asker: FakeServer) -> None:
    schema = {"type": "object", "properties": {"count": {"type": "integer", "maximum": 5}}, "required": ["count"]}
    asked = await mcp.run("fake.ask", {"asks": {"message": "How many?", "requestedSchema": schema}})
    answer_schema_json = asked.question.answer_schema_json
    assert json.loads(answer_schema_json) == schema
    check = mcp.registry.execution.CheckAnswer
    for text in ("many", "6", "1.5"):
        request = execution_pb2.CheckAnswerRequest(answer_schema_json=answer_schema_json, answer=text)
        assert await refusal(check(request)) == "INVALID_ARGUMENTS"
    await check(execution_pb2.CheckAnswerRequest(answer_schema_json=answer_schema_json, answer="5"))


async def test_call_is_repeated_after_the_user_opens_the_required_page(
    mcp: McpRegistry, added_asker: FakeServer
) -> None:
    refused = await mcp.run("fake.log_in", call="refused")
    assert "https://login.example.com/" in refused.question.question
    await mcp.run("fake.log_in", call="refused", answers=[answer(refused, None)])
    assert added_asker.log().count("call log_in") == 1
    (added_asker.folder / "log").write_text("")
    assert content(await mcp.run("fake.log_in", answers=[answer(await mcp.run("fake.log_in"), "done")])) == "welcome"


async def test_questions_do_not_contain_server_secrets(mcp: McpRegistry, asker: FakeServer) -> None:
    await mcp.add(asker.config(secret_environment={"TOKEN": "token"}))
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "s3cret-token?"}}}
    asked = await mcp.run("fake.ask", {"asks": {"message": "Is it s3cret-token?", "requestedSchema": schema}})
    assert "[secret]" in asked.question.question
    assert "s3cret-token" not in str(asked)


async def test_cancelling_a_call_withdraws_its_question(mcp: McpRegistry, added_asker: FakeServer) -> None:
    await mcp.run("fake.ask")
    assert (await mcp.registry.cancel()).stopped
    await added_asker.logged("answer cancel")
    assert content(await mcp.run("fake.note", call="two")) == "noted"


async def test_questions_to_different_users_do_not_affect_each_other(mcp: McpRegistry, added_asker: FakeServer) -> None:
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


async def test_question_on_a_shared_connection_is_not_shown_to_any_user(mcp: McpRegistry, asker: FakeServer) -> None:
    await mcp.add(asker.config(stateless=True))
    assert json.loads(content(await mcp.run("fake.ask", secret_question("ann")))) == {"action": "decline"}


async def test_question_that_may_belong_to_another_conversation_is_declined(
    mcp: McpRegistry, added_asker: FakeServer
) -> None:
    elsewhere = context(run="elsewhere", conversation_id="elsewhere")
    other = asyncio.create_task(mcp.run("fake.hang", call="other", who=elsewhere, timeout_seconds=60))
    await added_asker.logged("call hang")
    assert json.loads(content(await mcp.run("fake.ask", secret_question("ann")))) == {"action": "decline"}
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
