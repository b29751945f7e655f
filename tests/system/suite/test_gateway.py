"""The gateway over HTTP, with two replicas."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx2
import pytest
import pytest_asyncio
from google.protobuf import json_format
from standardwebhooks.webhooks import Webhook

from pawl.client import AsyncClient
from pawl.event.v1 import event_pb2
from pawl.event.v1.trigger_pb2 import TriggerDefinition, WebhookSource
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.mail_server import Postbox
from tests.poll import until
from tests.system.suite.client import Agent, addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

BEARER = {"authorization": f"Bearer {LOCAL_KEY}"}
AGENT = "/rpc/pawl.agent.v1.AgentService"
CHANNELS = "/rpc/pawl.notify.v1.ChannelService"


def url(suite: Suite, replica: int = 0) -> str:
    return f"http://{suite.endpoints.services['gateway'][replica].http}"


@pytest_asyncio.fixture(loop_scope="session")
async def browser(suite: Suite) -> AsyncIterator[httpx2.AsyncClient]:
    """A browser with a session, at the first gateway."""
    async with httpx2.AsyncClient(base_url=url(suite), headers={"origin": url(suite)}, timeout=60.0) as browser:
        answer = await browser.post("/login", json={"key": LOCAL_KEY, "user": "ann"})
        assert (answer.status_code, answer.json()["caller"]["userId"]) == (200, "ann"), answer.text
        yield browser


def program(suite: Suite, replica: int = 0, *, user: str = "me") -> httpx2.AsyncClient:
    """A program with the key."""
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
    """Yield id, name and data of each event of a stream."""
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


async def test_a_stream_and_a_start_survive_the_death_of_their_gateway(
    browser: httpx2.AsyncClient, suite: Suite
) -> None:
    """The stream resumes at another gateway; a start that was begun, and is sent again with its id, makes one run."""
    request_id, database = "killed", await asyncpg.connect(suite.database_url)
    run_id = await start(browser, "count to 60 slowly", "door-1")
    path, seen, has_begun = f"/runs/{run_id}/events", list[tuple[str, Any]](), asyncio.Event()

    async def watch() -> None:
        async for number, name, data in read(browser, path):
            seen.extend([] if name else [(number, data)])
            if len(seen) == 4:
                has_begun.set()

    async def arrives() -> bool:
        waiting = "SELECT 1 FROM pg_locks WHERE relation = 'job_store.requests'::regclass AND NOT granted"
        return bool(await database.fetchval(waiting))

    async def is_kept() -> bool:
        return bool(await database.fetchval("SELECT 1 FROM job_store.requests WHERE user_id = 'killed'"))

    async with program(suite, user="killed") as first, program(suite, 1, user="killed") as other:
        watching = asyncio.create_task(watch())
        await has_begun.wait()
        try:
            async with database.transaction():
                # Who begins a run has to write there.
                await database.execute("LOCK TABLE job_store.requests IN EXCLUSIVE MODE")
                asked = asyncio.create_task(start(first, "what is 5 * 5", request_id))
                await until(arrives)
                suite.kill("gateway", 0, signal.SIGSTOP)
            await until(is_kept)
        finally:
            suite.kill("gateway")
            await database.close()
        for broken in (asked, watching):
            with pytest.raises(httpx2.TransportError):
                await broken
        started = await start(other, "what is 5 * 5", request_id)
        runs = (await other.post(f"{AGENT}/ListRuns", json={})).json()["runs"]
        assert [run["runId"] for run in runs] == [started]
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


async def test_many_streams_are_one_and_end_when_the_gateway_stops(suite: Suite) -> None:
    async with program(suite, 1) as client:
        run_id = await start(client, "what is 2 * 3", "door-3")
        head = await client.head(f"/runs/{run_id}/events")
        assert head.headers["content-type"].startswith("text/event-stream")
        watched = {"method": "pawl.agent.v1.AgentService/WatchRun", "request": {"runId": run_id}}
        subscriptions = {
            "chat": watched,
            "steps": {**watched, "method": "pawl.agent.v1.AgentService/WatchSteps"},
            "nothing": {**watched, "request": {"runId": "nope"}},
            "inbox": {"method": "pawl.agent.v1.AgentService/WatchPending"},
        }
        ends: dict[str, str] = {}
        messages: set[str] = set()
        stopping = None
        async for _, name, data in read(client, "/stream", method="POST", json={"subscriptions": subscriptions}):
            if name == "end" and stopping is None:
                found = data.get("error", {}).get("details", [{"debug": {"reason": ""}}])
                ends[data["key"]] = found[0]["debug"]["reason"]
            elif name != "end":
                messages.add(data["key"])
            if len(ends) == 3 and "inbox" in messages and stopping is None:
                stopping = asyncio.create_task(suite.stop_process("gateway", 1))
        assert ends == {"chat": "", "steps": "", "nothing": "RUN_NOT_FOUND"}
        assert messages == {"chat", "steps", "inbox"}
        assert stopping is not None
        await stopping
        await suite.start_process("gateway", 1)
        metrics = f"http://{suite.endpoints.services['gateway'][1].metrics}/metrics"

        async def none_is_open() -> bool:
            return "pawl_gateway_streams 0.0" in (await client.get(metrics)).text

        await until(none_is_open)


async def test_a_session_is_that_of_its_user_and_ends_with_a_logout(browser: httpx2.AsyncClient, suite: Suite) -> None:
    run_id = await start(browser, "hello", "door-4")
    async with program(suite, 1) as client:
        mine = await client.post(f"{AGENT}/GetRun", json={"runId": run_id}, headers={"pawl-user": "ann"})
        assert mine.status_code == 200
        other = await client.post(f"{AGENT}/GetRun", json={"runId": run_id}, headers={"pawl-store": "other"})
        assert (other.status_code, reason(other)) == (404, "RUN_NOT_FOUND")
    async with httpx2.AsyncClient(
        base_url=url(suite, 1), cookies=session(browser, suite, 1), timeout=60.0
    ) as elsewhere:
        origin = {"origin": url(suite, 1)}
        assert (await elsewhere.post(f"{AGENT}/GetRun", json={"runId": run_id}, headers=origin)).status_code == 200
        out = await elsewhere.post("/login/out", json={}, headers=origin)
        assert (out.status_code, "Max-Age=0" in out.headers["set-cookie"]) == (200, True)
    wrong = (
        ({"key": "wrong"}, 401),
        ({"key": ""}, 400),
        ({"key": "k", "x": 1}, 400),
        ({"key": "k", "store": "a\n"}, 400),
    )
    for said, status in wrong:
        answer = await browser.post("/login", json=said)
        assert (answer.status_code, "set-cookie" in answer.headers) == (status, False), answer.text


def session(browser: httpx2.AsyncClient, suite: Suite, replica: int) -> dict[str, str]:
    """Return the cookie of a browser as another replica at the same address gets it: its name has the port."""
    (value,) = browser.cookies.values()
    return {f"pawl_session_{url(suite, replica).rpartition(':')[2]}": value}


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"session": ""}, 401, "UNAUTHENTICATED"),
    ({"session": "gAAAAABmade-up"}, 401, "UNAUTHENTICATED"),
    ({"headers": {"authorization": "Bearer wrong"}}, 401, "UNAUTHENTICATED"),
    ({"headers": {"authorization": b"Bearer \xe9"}}, 400, "INVALID_FIELD"),
    ({"headers": BEARER | {"pawl-user": "a\tb"}}, 400, "INVALID_FIELD"),
    ({"headers": {"origin": "http://evil.com"}}, 403, "FOREIGN_ORIGIN"),
    ({"headers": {"host": "evil.com"}}, 421, "FOREIGN_HOST"),
    ({"headers": {"content-type": "text/plain"}}, 400, "INVALID_FIELD"),
    ({"content": b'{"text": "\xff"}'}, 400, "INVALID_JSON"),
    ({"content": b'{"nope": 1}'}, 400, "INVALID_FIELD"),
    ({"content": b"[" * 100_000 + b"]" * 100_000}, 400, "INVALID_JSON"),
    ({"content": b" " * 2_000_000}, 413, "TOO_LARGE"),
]
MISSING = (
    ("POST", "/rpc/pawl.tool.v1.ExecutionService/CheckCalls", 404),
    ("POST", f"{AGENT}/WatchRun", 404),
    ("GET", "/nothing", 404),
    ("GET", "/login", 405),
    ("GET", "/runs/run_nope/events", 404),
    ("GET", "/runs/nope..nope/events", 400),
    ("POST", "/hooks/local/trg_nope", 404),
    ("POST", "/stream", 400),
)


async def test_a_bad_request_is_refused_in_json_and_does_nothing(browser: httpx2.AsyncClient, suite: Suite) -> None:
    """LOOP-15, OPS-1"""
    for bad, status, why in BAD:
        headers = {"content-type": "application/json", "origin": url(suite)} | bad.get("headers", {})
        content = bad.get("content", b'{"requestId": "never", "text": "never"}')
        (name,) = browser.cookies
        cookies = {name: bad.get("session", browser.cookies[name])}
        async with httpx2.AsyncClient(base_url=url(suite), cookies=cookies, timeout=60.0) as stranger:
            answer = await stranger.post(f"{AGENT}/StartRun", headers=headers, content=content)
        assert (answer.status_code, reason(answer)) == (status, why), bad
    assert "never" not in (await browser.post(f"{AGENT}/ListRuns", json={})).text
    for method, path, status in MISSING:
        answer = await browser.request(method, path, json={} if method == "POST" else None)
        assert (answer.status_code, bool(answer.json()["message"])) == (status, True), path
        assert answer.headers["x-content-type-options"] == "nosniff"
    for subscriptions in ({}, {"a": {"method": "x"}}, 3):
        answer = await browser.post("/stream", json={"subscriptions": subscriptions})
        assert answer.status_code in {400, 404}, subscriptions
    odd = await browser.get("/runs/run_1/events", headers={"last-event-id": "soon"})
    assert (odd.status_code, reason(odd)) == (400, "INVALID_FIELD")


async def test_a_webhook_reaches_its_trigger_once(suite: Suite, pawl: AsyncClient) -> None:
    """ASYNC-8"""
    definition = TriggerDefinition(name="orders", text="what is 6 * 7? {{event}}", webhook=WebhookSource())
    trigger, secret = await pawl.create_trigger(definition)
    path, body, now = f"/hooks/local/{trigger.trigger_id}", b'{"order": 7}', datetime.now(UTC)

    def signed(time: datetime) -> dict[str, str]:
        return {
            "webhook-id": "msg_1",
            "webhook-timestamp": str(int(time.timestamp())),
            "webhook-signature": Webhook(secret).sign("msg_1", time, body.decode()),
        }

    answers = []
    for replica in (0, 1):
        async with httpx2.AsyncClient(base_url=url(suite, replica), timeout=60.0) as sender:
            answers.append((await sender.post(path, content=body, headers=signed(now))).json())
            unsigned = await sender.post(path, content=b'{"order": 8}', headers=signed(now))
            assert (unsigned.status_code, reason(unsigned)) == (403, "BAD_SIGNATURE")
            late = await sender.post(path, content=body, headers=signed(now - timedelta(days=1)))
            assert (late.status_code, reason(late)) == (403, "WEBHOOK_TOO_OLD")
    assert [answer.get("duplicate", False) for answer in answers] == [False, True]
    (run_id,) = {answer["fire"]["runId"] for answer in answers}
    done = await pawl.result(run_id)
    assert "42" in done.output_text
    first = await anext(aiter(pawl.messages(done.conversation_id)))
    assert '"data":{"order":7}' in first.text


async def mail_with(mailbox: Postbox, pattern: str) -> str:
    """What a pattern finds in the newest mail, as soon as it finds something."""
    found: list[str] = []

    async def has_come() -> bool:
        found.extend(re.findall(pattern, "\n".join(mailbox.texts()[-1:])))
        return bool(found)

    await until(has_come)
    return found[0]


async def test_e_mails_skip_what_was_watched_and_end_by_their_link(
    browser: httpx2.AsyncClient, suite: Suite, mails: tuple[Postbox, int]
) -> None:
    """NOTE-1: programs that scan mail follow links, so the link asks first; a mail program clicks without asking."""
    mailbox = mails[0]
    asked = {"channel": {"url": "mailto:ann@example.com", "afterSeconds": 15}}
    channel_id = (await browser.post(f"{CHANNELS}/CreateChannel", json=asked)).json()["channel"]["channelId"]
    channel = {"channelId": channel_id}
    code = await mail_with(mailbox, rf"pawl notify confirm {channel_id} (\d{{8}})")
    assert (await browser.post(f"{CHANNELS}/ConfirmChannel", json={**channel, "code": code})).status_code == 200
    run_id = await start(browser, "what is 6 * 9", "watched")
    async for _ in read(browser, f"/runs/{run_id}/events"):
        pass

    async def is_skipped() -> bool:
        found = (await browser.post(f"{CHANNELS}/ListDeliveries", json=channel)).json().get("deliveries", [])
        states = {each["state"]: each.get("lastError") for each in found if each["type"] == "run.completed"}
        return states == {"CHANNEL_DELIVERY_STATE_SKIPPED": "the run was watched"}

    await until(is_skipped)
    await browser.post(f"{CHANNELS}/TestChannel", json=channel)
    link = await mail_with(mailbox, r"Unsubscribe: (http://\S+)")
    assert "/unsubscribe/local/" in link

    async def is_enabled() -> bool:
        answer = (await browser.post(f"{CHANNELS}/GetChannel", json=channel)).json()
        found: bool = answer["channel"].get("enabled", False)
        return found

    # Neither session nor key.
    async with httpx2.AsyncClient(timeout=60.0) as reader:
        page = await reader.get(link, headers={"accept": "text/html"})
        assert (page.status_code, '<form method="post">' in page.text) == (200, True)
        one_click = {"List-Unsubscribe": "One-Click"}
        for wrong in (link[:-1], link.replace("/local/", "/other/")):
            refused = await reader.post(wrong, data=one_click)
            assert (refused.status_code, "This link does nothing" in refused.text) == (404, True), wrong
        assert await is_enabled()
        for _ in "12":
            ended = await reader.post(link, data=one_click)
            assert (ended.status_code, "You are unsubscribed" in ended.text) == (200, True)
    assert not await is_enabled()
