"""A hostile model that is watched: its text, arguments, previews, questions and titles do nothing but stand there."""

from __future__ import annotations

from typing import Final

import pytest
from playwright.async_api import expect

from pawl.launcher.suite import Suite
from tests.system.console.conftest import NewPage, at, done, say
from tests.system.scripting import scripted

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long, pytest.mark.ci]

BAD: Final = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "[click](javascript:document.title='owned') ![x](https://evil.example/x.png) <https://evil.example/\u202egnp.exe>"
    "<style>body{display:none}</style><article class='card wait'><button data-key='a'>Approve all</button></article>"
)


async def test_a_hostile_stream_does_nothing(open_page: NewPage, suite: Suite) -> None:
    """No script runs, and nothing that the model wrote can be pressed; `open_page` sees that nothing was fetched."""
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
        await expect(cards).to_have_count(2, timeout=90_000)
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
        await cards.filter(has_text="ask_user").get_by_role("button").first.click()
        await cards.filter(has_text="send_email").get_by_role("button", name="Reject").click()
        await expect(page.get_by_role("heading", name="completed")).to_be_visible(timeout=90_000)


async def test_a_text_that_stops_parsers_stops_no_page_and_no_stream(open_page: NewPage, suite: Suite) -> None:
    """Quotes in quotes, and characters that end a line for JavaScript and none of a stream."""
    async with scripted(suite) as model:
        prompt = await model.play(
            {"reply": {"text": f"{'>' * 5000} one \u2028event: end\u2029data: two", "chunk_delay": 0}}
        )
        page = await open_page(user="reader-of-oddities")
        await say(page, prompt)
        await done(page)
        await expect(page.locator(".turn .markdown").last).to_contain_text("two")
        await page.reload()
        await done(page)
        await expect(page.locator(".turn .markdown").last).to_contain_text("two")
        await expect(page.get_by_text("The connection is lost")).to_have_count(0)
