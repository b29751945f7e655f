"""The AG-UI door of a whole suite, spoken to as front ends do."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests import npm
from tests.keys import LOCAL_KEY
from tests.tidy.tree import ROOT
from tests.unit.gateway.agui_page import Page

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAIL = "e-mail ann@example.com about lunch: see you at noon"
PACKAGES = ROOT / "tests/system/suite/agui"
PLAN = {"name": "show_plan", "description": "Shows the plan.", "parameters": {"type": "object", "properties": {}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[httpx2.AsyncClient]:
    with tempfile.TemporaryDirectory(prefix="pawl-agui-") as folder:
        async with Suite(SuiteOptions(data=Path(folder), local_key=LOCAL_KEY)) as suite:
            url = f"http://{suite.endpoints.services['gateway'][0].http}"
            headers = {"authorization": f"Bearer {LOCAL_KEY}"}
            async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60.0) as door:
                yield door


class Thread:
    """A thread of a front end, of either generation."""

    def __init__(self, door: httpx2.AsyncClient, name: str, *, legacy: bool = False) -> None:
        self.door, self.name, self.legacy = door, name, legacy
        self.page = Page()
        self.runs = 0

    async def ask(self, text: str = "", **more: Any) -> list[dict[str, Any]]:
        """Send what there is, with a message more if there is a text, and return what came."""
        self.runs += 1
        if text:
            self.page.messages.append({"id": f"{self.name}-u{self.runs}", "role": "user", "content": text})
        return [event async for event in self.stream(f"{self.name}-r{self.runs}", **more)]

    async def stream(self, run_id: str, **more: Any) -> AsyncIterator[dict[str, Any]]:
        body = self.body(run_id, **more)
        self.page.begin()
        async with self.door.stream("POST", "/agui", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    self.page.take(event)
                    yield event
        assert self.page.ended

    def body(self, run_id: str, **more: Any) -> dict[str, Any]:
        version = {} if self.legacy else {"protocolVersion": "1.0"}
        body = {"threadId": self.name, "runId": run_id, "messages": self.page.messages, "tools": [], "context": []}
        return body | version | more


@pytest.mark.parametrize("legacy", [False, True])
async def test_a_front_end_asks_and_is_answered(door: httpx2.AsyncClient, legacy: bool) -> None:
    thread = Thread(door, f"first-{legacy}", legacy=legacy)
    events = await thread.ask("what is 17 * 23", state={"place": 1})
    assert events[0]["type"] == "RUN_STARTED"
    assert {"type": "STATE_SNAPSHOT", "snapshot": {"place": 1}} in events
    assert [each["content"] for each in thread.page.of("assistant")] == ["Let me do that.", "17 * 23 = 391."]
    assert [json.loads(each["content"])["result"] for each in thread.page.of("tool")] == [391]
    assert thread.page.of("assistant")[0]["toolCalls"][0]["function"]["name"] == "calculate"
    assert events[-1].get("outcome") == (None if legacy else {"type": "success"})
    assert ("usage" in events[-1]) is not legacy
    again = Thread(door, thread.name, legacy=legacy)
    await again.ask()
    assert [each["content"] for each in again.page.messages] == [each["content"] for each in thread.page.messages]
    assert [each["id"] for each in again.page.of("assistant")] == [each["id"] for each in thread.page.of("assistant")]
    await thread.ask("what is 2 * 3")
    assert "6" in thread.page.of("assistant")[-1]["content"]


async def test_an_approval_is_an_interrupt_and_its_resume_goes_on(door: httpx2.AsyncClient) -> None:
    thread = Thread(door, "approval")
    events = await thread.ask(MAIL)
    (interrupt,) = events[-1]["outcome"]["interrupts"]
    assert interrupt["reason"] == "tool_call"
    assert interrupt["toolCallId"] == thread.page.of("assistant")[0]["toolCalls"][0]["id"]
    assert interrupt["expiresAt"]
    assert events[-2]["type"] == "MESSAGES_SNAPSHOT"
    assert [each["id"] for each in thread.page.of("user")] == ["approval-u1"]
    for resume, status, why in (
        ([{"interruptId": "call_nope.1", "status": "resolved", "payload": {"approved": True}}], 400, "INVALID_FIELD"),
        ([{"interruptId": interrupt["id"], "status": "resolved", "payload": {"approved": 1}}], 400, "INVALID_FIELD"),
        ([{"interruptId": interrupt["id"], "status": "maybe"}], 400, "INVALID_FIELD"),
        ([{"interruptId": f"{interrupt['toolCallId']}.0", "status": "cancelled"}], 400, "DIGEST_MISMATCH"),
    ):
        answer = await door.post("/agui", json=thread.body("wrong", resume=resume))
        assert (answer.status_code, reason(answer)) == (status, why), answer.text
    busy = thread.body("busy", messages=[{"id": "new", "role": "user", "content": "and?"}])
    assert reason(await door.post("/agui", json=busy)) == "CONVERSATION_BUSY"
    payload = {"approved": True, "editedArgs": {"to": ["bob@example.com"], "subject": "lunch", "body": "at one"}}
    said = await thread.ask(resume=[{"interruptId": interrupt["id"], "status": "resolved", "payload": payload}])
    assert said[-1]["outcome"] == {"type": "success"}
    kinds = [event["type"] for event in said]
    assert kinds.index("MESSAGES_SNAPSHOT") < kinds.index("TOOL_CALL_RESULT")
    assert [each["id"] for each in thread.page.of("user")] == ["approval-u1"]
    assert "bob@example.com" in thread.page.of("assistant")[0]["toolCalls"][0]["function"]["arguments"]
    assert len(thread.page.of("tool")) == 1
    assert len({each["id"] for each in thread.page.messages}) == len(thread.page.messages)
    late = await thread.ask(resume=[{"interruptId": interrupt["id"], "status": "cancelled"}])
    assert late[-1]["type"] == "RUN_FINISHED"


async def test_a_run_may_be_resumed_under_its_own_id_as_often_as_it_is_interrupted(door: httpx2.AsyncClient) -> None:
    """As CopilotKit does."""
    thread = Thread(door, "one-id", legacy=True)
    events = await thread.ask(f"{MAIL}, then {MAIL.replace('ann', 'bob')}, then {MAIL.replace('ann', 'eve')}")
    (first,) = events[-1]["outcome"]["interrupts"]
    wrong = [{"interruptId": first["id"], "status": "resolved", "payload": {"approved": True, "editedArgs": {"to": 3}}}]
    refused = await door.post("/agui", json=thread.body("one-id-r1", resume=wrong))
    assert reason(refused) == "INVALID_ARGUMENTS"
    for _ in range(3):
        (interrupt,) = events[-1]["outcome"]["interrupts"]
        resume = [{"interruptId": interrupt["id"], "status": "resolved", "payload": {"approved": True}}]
        events = [event async for event in thread.stream("one-id-r1", resume=resume)]
    assert "outcome" not in events[-1]
    assert len(thread.page.of("tool")) == 3


async def test_what_is_rejected_does_not_run(door: httpx2.AsyncClient) -> None:
    thread = Thread(door, "rejection", legacy=True)
    (interrupt,) = (await thread.ask(MAIL))[-1]["outcome"]["interrupts"]
    payload = {"approved": False, "reason": "not now"}
    await thread.ask(resume=[{"interruptId": interrupt["id"], "status": "resolved", "payload": payload}])
    (told,) = thread.page.of("tool")
    assert "not now" in told["content"]


async def test_a_question_is_answered(door: httpx2.AsyncClient) -> None:
    thread = Thread(door, "question")
    (interrupt,) = (await thread.ask("ask me whether to go on"))[-1]["outcome"]["interrupts"]
    assert interrupt["reason"] == "input_required"
    again = Thread(door, thread.name)
    assert (await again.ask())[-1]["outcome"]["interrupts"] == [interrupt]
    answer = {"interruptId": interrupt["id"], "status": "resolved", "payload": {"answer": "yes"}}
    assert (await thread.ask(resume=[answer]))[-1]["outcome"] == {"type": "success"}
    assert "yes" in thread.page.of("tool")[0]["content"]


@pytest.mark.parametrize("legacy", [False, True])
async def test_a_tool_of_the_page_is_run_by_the_page(door: httpx2.AsyncClient, legacy: bool) -> None:
    thread = Thread(door, f"tools-{legacy}", legacy=legacy)
    events = await thread.ask("show me the plan", tools=[PLAN])
    (call,) = thread.page.of("assistant")[-1]["toolCalls"]
    assert events[-1].get("outcome") == (None if legacy else {"type": "success", "pendingToolCallIds": [call["id"]]})
    thread.page.messages.append({"id": "mine", "role": "tool", "toolCallId": call["id"], "content": "shown it is"})
    await thread.ask(tools=[PLAN])
    assert [each["id"] for each in thread.page.of("tool")] == ["mine"]
    assert thread.page.of("assistant")[-1]["content"]
    assert thread.page.messages[-1]["role"] == "assistant"


async def test_a_reload_in_mid_run_shows_the_same_text(door: httpx2.AsyncClient) -> None:
    thread = Thread(door, "reload")
    thread.page.messages.append({"id": "u1", "role": "user", "content": "tell me a long story slowly"})
    other, seen = Thread(door, "reload"), 0
    async for event in thread.stream("r1"):
        seen += event["type"] == "TEXT_MESSAGE_CONTENT"
        if seen == 3 and not other.runs:
            await other.ask()
    assert other.page.of("assistant") == thread.page.of("assistant")
    assert len(thread.page.of("assistant")) == 1


async def test_who_leaves_may_come_back_and_nothing_is_said_twice(door: httpx2.AsyncClient) -> None:
    thread = Thread(door, "leaving")
    thread.page.messages.append({"id": "u1", "role": "user", "content": "tell me a long story slowly"})
    async with door.stream("POST", "/agui", json=thread.body("r1")) as answer:
        async for line in answer.aiter_lines():
            if "TEXT_MESSAGE_CONTENT" in line:
                break
    events = await thread.ask()  # the same message, another run: the one that is open
    assert events[-1]["outcome"] == {"type": "success"}
    assert len(thread.page.of("assistant")) == 1
    runs = await door.post("/rpc/pawl.agent.v1.AgentService/ListRuns", json={"conversationId": conversation(events)})
    assert len(runs.json()["runs"]) == 1


async def test_a_front_end_may_stop_its_run(door: httpx2.AsyncClient) -> None:
    thread = Thread(door, "stopping")
    thread.page.messages.append({"id": "u1", "role": "user", "content": "tell me a long story very slowly"})
    wish = {"pawl": {"onDisconnect": "cancel"}}
    async with door.stream("POST", "/agui", json=thread.body("r1", forwardedProps=wish)) as answer:
        async for line in answer.aiter_lines():
            if "TEXT_MESSAGE_CONTENT" in line:
                break
    stopped = Thread(door, "stopping")
    events = await stopped.ask()
    run_id = next(each["value"]["runId"] for each in events if each.get("name") == "pawl.run")
    answer = await door.post("/rpc/pawl.agent.v1.AgentService/GetRun", json={"runId": run_id, "waitSeconds": 20})
    assert answer.json()["run"]["state"] == "RUN_STATE_CANCELLED"


async def test_who_goes_when_all_is_told_stops_nothing(door: httpx2.AsyncClient) -> None:
    """A front end may close its connection with the last event, when the run waits for its user."""
    thread, events = Thread(door, "going"), list[dict[str, Any]]()
    thread.page.messages.append({"id": "u1", "role": "user", "content": MAIL})
    wish = {"pawl": {"onDisconnect": "cancel"}}
    async with door.stream("POST", "/agui", json=thread.body("r1", forwardedProps=wish)) as answer:
        async for line in answer.aiter_lines():
            events += [json.loads(line[6:])] if line.startswith("data: ") else []
            if "RUN_FINISHED" in line:
                break
    run_id = next(each["value"]["runId"] for each in events if each.get("name") == "pawl.run")
    answer = await door.post("/rpc/pawl.agent.v1.AgentService/GetRun", json={"runId": run_id, "waitSeconds": 2})
    assert answer.json()["run"]["state"] == "RUN_STATE_WAITING"


async def test_a_stopped_run_says_so_in_both_generations(door: httpx2.AsyncClient) -> None:
    for legacy in (False, True):
        thread = Thread(door, f"stopped-{legacy}", legacy=legacy)
        thread.page.messages.append({"id": "u1", "role": "user", "content": "tell me a long story very slowly"})
        last: dict[str, Any] = {}
        async for event in thread.stream("r1"):
            if event.get("name") == "pawl.run":
                stop = {"requestId": f"stop-{legacy}", "runId": event["value"]["runId"]}
                assert (await door.post("/rpc/pawl.agent.v1.AgentService/CancelRun", json=stop)).status_code == 200
            last = event
        assert (last["type"], last.get("outcome"), last.get("code")) == (
            ("RUN_ERROR", None, "CANCELLED") if legacy else ("RUN_FINISHED", {"type": "cancelled"}, None)
        )


async def test_a_thread_is_stopped_by_its_name(door: httpx2.AsyncClient) -> None:
    thread = Thread(door, "stopped-by-name")
    thread.page.messages.append({"id": "u1", "role": "user", "content": "tell me a long story very slowly"})
    stop, events, statuses = {"threadId": thread.name}, list[dict[str, Any]](), list[int]()
    async for event in thread.stream("r1"):
        events.append(event)
        if event["type"] == "TEXT_MESSAGE_CONTENT" and not statuses:
            run_id = next(each["value"]["runId"] for each in events if each.get("name") == "pawl.run")
            for named in ("run_nope", run_id, ""):
                answer = await door.post("/agui/cancel", json=stop | ({"runId": named} if named else {}))
                statuses.append(answer.status_code)
                assert answer.is_error or answer.json()["run"]["runId"] == run_id
    assert statuses[:2] == [404, 200]
    assert events[-1]["outcome"] == {"type": "cancelled"}
    for wrong, status, why in (
        (stop, 404, "RUN_NOT_FOUND"),
        ({"threadId": "never"}, 404, "RUN_NOT_FOUND"),
        ({}, 400, "INVALID_FIELD"),
        ({"threadId": ""}, 400, "INVALID_FIELD"),
        (stop | {"nope": 1}, 400, "INVALID_FIELD"),
    ):
        answer = await door.post("/agui/cancel", json=wrong)
        assert (answer.status_code, reason(answer)) == (status, why), answer.text


async def test_calls_are_shown_while_they_are_written(door: httpx2.AsyncClient) -> None:
    thread = Thread(door, "drafts")
    events = await thread.ask("what is 17 * 23", forwardedProps={"pawl": {"drafts": True}})
    shown, pieces = list[str](), list[str]()
    for event in events:
        for call in event.get("content", {}).get("calls", ()) if event["type"] == "ACTIVITY_SNAPSHOT" else ():
            shown.append(call["toolName"])
            pieces += call["arguments"]
        pieces += [each["value"] for each in event.get("patch", ()) if each["path"].endswith("/arguments/-")]
    assert shown == ["calculate"]
    assert "".join(pieces) == thread.page.of("assistant")[0]["toolCalls"][0]["function"]["arguments"]
    assert [each["content"] for each in thread.page.of("activity")] == [{"calls": []}]


async def test_the_page_says_what_it_shows(door: httpx2.AsyncClient) -> None:
    thread = Thread(door, "context")
    context = [{"description": "The open page", "value": "the plan of May"}]
    events = await thread.ask("what is 1 + 1", context=context)
    asked = {"conversationId": conversation(events)}
    said = (await door.post("/rpc/pawl.agent.v1.AgentService/ListMessages", json=asked)).json()["messages"][0]
    assert "The open page: the plan of May" in said["text"]
    again = Thread(door, "context")
    await again.ask()
    assert again.page.of("user")[0]["content"] == "what is 1 + 1"


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """The published clients, as the lock has them, in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="pawl-agui-node-") as folder:
        npm.install(PACKAGES, Path(folder), timeout_seconds=100)
        yield Path(folder)


