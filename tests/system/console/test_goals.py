"""The pages of goals: start one, follow its attempts and their judgement, raise its limits and stop it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from pawl.agent_loop.goals import rules
from pawl.agent_loop.goals.rules import Step
from pawl.chassis.ids import RunId
from pawl.launcher.suite import Suite
from tests.system.console.conftest import NewPage, at, barrier_free, sees
from tests.system.scripting import scripted

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

ATTEMPTS_MAX = 5
# Fields and buttons must work when events are faster than the screen.
SLOW_FRAMES = "void (window.requestAnimationFrame = (draw) => setTimeout(draw, 500))"


async def fill(page: Page, button: str, **fields: str) -> None:
    """Open a form by keyboard alone and fill it in."""
    await page.get_by_role("button", name=button, exact=True).press("Enter")
    for label, text in fields.items():
        await page.get_by_label(label.replace("_", " ")).fill(text)


async def test_judged_goal_is_started_raised_and_met(open_page: NewPage, suite: Suite) -> None:
    rubric = "Every room is tidy."

    def attempt(number: int, turn: int, **reply: Any) -> dict[str, Any]:
        return {"when": {"user_contains": f"{rubric}\n\nThis is attempt {number} of", "round": turn}, "reply": reply}

    mail = {"to": ["ann@example.com"], "subject": "rooms", "body": "May I?"}
    attempts = [
        attempt(1, 0, tool_calls=[{"name": "send_email", "arguments": mail}]),
        attempt(1, 1, text="I tidied one room."),
        attempt(2, 0, text="I tidied the other room."),
    ]
    page = await open_page("/goals", user="striver")
    facts = page.locator(".facts").first
    async with scripted(suite) as model:
        await model.obey({"steps": attempts})
        await fill(page, "Start a goal", Aim="Tidy up")
        await page.get_by_role("button", name="Start", exact=True).press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("criterion")
        await page.get_by_label("Rubric *").fill(rubric)
        await page.get_by_label("Maximum number of attempts").fill("1")
        await page.get_by_label("Maximum number of attempts").press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Tidy up")
        await expect(page.get_by_role("article", name="Attempt 1")).to_contain_text("running")
        await fill(page, "Raise limits", Attempts_to_add=str(ATTEMPTS_MAX - 1))
        await page.get_by_role("button", name="Raise", exact=True).press("Enter")
        await expect(facts).to_contain_text(f"1 of {ATTEMPTS_MAX}")

        run_id = page.url.rpartition("/")[2]
        first, second = (rules.call_id(RunId(run_id), number, Step.ATTEMPT) for number in (1, 2))
        half = {"met": False, "progress": 0.5, "reason": "One room is untidy.", "citations": [first]}
        tidy = {"met": True, "progress": 1, "reason": "All rooms are tidy.", "citations": [second]}
        judgements = [
            {"when": {"user_contains": f"(call_id {call_id})"}, "reply": {"text": json.dumps(answer)}}
            for call_id, answer in ((first, half), (second, tidy))
        ]
        await model.obey({"steps": attempts + judgements})
        await page.get_by_role("button", name="Approve", exact=True).press("Enter")
        await expect(facts).to_contain_text("completed")
    card = page.get_by_role("article", name="Attempt 1")
    for text in ("fell short at 50%", "Tried: I tidied one room.", "Fell short: One room is untidy.", first):
        await expect(card).to_contain_text(text)
    bars = page.get_by_role("table", name="Progress").get_by_role("row")
    assert [" ".join(text.split()) for text in await bars.all_inner_texts()] == ["Attempt 1 50", "Attempt 2 100"]
    report = page.locator(".preview", has_text="The goal was met after 2 attempts: All rooms are tidy.")
    await expect(report).to_contain_text(f"Evidence: - {second}")
    await expect(page.get_by_role("button", name="Raise limits")).to_have_count(0)
    await barrier_free(page, "a goal")
    await card.get_by_role("link").press("Enter")
    await expect(page.locator(".card", has_text="Send an e-mail")).to_be_visible()

    await page.goto(at(page, "/goals"))
    await expect(page.get_by_text("No open goals.")).to_be_visible()
    await page.get_by_label("Include ended").check()
    row = page.get_by_role("row", name=re.compile("Tidy up"))
    await sees(row, "All rooms are tidy.", f"2 of {ATTEMPTS_MAX}")


async def test_waiting_goal_is_stopped(open_page: NewPage, tmp_path: Path) -> None:
    price = tmp_path / "price"
    price.write_text("50")
    page = await open_page("/goals", user="patient")
    await page.evaluate(SLOW_FRAMES)
    await fill(page, "Start a goal", Aim="what is 6 * 7")
    await page.get_by_role("radio", name=re.compile("^A tool")).check()
    await page.get_by_label("Tool that checks it").select_option("look_up_price")
    await page.get_by_text("More options").click()
    for label, text in {
        "Seconds to wait": "3600",
        "Arguments of this tool": "{",
        "Expression": "value.price / 100.0",
    }.items():
        await page.get_by_label(label).fill(text)
    await page.get_by_role("button", name="Start", exact=True).click()
    await expect(page.get_by_role("alert")).to_contain_text("JSON")
    await page.get_by_label("Arguments of this tool").fill(json.dumps({"path": str(price)}))
    await page.get_by_role("button", name="Start", exact=True).click()
    await expect(page.get_by_role("article", name="Attempt 1")).to_contain_text("fell short at 50%")
    await expect(page.locator(".why")).to_contain_text(
        re.compile("waiting for the time of its next step.*Continues in")
    )
    await page.get_by_role("button", name="Stop", exact=True).click()
    await page.get_by_role("button", name="Yes, stop").click()
    await expect(page.locator(".facts").first).to_contain_text("stopped")
    await expect(page.locator(".preview")).to_contain_text("The goal was cancelled after 1 attempt.")
