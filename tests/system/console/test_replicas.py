"""The whole of it: two stores with keys of their own, two replicas of everything, and gateways that are killed."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect
from standardwebhooks.webhooks import Webhook

from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.system.console.conftest import PATIENCE_MS, address
from tests.system.console.front import front
from tests.unit.gateway.agui_page import Page as AgUiPage

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

SERVICES = ("gateway", "agent-loop", "job-store", "tool-registry", "notifier")
STORES = ("acme", "other")
ROLES = {"ann": ["member"], "bob": ["approver"], "hooks": ["gateway"]}


def key_of(store: str, user: str) -> str:
    return f"key-of-{user}-in-{store}-0123456789"


@dataclass(frozen=True)
class World:
    """A suite, and the one address before its gateways."""

    suite: Suite
    url: str
    browser: Browser

    async def enter(self, store: str, user: str, path: str = "/") -> Page:
        """Return a page of the console, logged in."""
        context = await self.browser.new_context(base_url=self.url)
        context.set_default_timeout(PATIENCE_MS)
        login = {"key": key_of(store, user)}
        answer = await context.request.post("/login", data=login, headers={"origin": self.url})
        assert answer.ok, await answer.text()
        page = await context.new_page()
        await page.goto(path)
        return page

    def program(self, store: str, user: str) -> httpx2.AsyncClient:
        """Return a program that acts for a user."""
        headers = {"authorization": f"Bearer {key_of(store, user)}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=60.0)

    async def kill(self, replica: int, *services: str) -> None:
        """Kill a replica of services, once all of them are there; they are started again."""
        await self.whole(services)
        for service in services:
            self.suite.kill(service, replica)

    async def whole(self, services: Sequence[str] = SERVICES) -> None:
        """Wait until both replicas of services are there."""
        for service in services:
            for each in (0, 1):
                await self.suite.wait_ready(service, each)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(browser: Browser) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="pawl-two-of-each-") as folder:
        keys, hooks = Path(folder) / "keys.json", Path(folder) / "hooks.json"
        entries = [
            {"key": key_of(store, user), "user_id": user, "store_id": store, "roles": roles}
            for store in STORES
            for user, roles in ROLES.items()
        ]
        keys.write_text(json.dumps(entries))
        hooks.write_text(json.dumps({store: key_of(store, "hooks") for store in STORES}))
        options = SuiteOptions(
            data=Path(folder) / "data",
            replicas=dict.fromkeys(SERVICES, 2),
            environment={"PAWL_API_KEYS_FILE": str(keys), "PAWL_GATEWAY_WEBHOOK_KEYS_FILE": str(hooks)},
        )
        async with Suite(options) as suite:
            gateways = [address(suite, replica).removeprefix("http://") for replica in (0, 1)]
            async with front(gateways) as url:
                yield World(suite, url, browser)


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Your message").fill(text)
    await page.keyboard.press("Enter")


async def done(page: Page, runs: int = 1) -> None:
    await expect(page.locator(".turn[data-state=completed]")).to_have_count(runs, timeout=120_000)


async def test_a_story_goes_on_whichever_replica_dies(world: World) -> None:
    pages = [await world.enter(store, "ann") for store in STORES]
    for page, store in zip(pages, STORES, strict=True):
        await say(page, f"tell me a long story slowly about {store}")
        await expect(page.locator(".turn .markdown").last).to_contain_text(" ", timeout=90_000)
    await world.kill(0, *SERVICES)
    await world.kill(1, "gateway")
    for page, store in zip(pages, STORES, strict=True):
        await done(page)
        run_id = await page.locator(".turn").get_attribute("data-run")
        async with world.program(store, "ann") as program:
            answer = await program.post("/rpc/pawl.agent.v1.AgentService/GetRun", json={"runId": run_id})
        story = answer.json()["run"]["outputText"]
        await expect(page.locator(".turn .markdown").last).to_have_text(" ".join(story.split()))
        await page.reload()
        await expect(page.locator(".turn .markdown").last).to_have_text(" ".join(story.split()))


async def test_an_approval_finds_its_approver_through_another_gateway(world: World) -> None:
    ann, bob = await world.enter("acme", "ann"), await world.enter("acme", "bob", "/inbox")
    foreign = await world.enter("other", "bob", "/inbox")
    await say(ann, "email dan@example.com about replicas")
    card = bob.locator("[data-item]", has_text="replicas")
    await expect(card).to_be_visible(timeout=90_000)
    await world.kill(0, "gateway", "agent-loop")
    await card.get_by_role("button", name="Approve").click()
    await world.kill(1, "gateway", "tool-registry")
    await done(ann)
    await expect(ann.locator(".card.good", has_text="send_email")).to_have_count(1)
    await expect(card).to_have_count(0, timeout=90_000)
    await expect(foreign.locator(".empty")).to_be_visible()
    run_id = await ann.locator(".turn").get_attribute("data-run")
    await foreign.goto(f"/runs/{run_id}")
    await expect(foreign.locator(".fault")).to_contain_text("No such run")


async def test_a_request_whose_answer_is_lost_is_sent_again_and_takes_effect_once(world: World) -> None:
    async def lose_answer(route: Route) -> None:
        await route.fetch()
        await route.abort("connectionreset")

    # A gateway without the services behind it is asked once more by itself.
    await world.whole()
    ann, bob = await world.enter("acme", "ann"), await world.enter("acme", "bob", "/inbox")
    sent: list[str] = []
    for page, method in ((ann, "StartRun"), (bob, "DecideCalls")):
        page.on("request", lambda request: sent.append(request.url.rpartition("/")[2]))
        await page.route(f"**/{method}", lose_answer, times=1)
    await say(ann, "email dan@example.com about what is sent twice")
    card = bob.locator("[data-item]", has_text="sent twice")
    async with bob.expect_response("**/DecideCalls", timeout=90_000):
        await card.get_by_role("button", name="Approve").click(timeout=90_000)
    await done(ann)
    await expect(card).to_have_count(0, timeout=90_000)
    assert (sent.count("StartRun"), sent.count("DecideCalls")) == (2, 2)
    await expect(ann.locator(".card.good", has_text="send_email")).to_have_count(1)
    for page in (ann, bob):
        await expect(page.get_by_role("alert")).to_have_count(0)
    async with world.program("acme", "ann") as program:
        search = {"query": "sent twice"}
        found = await program.post("/rpc/pawl.agent.v1.ConversationService/ListConversations", json=search)
    assert len(found.json()["conversations"]) == 1


async def test_what_goes_on_in_the_background_is_told_at_its_end(world: World) -> None:
    pages = [await world.enter(store, "ann") for store in STORES]
    for page in pages:
        await say(page, "in the background: what is 6 * 7")
    await world.kill(1, "gateway", "job-store", "notifier")
    for page in pages:
        await done(page, 2)
        await expect(page.locator(".turn").last).to_contain_text("42")


async def test_a_webhook_that_every_gateway_brings_starts_one_run_in_its_store(world: World) -> None:
    body, now = b'{"order": 7}', datetime.now(UTC)
    for store in STORES:
        await world.whole()
        async with world.program(store, "ann") as program:
            definition = {"name": "orders", "text": "what is 6 * 7? {{event}}", "webhook": {}}
            create = "/rpc/pawl.agent.v1.TriggerService/CreateTrigger"
            made_answer = await program.post(create, json={"definition": definition})
            assert made_answer.status_code == 200, made_answer.text
            made = made_answer.json()
            trigger_id = made["trigger"]["triggerId"]
            headers = {
                "webhook-id": "msg_1",
                "webhook-timestamp": str(int(now.timestamp())),
                "webhook-signature": Webhook(made["secret"]).sign("msg_1", now, body.decode()),
            }
            fired = set()
            for replica in (0, 1):
                fired.add((await deliver(world, f"/hooks/{store}/{trigger_id}", body, headers))["fire"]["runId"])
                await world.kill(replica, "gateway")
            assert len(fired) == 1
            elsewhere = next(name for name in STORES if name != store)
            wrong = await sent(world, f"/hooks/{elsewhere}/{trigger_id}", body, headers)
            assert wrong.status_code == 404


async def test_a_front_end_of_others_sees_the_same_text_after_its_gateway_died(world: World) -> None:
    body = {"threadId": "story", "runId": "1", "protocolVersion": "1.0", "tools": [], "context": []}
    message = {"id": "m1", "role": "user", "content": "tell me a long story slowly"}
    await world.whole()
    async with world.program("other", "ann") as program:
        is_killed = False
        with pytest.raises(httpx2.HTTPError):
            async for event in events(program, body | {"messages": [message]}):
                if not is_killed and event["type"] == "TEXT_MESSAGE_CONTENT":
                    is_killed = True
                    for each in (0, 1):
                        world.suite.kill("gateway", each)
        for each in (0, 1):
            await world.suite.wait_ready("gateway", each)
        page = AgUiPage()
        async for event in events(program, body | {"runId": "2", "messages": []}):
            page.take(event)
        runs = (await program.post("/rpc/pawl.agent.v1.AgentService/ListRuns", json={})).json()["runs"]
    assert page.of("assistant")[-1]["content"] == runs[0]["outputText"]


async def deliver(world: World, path: str, body: bytes, headers: dict[str, str]) -> Any:
    """Deliver a webhook as its sender does: again until it is taken."""
    answer = await sent(world, path, body, headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def sent(world: World, path: str, body: bytes, headers: dict[str, str]) -> httpx2.Response:
    """Send a webhook until a gateway has an answer: one may just die."""
    while True:
        try:
            async with httpx2.AsyncClient(base_url=world.url, timeout=60.0) as sender:
                answer = await sender.post(path, content=body, headers=headers)
        except httpx2.HTTPError:
            await asyncio.sleep(0.1)
            continue
        if answer.status_code < 500:
            return answer


async def events(program: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncIterator[Any]:
    """Yield the events of an AG-UI stream."""
    async with program.stream("POST", "/agui", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])