@pytest.mark.parametrize("client", ["agui-1.0", "agui-0.0"])
async def test_the_published_clients_talk_to_it_as_they_are(
    door: httpx2.AsyncClient, packages: Path, client: str
) -> None:
    driven = await asyncio.create_subprocess_exec(
        npm.NODE,
        "drive.mjs",
        client,
        f"{door.base_url}".rstrip("/") + "/agui",
        LOCAL_KEY,
        cwd=packages,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await driven.communicate()
    assert driven.returncode == 0, errors.decode()
    told = json.loads(out)
    assert told["sum"][0] == ["user", "what is 17 * 23"]
    assert told["sum"][-1] == ["assistant", "17 * 23 = 391."]
    assert [role for role, _ in told["sum"]] == ["user", "reasoning", "assistant", "tool", "reasoning", "assistant"]
    assert told["reload"] == told["sum"]
    assert told["interrupt"] == "tool_call"
    assert [role for role, _ in told["mail"]].count("tool") == 1
    assert told["mail"][-1][0] == "assistant"
    assert told["tool"] == "show_plan"
    assert [text for role, text in told["shown"] if role == "tool"] == ['"it is shown"']
    assert told["shown"][-1][0] == "assistant"
    assert told["refused"].count("CONVERSATION_BUSY") == 1


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"threadId": ""}, 400, "INVALID_FIELD"),
    ({"threadId": "x" * 201}, 400, "INVALID_FIELD"),
    ({"runId": 3}, 400, "INVALID_FIELD"),
    ({"messages": None}, 400, "INVALID_FIELD"),
    ({"messages": [{"role": "user"}]}, 400, "INVALID_FIELD"),
    ({"messages": [{"id": "1", "role": "user", "content": 3}]}, 400, "INVALID_FIELD"),
    ({"messages": [{"id": "1", "role": "user", "content": [{"type": "audio"}]}]}, 400, "INVALID_FIELD"),
    ({"messages": [{"id": "1", "role": "user", "content": ""}]}, 400, "INVALID_FIELD"),
    ({"tools": [{"name": "x", "parameters": 3}]}, 400, "INVALID_FIELD"),
    ({"tools": [{"name": "no name"}]}, 400, "INVALID_FIELD"),
    ({"tools": [{"name": "calculate"}]}, 409, "TOOL_EXISTS"),
    ({"resume": [{"interruptId": "call_1.2", "status": "resolved"}]}, 404, "CALL_NOT_FOUND"),
    ({"forwardedProps": {"pawl": {"onDisconnect": "explode"}}}, 400, "INVALID_FIELD"),
    ({"forwardedProps": {"pawl": {"nope": 1}}}, 400, "INVALID_FIELD"),
    ({"forwardedProps": {"pawl": {"drafts": True}}}, 400, "INVALID_FIELD"),
    ({"forwardedProps": {"pawl": {"drafts": 1}}, "protocolVersion": "1.0"}, 400, "INVALID_FIELD"),
    ({"forwardedProps": {"pawl": {"agent": "nobody"}}}, 404, "AGENT_NOT_FOUND"),
]


