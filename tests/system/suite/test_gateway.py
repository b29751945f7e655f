"""The door for HTTP, in a whole suite of its own with two replicas of the gateway."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
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
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.mail_server import Postbox, mail_server
from tests.poll import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEARER = {"authorization": f"Bearer {LOCAL_KEY}"}
START = "/rpc/pawl.agent.v1.AgentService/StartRun"
CHANNELS = "/rpc/pawl.notify.v1.ChannelService"
GET = "/rpc/pawl.agent.v1.AgentService/GetRun"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(mails: tuple[Postbox, int]) -> AsyncIterator[Suite]:
    with tempfile.TemporaryDirectory(prefix="pawl-gateway-") as folder:
        options = SuiteOptions(
            data=Path(folder),
            local_key=LOCAL_KEY,
            replicas={"gateway": 2, "agent-loop": 2},
            environment={"PAWL_SMTP_URL": f"smtp://127.0.0.1:{mails[1]}"},
        )
        async with Suite(options) as suite:
            yield suite


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mails() -> AsyncIterator[tuple[Postbox, int]]:
    async with mail_server() as found:
        yield found


@pytest.fixture
def mailbox(mails: tuple[Postbox, int]) -> Postbox:
    return mails[0]


async def mail_with(mailbox: Postbox, pattern: str) -> str:
    """What a pattern finds in the newest mail, as soon as it finds something."""
    found: list[str] = []

    async def has_come() -> bool:
        found.extend(re.findall(pattern, "\n".join(mailbox.texts()[-1:])))
        return bool(found)

    await until(has_come)
    return found[0]


@pytest_asyncio.fixture(loop_scope="module")
async def browser(doors: Suite) -> AsyncIterator[httpx2.AsyncClient]:
    """A browser with a session, at the first gateway."""
    url = address(doors)
    async with httpx2.AsyncClient(base_url=url, headers={"origin": url}, timeout=60.0) as browser:
        answer = await browser.post("/login", json={"key": LOCAL_KEY, "user": "ann"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["caller"]["userId"] == "ann"
        yield browser


def address(suite: Suite, replica: int = 0) -> str:
    return f"http://{suite.endpoints.services['gateway'][replica].http}"


def reason(answer: httpx2.Response) -> str:
    found: str = answer.json()["details"][0]["debug"]["reason"]
    return found


async def start(browser: httpx2.AsyncClient, text: str, request_id: str) -> str:
    answer = await browser.post(START, json={"requestId": request_id, "text": text})
    assert answer.status_code == 200, answer.text
    run_id: str = answer.json()["run"]["runId"]
    return run_id


async def told_by_email(browser: httpx2.AsyncClient, mailbox: Postbox, *, after_seconds: int) -> dict[str, str]:
    """The channel that tells the user of a browser by e-mail, whose address is confirmed."""
    asked = {"channel": {"url": "mailto:ann@example.com", "afterSeconds": after_seconds}}
    made = (await browser.post(f"{CHANNELS}/CreateChannel", json=asked)).json()
    channel = {"channelId": made["channel"]["channelId"]}
    code = await mail_with(mailbox, rf"pawl notify confirm {channel['channelId']} (\d{{8}})")
    assert (await browser.post(f"{CHANNELS}/ConfirmChannel", json={**channel, "code": code})).status_code == 200
    return channel


async def read(browser: httpx2.AsyncClient, path: str, **request: Any) -> AsyncIterator[tuple[str, str, Any]]:
    """Yield id, name and data of each event of a stream."""
    async with browser.stream(request.pop("method", "GET"), path, **request) as answer:
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


async def test_a_browser_starts_a_run_and_sees_every_event(browser: httpx2.AsyncClient, doors: Suite) -> None:
    run_id = await start(browser, "what is 17 * 23", "door-1")
    seen = [event async for event in read(browser, f"/runs/{run_id}/events")]
    assert seen[-1][1:] == ("end", {})
    async with AsyncClient(
        [replica.grpc for replica in doors.endpoints.services["agent-loop"]], api_key=LOCAL_KEY, user="ann"
    ) as pawl:
        events = [event async for event in pawl.watch(run_id) if isinstance(event, event_pb2.RunEvent)]
    assert [json_format.ParseDict(data, event_pb2.RunEvent()) for _, _, data in seen[:-1]] == events
    assert [int(number) for number, _, _ in seen[:-1]] == [event.seq for event in events]
    later = {"last-event-id": "3"}
    path = f"/runs/{run_id}/events"
    rest = [int(number) async for number, name, _ in read(browser, path, headers=later) if not name]
    assert rest == [event.seq for event in events if event.seq > 3]
    answer = await browser.post(GET, json={"runId": run_id})
    assert "391" in answer.json()["run"]["outputText"]


async def test_a_stream_goes_on_at_another_gateway_when_one_dies(browser: httpx2.AsyncClient, doors: Suite) -> None:
    run_id = await start(browser, "tell me a long story slowly", "door-2")
    seen: list[tuple[str, Any]] = []
    try:
        async for number, name, data in read(browser, f"/runs/{run_id}/events"):
            seen += [] if name else [(number, data)]
            if len(seen) == 4:
                doors.kill("gateway")
    except httpx2.HTTPError:
        pass
    place = seen[-1][0]
    async with httpx2.AsyncClient(base_url=address(doors, 1), cookies=browser.cookies, timeout=60.0) as other:
        path = f"/runs/{run_id}/events"
        async for number, name, data in read(other, path, headers={"last-event-id": place}):
            seen += [] if name else [(number, data)]
        every = [(number, data) async for number, name, data in read(other, path) if not name]
    assert seen == every
    await doors.wait_ready("gateway")


@pytest.mark.parametrize("is_begun", [False, True], ids=["not begun", "begun"])
async def test_a_start_whose_gateway_is_killed_before_it_answers_makes_one_run(doors: Suite, is_begun: bool) -> None:
    """Sent again with its request id, as @pawl/client does, whether the run was begun before or not."""
    headers = {**BEARER, "pawl-user": f"killed-{is_begun}"}
    text, request_id = "what is 5 * 5", "killed"
    database = await asyncpg.connect(doors.database_url)

    async def arrives() -> bool:
        waiting = "SELECT 1 FROM pg_locks WHERE relation = 'job_store.requests'::regclass AND NOT granted"
        return bool(await database.fetchval(waiting))

    async def is_kept() -> bool:
        return bool(
            await database.fetchval("SELECT 1 FROM job_store.requests WHERE user_id = $1", headers["pawl-user"])
        )

    async with (
        httpx2.AsyncClient(base_url=address(doors), headers=headers, timeout=60.0) as program,
        httpx2.AsyncClient(base_url=address(doors, 1), headers=headers, timeout=60.0) as other,
    ):
        try:
            async with database.transaction():
                # Who begins a run has to write there.
                await database.execute("LOCK TABLE job_store.requests IN EXCLUSIVE MODE")
                asked = asyncio.create_task(start(program, text, request_id))
                await until(arrives)
                doors.kill("gateway", 0, signal.SIGSTOP if is_begun else signal.SIGKILL)
            if is_begun:
                await until(is_kept)
                assert not asked.done()
                doors.kill("gateway")
            with pytest.raises(httpx2.TransportError):
                await asked
        finally:
            await database.close()
        run_id = await start(other, text, request_id)
        await doors.wait_ready("gateway")
        assert await start(program, text, request_id) == run_id
        patience = {"connect-timeout-ms": "60000"}
        answer = await other.post(GET, json={"runId": run_id, "waitSeconds": 50}, headers=patience)
        assert answer.json()["run"]["state"] == "RUN_STATE_COMPLETED"
        runs = (await other.post("/rpc/pawl.agent.v1.AgentService/ListRuns", json={})).json()["runs"]
    assert [run["runId"] for run in runs] == [run_id]


async def test_many_streams_are_one(browser: httpx2.AsyncClient) -> None:
    run_id = await start(browser, "what is 2 * 3", "door-3")
    wishes = {
        "chat": {"method": "pawl.agent.v1.AgentService/WatchRun", "request": {"runId": run_id}},
        "steps": {"method": "pawl.agent.v1.AgentService/WatchSteps", "request": {"runId": run_id}},
        "nothing": {"method": "pawl.agent.v1.AgentService/WatchRun", "request": {"runId": "nope"}},
        "inbox": {"method": "pawl.agent.v1.AgentService/WatchPending"},
    }
    ends: dict[str, Any] = {}
    messages: dict[str, int] = {}
    async for _, name, data in read(browser, "/stream", method="POST", json={"subscriptions": wishes}):
        if name == "end":
            ends[data["key"]] = data.get("error", {}).get("details", [{"debug": {"reason": ""}}])[0]["debug"]["reason"]
        else:
            messages[data["key"]] = messages.get(data["key"], 0) + 1
        if len(ends) == 3 and "inbox" in messages:
            break
    assert ends == {"chat": "", "steps": "", "nothing": "RUN_NOT_FOUND"}
    assert messages.keys() == {"chat", "steps", "inbox"}


async def test_a_session_is_that_of_its_user(browser: httpx2.AsyncClient, doors: Suite) -> None:
    run_id = await start(browser, "hello", "door-4")
    async with httpx2.AsyncClient(base_url=address(doors, 1), headers=BEARER, timeout=60.0) as program:
        mine = await program.post(GET, json={"runId": run_id}, headers={"pawl-user": "ann"})
        assert mine.status_code == 200
        other = await program.post(GET, json={"runId": run_id}, headers={"pawl-store": "other"})
        assert (other.status_code, reason(other)) == (404, "RUN_NOT_FOUND")
    async with httpx2.AsyncClient(base_url=address(doors, 1), cookies=browser.cookies, timeout=60.0) as elsewhere:
        origin = {"origin": address(doors, 1)}
        assert (await elsewhere.post(GET, json={"runId": run_id}, headers=origin)).status_code == 200
        out = await elsewhere.post("/logout", json={}, headers=origin)
        assert out.status_code == 200
        assert all("Max-Age=0" in cookie for cookie in out.headers.get_list("set-cookie"))


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("no cookie", {"cookies": {"pawl_session": ""}}, 401, "UNAUTHENTICATED"),
    ("made up", {"cookies": {"pawl_session": "gAAAAABmade-up"}}, 401, "UNAUTHENTICATED"),
    ("wrong key", {"headers": {"authorization": "Bearer wrong"}}, 401, "UNAUTHENTICATED"),
    ("other scheme", {"headers": {"authorization": "Basic abc"}}, 400, "INVALID_FIELD"),
    ("key of no key", {"headers": {"authorization": b"Bearer \xe9"}}, 400, "INVALID_FIELD"),
    ("user of no name", {"headers": BEARER | {"pawl-user": "a\tb"}}, 400, "INVALID_FIELD"),
    ("store of no name", {"headers": BEARER | {"pawl-store": b"\xe9"}}, 400, "INVALID_FIELD"),
    ("foreign origin", {"headers": {"origin": "http://evil.com"}}, 403, "FOREIGN_ORIGIN"),
    ("foreign site", {"headers": {"sec-fetch-site": "cross-site"}}, 403, "FOREIGN_ORIGIN"),
    ("foreign host", {"headers": {"host": "evil.com"}}, 421, "FOREIGN_HOST"),
    ("a form", {"headers": {"content-type": "text/plain"}}, 400, "INVALID_FIELD"),
    ("no JSON", {"content": b"{"}, 400, "INVALID_JSON"),
    ("no UTF-8", {"content": b'{"text": "\xff"}'}, 400, "INVALID_JSON"),
    ("no object", {"content": b"[]"}, 400, "INVALID_FIELD"),
    ("unknown field", {"content": b'{"nope": 1}'}, 400, "INVALID_FIELD"),
    ("deep", {"content": b"[" * 100_000 + b"]" * 100_000}, 400, "INVALID_JSON"),
    ("huge", {"content": b" " * 2_000_000}, 413, "TOO_LARGE"),
]


@pytest.mark.parametrize(("_", "request_", "status", "why"), BAD, ids=[bad[0] for bad in BAD])
async def test_what_is_wrong_is_refused_and_does_nothing(
    browser: httpx2.AsyncClient, doors: Suite, _: str, request_: dict[str, Any], status: int, why: str
) -> None:
    body = {"content": b'{"requestId": "never", "text": "never"}'} | request_
    headers = {"content-type": "application/json", "origin": address(doors)} | body.pop("headers", {})
    cookies = body.pop("cookies", dict(browser.cookies))
    async with httpx2.AsyncClient(base_url=address(doors), cookies=cookies, timeout=60.0) as stranger:
        answer = await stranger.post(START, headers=headers, **body)
    assert (answer.status_code, reason(answer)) == (status, why), answer.text
    runs = await browser.post("/rpc/pawl.agent.v1.AgentService/ListRuns", json={})
    assert "never" not in runs.text


async def test_what_is_not_there_is_said_so(browser: httpx2.AsyncClient) -> None:
    for method, path, status in (
        ("POST", "/rpc/pawl.tool.v1.ExecutionService/CheckCalls", 404),
        ("POST", "/rpc/pawl.agent.v1.AgentService/WatchRun", 404),
        ("GET", "/nothing", 404),
        ("GET", "/login", 405),
        ("GET", "/runs/nope..nope/events", 400),
        ("POST", "/hooks/local/trg_nope", 404),
        ("POST", "/hooks/../trg_nope", 405),
    ):
        answer = await browser.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == status, (path, answer.text)
        assert answer.json()["message"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    wrong: Any
    for wrong in ({}, {"subscriptions": {}}, {"subscriptions": {"a": {"method": "x"}}}, {"subscriptions": 3}):
        answer = await browser.post("/stream", json=wrong)
        assert answer.status_code in {400, 404}, answer.text
    gone = await browser.get("/runs/run_nope/events")
    assert (gone.status_code, reason(gone)) == (404, "RUN_NOT_FOUND")
    odd = await browser.get("/runs/run_1/events", headers={"last-event-id": "soon"})
    assert (odd.status_code, reason(odd)) == (400, "INVALID_FIELD")


async def test_a_login_with_a_wrong_key_gives_no_session(doors: Suite) -> None:
    async with httpx2.AsyncClient(base_url=address(doors), headers={"origin": address(doors)}, timeout=60.0) as browser:
        for said, status in (
            ({"key": "wrong"}, 401),
            ({"key": ""}, 400),
            ({}, 400),
            ({"key": "k", "x": 1}, 400),
            ({"key": "k", "user": "\u00e9"}, 400),
            ({"key": "k", "store": "a\n"}, 400),
        ):
            answer = await browser.post("/login", json=said)
            assert answer.status_code == status, answer.text
            assert "set-cookie" not in answer.headers


async def test_a_webhook_reaches_its_trigger_once(browser: httpx2.AsyncClient, doors: Suite) -> None:
    addresses = [replica.grpc for replica in doors.endpoints.services["agent-loop"]]
    async with AsyncClient(addresses, api_key=LOCAL_KEY) as pawl:
        definition = TriggerDefinition(name="orders", text="what is 6 * 7? {{event}}", webhook=WebhookSource())
        trigger, secret = await pawl.create_trigger(definition)
    body, now = b'{"order": 7}', datetime.now(UTC)
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign("msg_1", now, body.decode()),
    }
    then = now - timedelta(days=1)
    old = headers | {
        "webhook-timestamp": str(int(then.timestamp())),
        "webhook-signature": Webhook(secret).sign("msg_1", then, body.decode()),
    }
    answers = []
    for replica in (0, 1, 0):
        async with httpx2.AsyncClient(base_url=address(doors, replica), timeout=60.0) as sender:
            path = f"/hooks/local/{trigger.trigger_id}"
            forwarded = [("x-forwarded-for", "192.0.2.1"), ("x-forwarded-for", "192.0.2.2")]
            answers.append(await sender.post(path, content=body, headers=[*headers.items(), *forwarded]))
            unsigned = await sender.post(path, content=b'{"order": 8}', headers=headers)
            assert (unsigned.status_code, reason(unsigned)) == (403, "BAD_SIGNATURE")
            late = await sender.post(path, content=body, headers=old)
            assert (late.status_code, reason(late)) == (403, "WEBHOOK_TOO_OLD")
            twice = await sender.post(path, content=body, headers=[*headers.items(), ("webhook-id", "msg_2")])
            assert (twice.status_code, reason(twice)) == (400, "INVALID_FIELD")
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [answer.json().get("duplicate", False) for answer in answers] == [False, True, True]
    assert len({answer.json()["fire"]["runId"] for answer in answers}) == 1


async def test_a_link_in_an_e_mail_asks_first_and_ends_such_e_mails_by_its_button(
    browser: httpx2.AsyncClient, doors: Suite, mailbox: Postbox
) -> None:
    """NOTE-1: programs that scan mail follow links, and a mail program clicks without asking."""
    channel = await told_by_email(browser, mailbox, after_seconds=0)
    await browser.post(f"{CHANNELS}/TestChannel", json=channel)
    link = await mail_with(mailbox, r"Unsubscribe: (http://\S+)")
    assert link.startswith(f"{address(doors)}/unsubscribe/local/")

    async def is_enabled() -> bool:
        found: bool = (
            (await browser.post(f"{CHANNELS}/GetChannel", json=channel)).json()["channel"].get("enabled", False)
        )
        return found

    # Neither session nor key.
    async with httpx2.AsyncClient(timeout=60.0) as reader:
        page = await reader.get(link, headers={"accept": "text/html"})
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert '<form method="post">' in page.text
        assert "form-action 'self'" in page.headers["content-security-policy"]
        assert "script" not in page.text + page.headers["content-security-policy"]
        assert await is_enabled()
        one_click = {"List-Unsubscribe": "One-Click"}
        strangers = [link[:-1], link.replace("/local/", "/other/"), link.replace("/local/", "/a b/"), f"{link}/x"]
        for wrong in strangers[:3]:
            refused = await reader.post(wrong, data=one_click)
            assert (refused.status_code, "This link does nothing" in refused.text) == (404, True), wrong
        assert (await reader.post(strangers[3], data=one_click)).status_code == 405
        assert (await reader.post(link, data={"a": "b" * 5000})).status_code == 413
        assert await is_enabled()
        for replica in (0, 1):
            elsewhere = link.replace(address(doors), address(doors, replica))
            ended = await reader.post(elsewhere, data=one_click)
            assert (ended.status_code, "You are unsubscribed" in ended.text) == (200, True)
    assert not await is_enabled()


async def test_what_a_browser_has_watched_is_not_mailed_later(browser: httpx2.AsyncClient, mailbox: Postbox) -> None:
    """NOTE-1."""
    channel = await told_by_email(browser, mailbox, after_seconds=15)
    run_id = await start(browser, "what is 6 * 9", "watched")
    async for _ in read(browser, f"/runs/{run_id}/events"):
        pass

    async def is_skipped() -> bool:
        found = (await browser.post(f"{CHANNELS}/ListDeliveries", json=channel)).json().get("deliveries", [])
        states = {each["state"]: each.get("lastError") for each in found if each["type"] == "run.completed"}
        return states == {"CHANNEL_DELIVERY_STATE_SKIPPED": "the run was watched"}

    await until(is_skipped)


async def test_streams_are_counted_as_streams(doors: Suite) -> None:
    async with httpx2.AsyncClient(base_url=address(doors, 1), headers=BEARER, timeout=60.0) as program:
        run_id = await start(program, "tell me a long story slowly", "door-head")
        assert (await program.head(f"/runs/{run_id}/events")).headers["content-type"].startswith("text/event-stream")

        async def figures() -> str:
            return (await program.get(f"http://{doors.endpoints.services['gateway'][1].metrics}/metrics")).text

        async def none_is_open() -> bool:
            return "pawl_gateway_streams 0.0" in await figures()

        await until(none_is_open)
        async for _ in read(program, f"/runs/{run_id}/events"):
            pass
        await until(none_is_open)
        seen = await figures()
    assert 'pawl_gateway_http_duration_seconds_count{route="/rpc' in seen
    assert 'pawl_gateway_http_duration_seconds_count{route="/runs' not in seen


async def test_streams_end_when_the_gateway_stops(browser: httpx2.AsyncClient, doors: Suite) -> None:
    async with httpx2.AsyncClient(base_url=address(doors, 1), headers=BEARER, timeout=60.0) as program:
        wishes = {"inbox": {"method": "pawl.agent.v1.AgentService/WatchPending"}}
        stopping = None
        async for _ in read(program, "/stream", method="POST", json={"subscriptions": wishes}):
            stopping = asyncio.create_task(doors.stop_process("gateway", 1))
        assert stopping is not None
        await stopping
    await doors.start_process("gateway", 1)
