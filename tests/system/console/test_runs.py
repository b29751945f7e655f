"""Runs in the console: as bars over time, with 10,000 events, behind a gap, in eight tabs, and what reading costs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import asyncpg
import httpx2
import pytest
from playwright.async_api import Request, expect

from pawl.event.v1 import event_pb2
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.console.conftest import NewPage, address, at, done, say

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

EVENTS = 10_000
SCROLL = """
async (pane) => {
  const gaps = [];
  let before = performance.now();
  for (let step = 1; step <= 60; step++) {
    pane.scrollTo(0, (pane.scrollHeight * step) / 60);
    await new Promise(requestAnimationFrame);
    gaps.push(performance.now() - before);
    before = performance.now();
  }
  return gaps.filter((gap) => gap > 50).length;
}
"""
"""Scroll through a pane in 60 frames; returns how many of them took longer than 50 ms."""


async def test_a_run_is_told_as_bars_and_watched_once(open_page: NewPage) -> None:
    page = await open_page(user="bars")
    watched: list[int] = []

    def look(asked: Request) -> None:
        if asked.url.endswith("/stream"):
            methods = [each["method"] for each in json.loads(asked.post_data or "{}")["subscriptions"].values()]
            watched.append(sum(method.endswith("WatchRun") for method in methods))

    await say(page, "email ann@example.com about bars")
    await expect(page.locator(".card.wait")).to_be_visible(timeout=90_000)
    await page.wait_for_timeout(500)
    run_id = await page.locator(".turn").get_attribute("data-run")
    page.on("request", look)
    await page.goto(at(page, f"/runs/{run_id}"))
    await page.get_by_text("Timeline:").click()
    bars = page.locator("[data-bar]")
    await expect(bars.filter(has_text="Waits")).to_have_count(1)
    await page.locator(".card.wait").get_by_role("button", name="Approve").click()
    await expect(bars.filter(has_text="Round 2")).to_have_count(1, timeout=90_000)
    await expect(bars.filter(has_text="send_email")).to_contain_text("succeeded")
    took = page.locator(".card.good header, [data-bar=call] td:first-of-type")
    # However short it was, it was not nothing.
    assert all(re.search(r"(^|\s)(< 1 ms|[1-9]\d* ms|[1-9][\d.]* s)$", text) for text in await took.all_inner_texts())
    assert await took.count() == 2
    kinds = [await bar.get_attribute("data-bar") for bar in await bars.all()]
    assert sorted(kind or "" for kind in kinds) == ["call", "round", "round", "wait"]
    await page.get_by_text("Events:").click()
    await expect(page.get_by_role("region", name="Events")).to_contain_text("run.")
    assert max(watched) == 1


async def test_a_run_of_10000_events_opens(
    open_page: NewPage, suite: Suite, record_property: Callable[[str, object], None]
) -> None:
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
    await expect(page.get_by_text(f"Events: {end.seq}")).to_be_visible(timeout=90_000)
    await expect(page.locator(".log")).to_contain_text(f"word{end.seq - 1}")
    await page.get_by_text("Events:").click()
    log = page.get_by_role("region", name="Events")
    assert await log.locator("li").count() < 100
    record_property("long_frames_of_60", await log.evaluate(SCROLL))
    await expect(log.locator("li").last).to_contain_text(str(end.seq))
    assert await log.locator("li").count() < 100


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
        await expect(page.locator(".log")).to_contain_text("Earlier events are not kept any more", timeout=90_000)
        await expect(page.locator(".log")).to_contain_text("64")


async def test_a_chat_in_which_nothing_happens_asks_one_small_thing(open_page: NewPage) -> None:
    page = await open_page(user="idle")
    await say(page, "what is 6 * 6")
    await done(page)
    await page.reload()
    await done(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))

    async def is_opened() -> bool:
        asked.clear()
        await page.wait_for_timeout(4000)
        return set(asked) <= {"GetConversation"}

    await until(is_opened)
    asked.clear()
    await page.wait_for_timeout(7000)
    assert set(asked) <= {"GetConversation"}
    assert 1 <= len(asked) <= 3
    other = await open_page("/c/" + page.url.partition("/c/")[2], user="idle")
    await say(other, "what is 6 * 7")
    await done(page, 2)
    assert asked.count("ListMessages") <= 4


async def test_what_does_not_exist_is_asked_for_once(open_page: NewPage) -> None:
    page = await open_page(user="lost")
    await page.clock.install()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    for path in ("/c/conv_nope", "/background/run_nope", "/attention/run_nope"):
        await page.goto(at(page, path))
        asked.clear()
        await page.reload()
        await expect(page.get_by_text(re.compile("is not there|no such|no run", re.IGNORECASE)).first).to_be_visible()
        await page.clock.run_for(30_000)
        # What was asked for meanwhile comes before it.
        await page.evaluate("() => fetch('/icon.svg').then(() => true)")
        assert sum(method in {"GetConversation", "GetJob", "ListAttention"} for method in asked) == 1, path


async def test_what_undo_would_do_is_told_done_and_reported(open_page: NewPage, tmp_path: Path) -> None:
    page = await open_page(user="regretful")
    effects = tmp_path / "effects"
    await say(page, f'call put_line with {{"path": "{effects}", "line": "once"}}')
    await done(page)
    await page.get_by_role("link", name="details").click()
    beside = page.get_by_role("complementary", name="Run")
    await beside.get_by_role("button", name="What would undo do?").click()
    await expect(beside.get_by_role("region", name="What undo would do")).to_contain_text("to undo")
    await beside.get_by_role("button", name="Undo it").click()
    report = page.get_by_role("region", name="What became of it")
    await expect(report.get_by_role("row", name=re.compile("put_line undone"))).to_be_visible(timeout=90_000)
    assert effects.read_text() == ""


async def test_an_operator_says_what_became_of_a_call(open_page: NewPage, suite: Suite, tmp_path: Path) -> None:
    page = await open_page("/attention", user="operator")
    effects = tmp_path / "effects"
    arguments = json.dumps({"path": str(effects), "seconds": 60.0})
    asked = {
        "requestId": "in-doubt",
        "text": f"call act_once with {arguments}",
        "options": {"unknownOutcomePolicy": "UNKNOWN_OUTCOME_POLICY_NEEDS_ATTENTION"},
    }
    bearer = {"authorization": f"Bearer {LOCAL_KEY}", "pawl-user": "someone"}
    async with httpx2.AsyncClient(base_url=address(suite), headers=bearer, timeout=60.0) as program:
        answer = await program.post("/rpc/pawl.agent.v1.AgentService/StartRun", json=asked)
    run_id = answer.json()["run"]["runId"]

    async def happened() -> bool:
        return effects.exists() and bool(effects.read_text())

    await until(happened)
    suite.kill("tool-registry")
    await suite.wait_ready("tool-registry")
    await page.get_by_role("link", name=run_id[-8:], exact=True).first.click(timeout=90_000)
    await page.get_by_role("button", name="It happened").click()
    await page.get_by_label("Its result, as JSON").fill('"sent at noon"')
    await page.keyboard.press("Enter")
    await expect(page.locator(".empty")).to_be_visible(timeout=90_000)
    await page.goto(at(page, "/runs?state=completed"))
    await expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    assert effects.read_text() == "done\n"