@pytest.mark.parametrize(("wrong", "status", "why"), BAD, ids=[str(bad[0])[:40] for bad in BAD])
async def test_a_bad_request_is_refused_and_does_nothing(
    door: httpx2.AsyncClient, wrong: dict[str, Any], status: int, why: str
) -> None:
    body = {"threadId": "bad", "runId": "r", "messages": [{"id": "1", "role": "user", "content": "never"}]} | wrong
    answer = await door.post("/agui", json=body)
    assert (answer.status_code, reason(answer)) == (status, why), answer.text
    assert answer.json()["message"]
    assert "never" not in (await door.post("/rpc/pawl.agent.v1.AgentService/ListRuns", json={})).text


async def test_the_door_has_the_rules_of_all_doors(door: httpx2.AsyncClient) -> None:
    body = {"threadId": "bad", "runId": "r", "messages": []}
    for headers, status in (
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic x"}, 400),
        ({"host": "evil.com"}, 421),
        ({"content-type": "text/plain"}, 400),
    ):
        answer = await door.post(
            "/agui", content=json.dumps(body), headers={"content-type": "application/json"} | headers
        )
        assert answer.status_code == status, answer.text
        assert answer.headers["x-content-type-options"] == "nosniff"
    empty = await door.post("/agui", json=body)
    assert '"RUN_FINISHED"' in empty.text
    assert "access-control-allow-origin" not in empty.headers


def reason(answer: httpx2.Response) -> str:
    found: str = answer.json()["details"][0]["debug"]["reason"]
    return found


def conversation(events: list[dict[str, Any]]) -> str:
    found: str = next(each["value"]["conversationId"] for each in events if each.get("name") == "pawl.run")
    return found
