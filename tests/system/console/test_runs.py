"""Runs in the console: their timeline, undo, and the resolution of a call with an unknown outcome."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx2
import pytest
from playwright.async_api import Request, expect

from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.console.conftest import NewPage, address, at, done, say

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


async def test_run_is_shown_as_a_timeline_over_a_single_stream(open_page: NewPage) -> None:
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
    await expect(bars.filter(has=page.get_by_role("rowheader", name="Waiting", exact=True))).to_have_count(1)
    await page.locator(".card.wait").get_by_role("button", name="Approve").click()
    await expect(bars.filter(has_text="Round 2")).to_have_count(1, timeout=90_000)
    await expect(bars.filter(has_text="send_email")).to_contain_text("succeeded")
    took = page.locator(".card.good header, [data-bar=call] td:first-of-type")
    # Short durations are not shown as zero.
    assert all(re.search(r"(^|\s)(< 1 ms|[1-9]\d* ms|[1-9][\d.]* s)$", text) for text in await took.all_inner_texts())
    assert await took.count() == 2
    kinds = [await bar.get_attribute("data-bar") for bar in await bars.all()]
    assert sorted(kind or "" for kind in kinds) == ["call", "round", "round", "wait"]
    await page.get_by_text("Events:").click()
    await expect(page.get_by_role("region", name="Events")).to_contain_text("run.")
    assert max(watched) == 1


async def test_undo_is_previewed_done_and_reported(open_page: NewPage, tmp_path: Path) -> None:
    page = await open_page(user="regretful")
    effects = tmp_path / "effects"
    await say(page, f'call put_line with {{"path": "{effects}", "line": "once"}}')
    await done(page)
    await page.get_by_role("link", name="Details").click()
    beside = page.get_by_role("complementary", name="Run")
    await beside.get_by_role("button", name="Preview undo").click()
    await expect(beside.get_by_role("region", name="Undo preview")).to_contain_text("to undo")
    await beside.get_by_role("button", name="Undo now").click()
    report = page.get_by_role("region", name="Undo report")
    await expect(report.get_by_role("row", name=re.compile("put_line undone"))).to_be_visible(timeout=90_000)
    assert effects.read_text() == ""


async def test_operator_resolves_a_call_with_unknown_outcome(open_page: NewPage, suite: Suite, tmp_path: Path) -> None:
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
    await until(lambda: effects.exists() and effects.read_text())
    suite.kill("tool-registry")
    await suite.wait_ready("tool-registry")
    await page.get_by_role("link", name=run_id[-8:], exact=True).first.click(timeout=90_000)
    await page.get_by_role("button", name="It happened").click()
    await page.get_by_label("Result as JSON").fill('"sent at noon"')
    await page.keyboard.press("Enter")
    await expect(page.locator(".empty")).to_be_visible(timeout=90_000)
    await page.goto(at(page, "/runs?state=completed"))
    await expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    assert effects.read_text() == "done\n"
