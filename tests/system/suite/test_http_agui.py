"""Streams and AG-UI through the gateway, used as browsers and front ends use them."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from google.protobuf import json_format

from pawl.event.v1 import event_pb2
from pawl.launcher.suite import Suite
from tests import npm
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.suite.client import Agent, addresses
from tests.unit.gateway.agui_page import Page

pytestmark = pytest.mark.asyncio(loop_scope="session")

MAIL = "e-mail ann@example.com about lunch: see you at noon"
STORY = "count to 60 slowly"
SUCCESS = {"type": "success"}


@pytest_asyncio.fixture(loop_scope="session")
async def endpoint(suite: Suite) -> AsyncIterator[httpx2.AsyncClient]:
    async with program(suite) as endpoint:
        yield endpoint


class Thread:
    def __init__(self, endpoint: httpx2.AsyncClient, name: str) -> None:
        self.endpoint, self.name = endpoint, name
        self.page = Page()
        self.runs = 0

    async def ask(self, text: str = "", **more: Any) -> list[dict[str, Any]]:
        return [event async for event in self.stream(text, **more)]

    async def stream(self, text: str = "", **more: Any) -> AsyncIterator[dict[str, Any]]:
        body = self.body(text, **more)
        self.page.expect_run()
        async with self.endpoint.stream("POST", "/agui", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    self.page.take(event)
                    yield event
        assert self.page.ended

    async def leave(self, text: str, **more: Any) -> None:
        async with self.endpoint.stream("POST", "/agui", json=self.body(text, **more)) as answer:
            async for line in answer.aiter_lines():
                if "TEXT_MESSAGE_CONTENT" in line:
                    return

    def body(self, text: str = "", **more: Any) -> dict[str, Any]:
        self.runs += 1
        if text:
            self.page.messages.append({"id": f"{self.name}-u{self.runs}", "role": "user", "content": text})
        run_id = f"{self.name}-r{self.runs}"
        body = {"threadId": self.name, "runId": run_id, "messages": self.page.messages, "tools": [], "context": []}
        return body | {"protocolVersion": "1.0"} | more


def resolved(interrupt: dict[str, Any], **payload: Any) -> list[dict[str, Any]]:
    return [{"interruptId": interrupt["id"], "status": "resolved", "payload": payload}]


def run_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = next(each["value"] for each in events if each.get("name") == "pawl.run")
    return found


def notices(events: list[dict[str, Any]]) -> list[str]:
    return [each["value"]["message"] for each in events if each.get("name") == "pawl.notice"]


async def test_job_question_interrupts_the_thread_that_started_the_job(endpoint: httpx2.AsyncClient) -> None:
    """The user answers the question in the thread, and may send other messages first."""
    thread, asked = Thread(endpoint, "background"), list[dict[str, Any]]()
    await thread.ask(f"in the background: {MAIL}")

    async def is_asked() -> bool:
        asked[:] = (await thread.ask())[-1]["outcome"].get("interrupts", ())
        return bool(asked)

    await until(is_asked)
    assert "ann@example.com" in asked[0]["message"]
    said = await thread.ask("what is 17 * 23")
    assert said[-1]["outcome"] == {"type": "interrupt", "interrupts": asked}
    assert (await thread.ask(resume=resolved(asked[0], approved=True)))[-1]["outcome"] == SUCCESS
    jobs = {"conversationId": run_of(said)["conversationId"]}

    async def is_done() -> bool:
        answer = await endpoint.post("/rpc/pawl.agent.v1.JobService/ListJobs", json=jobs)
        return [job["state"] for job in answer.json()["jobs"]] == ["RUN_STATE_COMPLETED"]

    await until(is_done)
    assert notices(await thread.ask(resume=resolved(asked[0]))) == ["send_email was already decided by me: approve."]


async def test_a_run_continues_after_a_disconnect_and_can_be_rejoined(endpoint: httpx2.AsyncClient) -> None:
    left = Thread(endpoint, "leaving")
    await left.leave(STORY)
    events = await left.ask()  # the same message, another run id: joins the open run
    assert events[-1]["outcome"] == SUCCESS
    asked = {"conversationId": run_of(events)["conversationId"]}
    assert len((await endpoint.post(f"{AGENT}/ListRuns", json=asked)).json()["runs"]) == 1


async def test_a_disconnect_stops_the_run_if_its_page_requested_that(endpoint: httpx2.AsyncClient) -> None:
    await Thread(endpoint, "stopping").leave(STORY, forwardedProps={"pawl": {"onDisconnect": "cancel"}})
    run = {"runId": run_of(await Thread(endpoint, "stopping").ask())["runId"]}
    assert (await endpoint.post(f"{AGENT}/GetRun", json=run)).json()["run"]["state"] == "RUN_STATE_CANCELLED"
    late = await endpoint.post("/agui/cancel", json={"threadId": "stopping", "runId": "stopping-r1"})
    assert (late.status_code, reason(late)) == (404, "RUN_NOT_FOUND")


async def test_published_ag_ui_clients_work_unchanged(suite: Suite) -> None:
    with tempfile.TemporaryDirectory(prefix="pawl-agui-node-") as folder:
        npm.install(Path(__file__).with_name("agui"), Path(folder), timeout_seconds=240)
        for client in ("agui-1.0", "agui-0.0"):
            driven = await asyncio.create_subprocess_exec(
                *(npm.NODE, "drive.mjs", client, f"{url(suite)}/agui", LOCAL_KEY),
                cwd=folder,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, errors = await driven.communicate()
            assert driven.returncode == 0, errors.decode()
            reported = json.loads(out)
            roles = ["user", "reasoning", "assistant", "tool", "reasoning", "assistant"]
            assert [role for role, _ in reported["sum"]] == roles
            assert reported["sum"][-1] == ["assistant", "17 * 23 = 391."]
            assert reported["reload"] == reported["sum"]
            assert (reported["interrupt"], reported["tool"], reported["refused"]) == (
                "tool_call",
                "show_plan",
                "CONVERSATION_BUSY",
            )
            assert [role for role, _ in reported["mail"]].count("tool") == 1
            assert [text for role, text in reported["shown"] if role == "tool"] == ['"it is shown"']


BEARER = {"authorization": f"Bearer {LOCAL_KEY}"}
AGENT = "/rpc/pawl.agent.v1.AgentService"


def url(suite: Suite, replica: int = 0) -> str:
    return f"http://{suite.endpoints.services['gateway'][replica].http}"


@pytest_asyncio.fixture(loop_scope="session")
async def browser(suite: Suite) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=url(suite), headers={"origin": url(suite)}, timeout=60.0) as browser:
        answer = await browser.post("/login", json={"key": LOCAL_KEY, "user": "ann"})
        assert (answer.status_code, answer.json()["caller"]["userId"]) == (200, "ann"), answer.text
        yield browser


def program(suite: Suite, replica: int = 0, *, user: str = "me") -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url(suite, replica), headers=BEARER | {"pawl-user": user}, timeout=60.0)


def reason(answer: httpx2.Response) -> str:
    found: str = answer.json()["details"][0]["debug"]["reason"]
    return found


async def start(client: httpx2.AsyncClient, text: str, request_id: str) -> str:
    answer = await client.post(f"{AGENT}/StartRun", json={"requestId": request_id, "text": text})
    assert answer.status_code == 200, answer.text
    run_id: str = answer.json()["run"]["runId"]
    return run_id


async def read(client: httpx2.AsyncClient, path: str, **request: Any) -> AsyncIterator[tuple[str, str, Any]]:
    async with client.stream(request.pop("method", "GET"), path, **request) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        found: dict[str, str] = {}
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                found[name] = value
            elif "data" in found:
                yield found.get("id", ""), found.get("event", ""), json.loads(found["data"])
                found = {}


async def test_stream_resumes_at_another_gateway(browser: httpx2.AsyncClient, suite: Suite) -> None:
    run_id = await start(browser, "count to 60 slowly", "door-1")
    path, seen = f"/runs/{run_id}/events", list[tuple[str, Any]]()
    with pytest.raises(httpx2.TransportError):
        async for number, name, data in read(browser, path):
            seen.extend([] if name else [(number, data)])
            if len(seen) == 4:
                suite.kill("gateway")
    async with httpx2.AsyncClient(
        base_url=url(suite, 1), cookies=session(browser, suite, 1), timeout=60.0
    ) as elsewhere:
        rest = [event async for event in read(elsewhere, path, headers={"last-event-id": seen[-1][0]})]
    assert rest[-1][1:] == ("end", {})
    seen += [(number, data) for number, name, data in rest if not name]
    async with Agent(addresses(suite)[0], user="ann") as ann:
        events = await ann.whole_log(run_id)
    assert [json_format.ParseDict(data, event_pb2.RunEvent()) for _, data in seen] == events
    assert [int(number) for number, _ in seen] == [event.seq for event in events]
    await suite.wait_ready("gateway")


def session(browser: httpx2.AsyncClient, suite: Suite, replica: int) -> dict[str, str]:
    """Return a browser's cookie for another replica at the same address. The name of the cookie contains the port."""
    (value,) = browser.cookies.values()
    return {f"pawl_session_{url(suite, replica).rpartition(':')[2]}": value}
