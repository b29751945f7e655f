from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from google.protobuf import json_format

from pawl.event.v1 import event_pb2
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.system.suite.client import Agent, addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

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
    """Return a browser's cookie for another replica at the same address: its name contains the port."""
    (value,) = browser.cookies.values()
    return {f"pawl_session_{url(suite, replica).rpartition(':')[2]}": value}
