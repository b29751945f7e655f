"""Runs in the console: as bars over time, with 10,000 events, behind a gap, in eight tabs, and what reading costs."""

from __future__ import annotations

import asyncio
import json

import asyncpg
import pytest
from playwright.async_api import Page, Request, expect

from pawl.event.v1 import event_pb2
from pawl.launcher.suite import Suite
from tests.system.console.conftest import NewPage

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

EVENTS = 10_000


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Your message").fill(text)
    await page.keyboard.press("Enter")


async def done(page: Page, runs: int = 1) -> str:
    """Return the id of the last run once so many have ended."""
    await expect(page.locator(".turn[data-state=completed]")).to_have_count(runs, timeout=30_000)
    return await page.locator(".turn").last.get_attribute("data-run") or ""


def at(page: Page, path: str) -> str:
    return "/".join(page.url.split("/")[:3]) + path


async def test_a_run_is_told_as_bars_and_watched_once(open_page: NewPage) -> None:
    page = await open_page(user="bars")
    watched: list[int] = []

    def look(asked: Request) -> None:
        if asked.url.endswith("/stream"):
            methods = [each["method"] for each in json.loads(asked.post_data or "{}")["subscriptions"].values()]
            watched.append(sum(method.endswith("WatchRun") for method in methods))

    await say(page, "email ann@example.com about bars")
    await expect(page.locator(".card.wait")).to_be_visible(timeout=30_000)
    await page.wait_for_timeout(500)
    run_id = await page.locator(".turn").get_attribute("data-run")
    page.on("request", look)
    await page.goto(at(page, f"/runs/{run_id}"))
    await page.get_by_text("Timeline:").click()
    bars = page.locator("[data-bar]")
    await expect(bars.filter(has_text="Waits")).to_have_count(1)
    await page.locator(".card.wait").get_by_role("button", name="Approve").click()
    await expect(bars.filter(has_text="Round 2")).to_have_count(1, timeout=15_000)
    await expect(bars.filter(has_text="send_email")).to_contain_text("succeeded")
    kinds = [await bar.get_attribute("data-bar") for bar in await bars.all()]
    assert sorted(kind or "" for kind in kinds) == ["call", "round", "round", "wait"]
    await page.get_by_text("Events:").click()
    await expect(page.get_by_role("region", name="Events")).to_contain_text("run.")
    assert max(watched) == 1


async def test_a_run_of_10000_events_opens(open_page: NewPage, suite: Suite) -> None:
    page = await open_page(user="long")
    await say(page, "what is 9 * 9")
    run_id = await done(page)
    database = await asyncpg.connect(suite.database_url)
    try:
        rows = await database.fetch("SELECT seq, payload FROM job_store.events WHERE run_id = $1 ORDER BY seq", run_id)
        end = event_pb2.RunEvent.FromString(rows[-1]["payload"])
        told = event_pb2.RunEvent()
        told.CopyFrom(end)
        told.type = "output.delta"
        told.output_delta.round = 2
        added = []
        for seq in range(end.seq, end.seq + EVENTS):
            told.seq, told.output_delta.text, told.event_id = seq, f"word{seq} ", f"{end.event_id}{seq}"
            added.append((end.store_id, run_id, seq, told.SerializeToString()))
        end.seq += EVENTS
        added.append((end.store_id, run_id, end.seq, end.SerializeToString()))
        async with database.transaction():
            await database.execute(
                "DELETE FROM job_store.events WHERE run_id = $1 AND seq = $2", run_id, end.seq - EVENTS
            )
            await database.executemany("INSERT INTO job_store.events VALUES ($1, $2, $3, $4)", added)
            await database.execute("UPDATE job_store.runs SET last_seq = $2 WHERE run_id = $1", run_id, end.seq)
    finally:
        await database.close()
    await page.goto(at(page, f"/runs/{run_id}"))
    await expect(page.get_by_text(f"Events: {end.seq}")).to_be_visible(timeout=30_000)
    await expect(page.locator(".log")).to_contain_text(f"word{end.seq - 1}")
    await page.get_by_text("Events:").click()
    log = page.get_by_role("region", name="Events")
    assert await log.locator("li").count() < 100
    await log.evaluate("pane => pane.scrollTo(0, pane.scrollHeight)")
    await expect(log.locator("li").last).to_contain_text(str(end.seq))


async def test_a_gap_in_the_events_is_healed(open_page: NewPage, suite: Suite) -> None:
    page = await open_page(user="gap")
    await say(page, "what is 8 * 8")
    run_id = await done(page)
    database = await asyncpg.connect(suite.database_url)
    try:
        last = await database.fetchval("SELECT last_seq FROM job_store.runs WHERE run_id = $1", run_id)
        async with database.transaction():
            await database.execute("DELETE FROM job_store.events WHERE run_id = $1", run_id)
            await database.execute("UPDATE job_store.runs SET trimmed_seq = $2 WHERE run_id = $1", run_id, last)
    finally:
        await database.close()
    for path in (f"/runs/{run_id}", page.url):
        await page.goto(path if path.startswith("http") else at(page, path))
        await expect(page.locator(".log")).to_contain_text("Earlier events are not kept any more", timeout=15_000)
        await expect(page.locator(".log")).to_contain_text("64")


BEHIND = """
let hidden = true;
Object.defineProperty(document, "hidden", { get: () => hidden });
window.show = (seen) => { hidden = !seen; document.dispatchEvent(new Event("visibilitychange")); };
"""
"""A browser without a screen shows all of its tabs: this one stands behind others until it is shown."""


async def test_eight_tabs_are_open_and_each_shows_what_is_new_when_it_is_looked_at(open_page: NewPage) -> None:
    page = await open_page(user="tabs")
    await say(page, "what is 4 * 4")
    await done(page)
    tabs = [await page.context.new_page() for _ in range(7)]
    for tab in tabs:
        await tab.add_init_script(BEHIND)
    await asyncio.gather(*[tab.goto(page.url) for tab in tabs])
    await asyncio.gather(*[done(tab) for tab in tabs])
    await say(page, "what is 5 * 4")
    await done(page, 2)
    for tab in tabs:
        await tab.evaluate("show(true)")
        await done(tab, 2)
        await expect(tab.locator(".turn").last).to_contain_text("20")
        await tab.evaluate("show(false)")


async def test_a_chat_in_which_nothing_happens_asks_one_small_thing(open_page: NewPage) -> None:
    page = await open_page(user="idle")
    await say(page, "what is 6 * 6")
    await done(page)
    await page.reload()
    await done(page)
    await page.wait_for_timeout(4000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    await page.wait_for_timeout(7000)
    assert set(asked) <= {"GetConversation"}
    assert 1 <= len(asked) <= 3
    other = await open_page("/c/" + page.url.partition("/c/")[2], user="idle")
    await say(other, "what is 6 * 7")
    await done(page, 2)
    assert asked.count("ListMessages") <= 4
