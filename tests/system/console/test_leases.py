"""Tools of a page in several windows and browsers of one user: one runs a call under a lease, and its result counts."""

from __future__ import annotations

import asyncio
import sys
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from playwright.async_api import Page, Route

from tests.system.console.conftest import NewPage
from tests.system.console.test_example import run as run_command
from tests.tidy.tree import ROOT

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

BEGIN: Final = """async () => {
  const { Pawl, encode, decode, requestId } = await import("/client/index.js");
  const pawl = new Pawl();
  window.ran = [];
  const stamp = ({ number }) => new Promise((done) => {
    window.ran.push(number);
    window.finish = () => done("by " + window.who);
  });
  window.start = async (effectClass) => {
    const tool = {
      name: "stamp", description: "Stamps a number.", category: "TOOL_CATEGORY_SAFE", effectClass,
      argumentsSchemaJson: encode({ type: "object", properties: { number: { type: "integer" } } }),
    };
    const text = 'call stamp with {"number": 7}';
    const { run } = await pawl.agent.startRun({ requestId: requestId(), text, frontEndTools: [tool] });
    return run.runId;
  };
  window.pending = async (runId) => (await pawl.agent.getRun({ runId })).run.pendingCalls?.[0];
  window.answer = (call) => {
    window.answered = pawl.answer(call, { stamp }).then((receipt) => receipt?.status ?? "nothing");
  };
  window.result = async (runId) => {
    await pawl.result(runId);
    const { calls } = await pawl.agent.listCalls({ runId });
    return calls.map(({ state, result }) => [state, decode(result.contentJson)]);
  };
}"""
"""A page of somebody else's, at the origin of the gateway: its tool stamps, and has done so when the test says."""

NewWindow = Callable[..., Awaitable[Page]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of @pawl/client as it is packed."""
    folder = tmp_path_factory.mktemp("client")
    await asyncio.to_thread(run_command, folder, sys.executable, str(ROOT / "web/build.py"), "--client", str(folder))
    with tarfile.open(next(folder.glob("*.tgz"))) as packed:
        packed.extractall(folder, filter="data")
    return folder / "package/dist/src" if (folder / "package/dist/src").exists() else folder / "package/dist"


@pytest_asyncio.fixture(loop_scope="session")
async def window(open_page: NewPage, client: Path) -> AsyncIterator[NewWindow]:
    """Opens a window in a browser of its own, or in that of another window."""

    async def serve(route: Route) -> None:
        path = client / route.request.url.rpartition("/client/")[2]
        await route.fulfill(path=path, content_type="text/javascript")

    async def open_one(who: str, *, beside: Page | None = None) -> Page:
        page = await open_page(user="twins") if beside is None else await beside.context.new_page()
        if beside is not None:
            await page.goto(beside.url)
        await page.route("**/client/*", serve)
        await page.evaluate(BEGIN)
        await page.evaluate("(who) => { window.who = who; }", who)
        return page

    yield open_one


async def offered(page: Page, run_id: str) -> Any:
    return await until(page, "(runId) => window.pending(runId)", run_id, lambda call: call is not None)


async def until(page: Page, script: str, argument: Any, good: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(120):
        while not good(found := await page.evaluate(script, argument)):
            await asyncio.sleep(0.05)
        return found


async def ran(page: Page) -> list[int]:
    found: list[int] = await page.evaluate("() => window.ran")
    return found


async def test_of_two_windows_and_another_browser_one_runs_a_call(window: NewWindow) -> None:
    first, other = await window("first"), await window("other")
    pages = [first, await window("second", beside=first), other]
    run_id = await first.evaluate("() => window.start('EFFECT_CLASS_AT_MOST_ONCE')")
    call = await offered(other, run_id)
    await asyncio.gather(*(page.evaluate("(call) => window.answer(call)", call) for page in pages))
    async with asyncio.timeout(60):
        while not any(taken := [bool(await ran(page)) for page in pages]):
            await asyncio.sleep(0.05)
    # The others ask more than once meanwhile.
    await asyncio.sleep(5)
    assert [await ran(page) for page in pages] == [[7] if took else [] for took in taken]
    assert taken.count(True) == 1
    await pages[taken.index(True)].evaluate("() => window.finish()")
    told = [await page.evaluate("() => window.answered") for page in pages]
    assert told == ["RECEIPT_STATUS_ACCEPTED" if took else "nothing" for took in taken]
    who = ("first", "second", "other")[taken.index(True)]
    assert await other.evaluate("(runId) => window.result(runId)", run_id) == [["CALL_STATE_SUCCEEDED", f"by {who}"]]
    assert [len(await ran(page)) for page in pages].count(0) == 2


@pytest.mark.parametrize("effect", ["IDEMPOTENT", "AT_MOST_ONCE"])
async def test_a_call_whose_window_is_closed_is_run_again_only_if_that_is_safe(window: NewWindow, effect: str) -> None:
    first, other = await window("first"), await window("other")
    run_id = await first.evaluate("(effect) => window.start(effect)", f"EFFECT_CLASS_{effect}")
    call = await offered(first, run_id)
    await first.evaluate("(call) => window.answer(call)", call)
    await until(first, "() => window.ran", None, bool)
    await other.evaluate("(call) => window.answer(call)", call)
    await first.context.close()
    if effect == "IDEMPOTENT":
        await until(other, "() => window.ran", None, bool)
        await other.evaluate("() => window.finish()")
    assert await other.evaluate("() => window.answered") == "RECEIPT_STATUS_ACCEPTED"
    ((state, content),) = await other.evaluate("(runId) => window.result(runId)", run_id)
    if effect == "IDEMPOTENT":
        assert (state, content, await ran(other)) == ("CALL_STATE_SUCCEEDED", "by other", [7])
    else:
        assert (state, await ran(other)) == ("CALL_STATE_FAILED", [])
        assert "unknown whether it took effect" in content["error"]


async def test_the_late_result_of_a_window_that_lost_its_lease_changes_nothing(window: NewWindow) -> None:
    first, other = await window("first"), await window("other")
    run_id = await first.evaluate("() => window.start('EFFECT_CLASS_IDEMPOTENT')")
    call = await offered(first, run_id)
    await first.evaluate("(call) => window.answer(call)", call)
    await until(first, "() => window.ran", None, bool)
    await first.context.set_offline(True)
    await other.evaluate("(call) => window.answer(call)", call)
    await until(other, "() => window.ran", None, bool)
    await first.context.set_offline(False)
    # Its result is refused while the other one still works, and it does not run the call a second time.
    async with first.expect_response("**/SubmitToolResults"):
        await first.evaluate("() => window.finish()")
    await asyncio.sleep(3)
    await other.evaluate("() => window.finish()")
    assert await other.evaluate("() => window.answered") == "RECEIPT_STATUS_ACCEPTED"
    assert await first.evaluate("() => window.answered") == "nothing"
    assert await first.evaluate("(runId) => window.result(runId)", run_id) == [["CALL_STATE_SUCCEEDED", "by other"]]
    assert [await ran(first), await ran(other)] == [[7], [7]]
