from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from pawl.launcher.suite import PROBLEMS_FILE, Suite
from pawl.server.identity import browser_seal
from pawl.server.identity.browser_seal import CODE_SECONDS, SEAL_FILE, Code
from tests.keys import LOCAL_KEY
from tests.system.console.conftest import BEHIND, NewPage, ask, ask_approval, at, barrier_free, click, done, say

# Each test starts from what users see, and waits for changes that users would see.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

BAD_REQUEST = 400
LISTS = (
    *(
        "background",
        "workflows",
        "goals",
        "operations",
        "attention",
        "agents",
        "tools",
        "rules",
        "schedules",
        "triggers",
        "audit",
        "notifications",
    ),
    *("channels", "sources", "documents", "settings"),
)
PAGES = ("/", "/inbox", "/runs", "/nothing", "/design", "/tools/calculate", *(f"/{name}" for name in LISTS))


async def test_inbox_approval_works_by_keyboard_alone(open_page: NewPage) -> None:
    page = await open_page(user="keyboard")
    await expect(page.get_by_label("Your message")).to_be_focused()
    await page.keyboard.type("email bob@example.com about golf")
    await page.keyboard.press("Enter")
    await expect(page.locator(".card.wait")).to_be_visible()
    await expect(page).to_have_title("(1) Chat · Pawl")
    for key in ("Escape", "g", "i"):
        await page.keyboard.press(key)
    await expect(page.get_by_role("heading", name="Inbox")).to_be_visible()
    mine = page.locator("[data-item]", has_text="golf")
    await expect(mine).to_be_visible()
    for _ in range(20):
        await page.keyboard.press("j")
        if await mine.evaluate("item => item === document.activeElement"):
            break
    await page.keyboard.press("a")
    await expect(mine).to_have_count(0)
    await expect(page.locator("main:focus, main :focus")).to_have_count(1)


async def test_user_logs_in_with_a_known_key_and_logs_out_again(open_page: NewPage, suite: Suite) -> None:
    page = await open_page(user="")
    await page.get_by_label("Your key").fill("wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("not valid")
    await page.get_by_label("Your key").fill(LOCAL_KEY)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="What can I do for you?")).to_be_visible()
    await page.get_by_role("button", name="Log out").click()
    await expect(page.get_by_label("Your key")).to_be_visible()


async def test_a_draft_survives_an_expired_session_and_a_reload(open_page: NewPage, suite: Suite) -> None:
    """A login link that is opened in the tab of the login page also logs in."""
    page = await open_page(user="me")
    message = page.get_by_label("Your message")
    await message.fill("a long letter")
    await page.context.clear_cookies()
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Your key")).to_be_visible()
    await page.evaluate("(link) => void (location.hash = link)", link_of(suite).partition("#")[2])
    await expect(message).to_have_value("a long letter")
    await page.reload()
    await expect(message).to_have_value("a long letter")
    await page.keyboard.press("Enter")
    await done(page)
    await expect(message).to_have_value("")


async def test_seven_windows_all_receive_updates(open_page: NewPage) -> None:
    """A browser opens at most six connections to a host."""
    first = await open_page(user="seven")
    pages = [first, *[await first.context.new_page() for _ in range(6)]]
    for page in pages[1:]:
        await page.goto(at(first, "/inbox"))
    await say(first, "email bob@example.com about lunch")
    for page in pages[1:]:
        await expect(page.locator(".card.wait")).to_have_count(1)


async def test_session_that_ends_in_a_hidden_tab_returns_to_login(open_page: NewPage) -> None:
    """An inbox without a session must not look like an empty inbox."""
    page = await open_page("/inbox", user="sleeper")
    await expect(page.get_by_role("heading", name="Inbox")).to_be_visible()
    await page.evaluate(BEHIND)
    await page.evaluate("window.show(false)")
    await page.context.clear_cookies()
    await page.evaluate("window.show(true)")
    await expect(page.get_by_label("Your key")).to_be_visible()


def link_of(suite: Suite, *, seconds: float = CODE_SECONDS, gateway: str = "") -> str:
    """Return a link like the link that `pawl console` prints."""
    seal = (Path(suite.endpoints.secrets) / SEAL_FILE).read_text().strip()
    gateway = gateway or suite.endpoints.services["gateway"][0].http
    code = Code(key=LOCAL_KEY, gateway=gateway, end_time=time.time() + seconds, nonce=secrets.token_hex(8))
    return f"/#code={browser_seal.close(seal, code)}"


async def test_login_link_works_once(open_page: NewPage, suite: Suite) -> None:
    good = link_of(suite)
    page = await open_page(good, user="")
    await expect(page.get_by_role("heading", name="What can I do for you?")).to_be_visible()
    assert "code" not in page.url
    for bad in (good, link_of(suite, seconds=-1.0), link_of(suite, gateway="127.0.0.1:1"), "/#code=nonsense"):
        page = await open_page(bad, user="")
        await expect(page.get_by_role("alert")).to_contain_text("pawl console")


