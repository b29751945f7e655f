"""AG-UI as the published clients of both generations see it, through two gateways."""

from __future__ import annotations

import base64
import itertools
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import pytest
import pytest_asyncio

from pawl.launcher.suite import Suite
from tests import npm
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.suite.agui_client import FrontEnd, Node, node

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

AGENT = "/rpc/pawl.agent.v1.AgentService"
MAIL = "e-mail ann@example.com about lunch: see you at noon"
SEND = 'call send_email with {"to": ["ann@example.com"], "subject": "lunch", "body": "at noon"}'


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """The published clients, as the lock has them, in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="pawl-agui-node-") as folder:
        npm.install(Path(__file__).with_name("agui"), Path(folder), timeout_seconds=240)
        yield Path(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["agui-1.0", "agui-0.0"])
async def client(packages: Path, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with node(packages, request.param) as started:
        yield started


class Pages:
    """Pages on one new thread, and the gateways that they talk to."""

    def __init__(self, suite: Suite, client: Node) -> None:
        self.suite, self.client = suite, client
        self.thread = f"thread-{secrets.token_hex(4)}"
        self._numbers = itertools.count()

    def gateway(self, replica: int = 0) -> str:
        return f"http://{self.suite.endpoints.services['gateway'][replica].http}"

    def open(self, replica: int = 0) -> FrontEnd:
        return FrontEnd(self.client, self.gateway(replica), self.thread)

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        """Call the gateway as a program."""
        headers = {"authorization": f"Bearer {LOCAL_KEY}"}
        async with httpx2.AsyncClient(base_url=self.gateway(), headers=headers, timeout=60.0) as program:
            return await program.post(path, json=body)

    async def rpc(self, method: str, **request: Any) -> Any:
        """Call a method that must work, with an id if it changes something."""
        named = {} if method.startswith(("Get", "List")) else {"requestId": f"{self.thread}-{next(self._numbers)}"}
        answer = await self.post(f"{AGENT}/{method}", **request, **named)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def start(self, text: str, **options: Any) -> str:
        """Begin a run on the thread, with options that AG-UI does not have; return its id."""
        run = (await self.rpc("StartRun", text=text, conversationKey=self.thread, options=options))["run"]
        run_id: str = run["runId"]
        return run_id

    async def ended(self) -> dict[str, Any]:
        """Return the run of the thread once it has ended."""
        named = {"conversationKey": self.thread}
        found = (await self.post("/rpc/pawl.agent.v1.ConversationService/GetConversation", **named)).json()
        asked = {"conversationId": found["conversation"]["conversationId"]}
        runs: list[dict[str, Any]] = []

        async def has_ended() -> bool:
            runs[:] = (await self.rpc("ListRuns", **asked))["runs"]
            return "endTime" in runs[0]

        await until(has_ended, patience_seconds=100)
        (run,) = runs
        return run


@pytest.fixture
def pages(suite: Suite, client: Node) -> Pages:
    return Pages(suite, client)


def is_success(end: dict[str, Any]) -> bool:
    """Return whether a run ended well; 0.0.x has no outcome then."""
    return bool(end["type"] == "RUN_FINISHED" and end.get("outcome", {"type": "success"})["type"] == "success")


async def test_what_is_edited_runs_as_edited_also_from_another_page(pages: Pages) -> None:
    page, other = pages.open(), pages.open(1)
    asked = (await page.ask(MAIL))["outcome"]["interrupts"]
    assert (await other.ask())["outcome"]["interrupts"] == asked
    assert other.said() == page.said()
    edited = {"to": ["bob@example.com"], "subject": "lunch", "body": "at one"}
    assert is_success(await other.resume(asked, {"approved": True, "editedArgs": edited}))
    late = pages.open()
    assert is_success(await late.ask())
    for each in (late, other):
        assert [role for role, _ in each.said()] == ["user", "assistant", "tool", "assistant"]
        (call,) = each.calls()
        assert json.loads(call["function"]["arguments"])["to"] == ["bob@example.com"]


async def test_a_question_is_answered_and_a_call_rejected(pages: Pages) -> None:
    page = pages.open()
    asked = (await page.ask("ask me whether to go on"))["outcome"]["interrupts"]
    assert [each["reason"] for each in asked] == ["input_required"]
    assert is_success(await page.resume(asked, {"answer": "with pleasure"}))
    asked = (await page.ask(MAIL))["outcome"]["interrupts"]
    assert is_success(await page.resume(asked, {"approved": False, "reason": "not today"}))
    answered, rejected = [text for role, text in page.said() if role == "tool"]
    assert "with pleasure" in answered
    assert "not today" in rejected


async def test_a_reload_in_mid_run_shows_the_same_text_on_both_pages(pages: Pages) -> None:
    page, other = pages.open(), pages.open(1)
    asked = page.begin("tell me a long story slowly")
    await asked.seen("TEXT_MESSAGE_CONTENT").wait()
    assert is_success(await other.ask())
    assert is_success(await page.end(asked))
    assert other.said() == page.said()
    assert page.said()[1:] == [("assistant", (await pages.ended())["outputText"])]


@pytest.mark.parametrize("wish", ["continue", "cancel"])
async def test_a_stop_of_the_client_stops_the_run_if_the_page_wishes_that(pages: Pages, wish: str) -> None:
    """The client closes its connection, as a page does that is left."""
    page, late = pages.open(), pages.open(1)
    asked = page.begin("tell me a long story slowly", forwardedProps={"pawl": {"onDisconnect": wish}})
    await asked.seen("TEXT_MESSAGE_CONTENT").wait()
    page.stop()
    await asked.told
    run = await pages.ended()
    assert run["state"] == ("RUN_STATE_COMPLETED" if wish == "continue" else "RUN_STATE_CANCELLED")
    assert is_success(await late.ask())
    assert late.said()[1:] == [("assistant", run["outputText"])]


async def test_a_stop_of_the_thread_is_told_to_its_page(pages: Pages) -> None:
    page = pages.open()
    asked = page.begin("tell me a long story slowly")
    await asked.seen("TEXT_MESSAGE_CONTENT").wait()
    assert (await pages.post("/agui/cancel", threadId=pages.thread)).status_code == 200
    end = (await asked.told)["end"]
    if pages.client.legacy:
        assert (end["type"], end["code"]) == ("RUN_ERROR", "CANCELLED")
    else:
        assert end["outcome"] == {"type": "cancelled"}


async def test_a_page_is_told_of_a_call_in_doubt_and_stays_until_somebody_knows(pages: Pages, tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    arguments = json.dumps({"path": str(effects), "seconds": 60.0})
    policy = {"unknownOutcomePolicy": "UNKNOWN_OUTCOME_POLICY_NEEDS_ATTENTION"}
    run_id = await pages.start(f"call act_once with {arguments}", **policy)
    page, late = pages.open(), pages.open(1)
    asked = page.begin()

    async def happened() -> bool:
        return effects.exists() and bool(effects.read_text())

    await until(happened)
    pages.suite.kill("tool-registry")
    await asked.seen("pawl.needs_attention").wait()
    asked_late = late.begin()
    await asked_late.seen("pawl.needs_attention").wait()
    assert not asked.told.done()
    await pages.suite.wait_ready("tool-registry")
    (call,) = (await pages.rpc("GetRun", runId=run_id))["run"]["pendingCalls"]
    found = {"resolution": "RESOLUTION_HAPPENED", "contentJson": base64.b64encode(b'"sent at noon"').decode()}
    await pages.rpc("ResolveCall", runId=run_id, callId=call["callId"], **found)
    assert is_success(await page.end(asked))
    assert is_success(await late.end(asked_late))
    assert ("tool", '"sent at noon"') in page.said()
    assert late.said() == page.said()


async def test_half_a_resume_is_refused_and_does_nothing(pages: Pages) -> None:
    page = pages.open()
    asked = (await page.ask(f"{SEND} and {SEND.replace('ann', 'bob')}"))["outcome"]["interrupts"]
    assert len(asked) == 2
    version = {} if pages.client.legacy else {"protocolVersion": "1.0"}
    half = {"interruptId": asked[0]["id"], "status": "resolved", "payload": {"approved": True}}
    answer = await pages.post("/agui", threadId=pages.thread, runId="half", messages=[], resume=[half], **version)
    assert answer.status_code == 400
    assert answer.json()["details"][0]["debug"]["reason"] == "INVALID_FIELD"
    assert asked[1]["id"] in answer.json()["message"]
    assert (await pages.open(1).ask())["outcome"]["interrupts"] == asked
    assert is_success(await page.resume(asked, {"approved": True}, {"approved": False}))
    assert [role for role, _ in page.said()].count("tool") == 2


async def test_what_came_by_another_door_is_not_said_again_by_the_page(pages: Pages) -> None:
    """After a reload it stands at the end of what the page sends, with the id that Pawl gave it."""
    await pages.start("what is 17 * 23", limits={"totalTokensMax": "1"})
    page = pages.open()
    asked = (await page.ask())["outcome"]["interrupts"]
    assert [role for role, _ in page.said()] == ["user"]
    assert is_success(await page.resume(asked, {"tokens": 100_000}))
    assert [role for role, _ in page.said()] == ["user", "assistant", "tool", "assistant"]


async def test_tokens_are_asked_for_until_they_do_and_not_once_more(pages: Pages) -> None:
    """A top-up that is too small is followed by the question for the rest, one that does by the answer."""
    await pages.start("what is 17 * 23", limits={"totalTokensMax": "1"})
    page = pages.open()
    (first,) = (await page.ask())["outcome"]["interrupts"]
    needed = first["responseSchema"]["properties"]["tokens"]["minimum"]
    (rest,) = (await page.resume([first], {"tokens": 1}))["outcome"]["interrupts"]
    assert rest["reason"] == first["reason"] == "pawl:budget"
    assert rest["id"] != first["id"]
    assert rest["responseSchema"]["properties"]["tokens"]["minimum"] == needed - 1
    assert is_success(await page.resume([rest], {"tokens": needed - 1}))
    assert page.said()[-1][1] == "17 * 23 = 391."


async def test_behind_a_gap_all_is_told(pages: Pages) -> None:
    run_id = await pages.start("what is 17 * 23")
    page, late = pages.open(), pages.open()
    await page.ask()
    database = await asyncpg.connect(pages.suite.database_url)
    try:
        async with database.transaction():
            last = await database.fetchval("SELECT last_seq FROM job_store.runs WHERE run_id = $1", run_id)
            await database.execute("DELETE FROM job_store.events WHERE run_id = $1 AND seq < $2", run_id, last)
            await database.execute("UPDATE job_store.runs SET trimmed_seq = $2 WHERE run_id = $1", run_id, last - 1)
    finally:
        await database.close()
    assert is_success(await late.ask())
    assert late.said() == page.said()


async def test_an_agent_that_does_a_call_is_told_and_its_approval_is_asked_for(pages: Pages) -> None:
    page = pages.open()
    asked = page.begin(f"ask an agent to {MAIL}")
    interrupts = (await page.end(asked))["outcome"]["interrupts"]
    assert [each["reason"] for each in interrupts] == ["tool_call"]
    assert asked.seen("SUBAGENT_STARTED").is_set() is not pages.client.legacy
    assert is_success(await page.resume(interrupts, {"approved": True}))
    assert [role for role, _ in page.said()] == ["user", "assistant", "tool", "assistant"]