async def test_every_page_is_accessible_in_light_and_dark(open_page: NewPage) -> None:
    page = await open_page(user="axe")
    await ask_approval(page, "email dora@example.com about tea")
    conversation, run_id = page.url, await page.locator(".turn").get_attribute("data-run")
    await click(page.locator(".card.wait"), "Edit")
    await page.locator(".card.wait").get_by_text("Options", exact=True).click()
    await page.get_by_role("link", name="Details").click()
    beside = page.get_by_role("complementary", name="Run")
    await beside.get_by_label("More actions").click()
    await expect(beside.get_by_role("button", name="Save as JSON")).to_be_visible()
    await barrier_free(page, "an approval beside its run")
    await page.get_by_role("button", name="Help and keyboard shortcuts").click()
    await expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    await barrier_free(page, "the keys")
    await page.keyboard.press("Escape")
    await page.keyboard.press("Control+k")
    await expect(page.get_by_role("dialog").get_by_role("option").first).to_be_visible()
    await barrier_free(page, "the palette")
    await page.keyboard.press("Escape")
    await page.get_by_role("link", name="Close").click()
    await say(page, "what is 2 * 2")
    for path in (*PAGES, f"/runs/{run_id}", "/c/" + conversation.rpartition("/")[2], "/runs/nope"):
        await page.goto(conversation.partition("/c/")[0] + path)
        await expect(page.get_by_role("navigation")).to_be_visible()
        await expect(page.locator("main")).not_to_be_empty()
        await page.wait_for_timeout(300)
        await barrier_free(page, path)

    login = await open_page(user="")
    await expect(login.get_by_label("Your key")).to_be_visible()
    await barrier_free(login, "the login")


async def test_pages_fit_on_a_phone(open_page: NewPage) -> None:
    page = await open_page(user="phone", viewport={"width": 360, "height": 700})
    run_id = await ask(page, "what is 3 * 3")
    await ask(page, "count to 90", 2)
    await say(page, "email ann@example.com about walks")
    card = page.locator(".card.wait")
    await card.get_by_role("button", name="Edit").click()
    await expect(card.get_by_label("subject *")).to_be_visible()
    await page.get_by_role("button", name="Conversations").click()
    await page.get_by_label("Conversations").get_by_role("link", name="what is 3 * 3").click()
    await expect(page.get_by_label("Your message")).to_be_visible()
    conversation = page.url.rpartition("/")[2]
    for path in ("/", f"/runs/{run_id}", f"/c/{conversation}?run={run_id}", *PAGES):
        await page.goto(at(page, path))
        await page.wait_for_timeout(200)
        wide = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, path
    await page.goto(at(page, "/agents"))
    await page.get_by_role("button", name="Menu").click()
    await barrier_free(page, "the menu")
    await page.get_by_role("dialog", name="Menu").get_by_role("link", name="Audit").click()
    await page.get_by_text("Filters").click()
    await expect(page.locator(".filters label")).to_have_count(5)
    # Filters are side by side; otherwise each would fill the screen.
    tops = await page.locator(".filters label").evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 3
    await page.goto(at(page, "/runs"))
    await expect(page.get_by_role("row")).to_have_count(3)
    for width, parts in ((360, ".frame, main"), (1100, ".frame, main, .scroll")):
        await page.set_viewport_size({"width": width, "height": 700})
        assert not await inside_out(page, parts), f"a long answer widens the table at {width}"


async def inside_out(page: Page, selector: str) -> list[str]:
    """Return the elements whose content overflows sideways."""
    wider = (
        "all => all.filter(one => one.scrollWidth > one.clientWidth + 1 || "
        "[...one.children].some(each => each.getBoundingClientRect().left < -1 && !each.matches('.skip')))"
        ".map(one => one.className || one.tagName)"
    )
    return list(await page.locator(selector).evaluate_all(wider))


async def test_the_login_page_does_not_request_anything_that_requires_a_login(open_page: NewPage) -> None:
    """Browsers list each refused request as an error."""
    page = await open_page("/unknown", user="")
    refused: list[str] = []
    page.on("response", lambda answer: refused.append(answer.url) if answer.status >= BAD_REQUEST else None)
    await page.goto(at(page, "/"))
    await expect(page.get_by_label("Your key")).to_be_visible()
    await page.get_by_label("Your key").fill(LOCAL_KEY)
    await page.get_by_role("button", name="Log in").click()
    await expect(page.get_by_label("Your message")).to_be_visible()
    await page.reload()
    await expect(page.get_by_label("Your message")).to_be_visible()
    assert refused == []


async def test_problems_of_a_product_under_development_are_shown_until_they_are_fixed(
    open_page: NewPage, suite: Suite
) -> None:
    file = suite.folder.run / PROBLEMS_FILE
    file.write_text('["tools.stock: error: stock.py:1: SyntaxError"]')
    try:
        page = await open_page()
        problem = page.get_by_role("alert").filter(has_text="stock.py:1")
        await expect(problem).to_be_visible()
        file.write_text("[]")
        await expect(problem).to_have_count(0)
        file.write_text("[\"clerk.yaml:2: there is no tool 'stock'\"]")
        await expect(page.get_by_role("alert").filter(has_text="clerk.yaml:2")).to_be_visible()
    finally:
        file.unlink()
