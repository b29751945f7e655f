"""The pages of workflows: start a run, follow its nodes, answer a question and run a node again."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pytest
from playwright.async_api import expect

from tests.system.console.conftest import NewPage, barrier_free, sees

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

CALCULATE: Final[dict[str, Any]] = {"kind": "tool", "tool": "calculate"}
DEFINITION: Final[dict[str, Any]] = {
    "name": "sums",
    "description": "Add numbers once a person agrees.",
    "input": {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
    "nodes": {
        "first": {**CALCULATE, "arguments": {"expression": "17 * 23"}},
        "check": {
            "kind": "human",
            "question": "Add more to ${input.title}?",
            "options": ["yes", "no"],
            "after": ["first"],
        },
        "agreed": {"kind": "condition", "if": "${nodes.check.output == 'yes'}", "then": ["both"], "else": ["nothing"]},
        "nothing": {**CALCULATE, "arguments": {"expression": "0"}},
        "both": {
            "kind": "parallel",
            "branches": {
                "a": {**CALCULATE, "arguments": {"expression": "1 + 1"}},
                "b": {**CALCULATE, "arguments": {"expression": "2 + 2"}},
            },
        },
        "each": {
            "kind": "map",
            "items": [str(number) for number in range(60)],
            "do": {**CALCULATE, "arguments": {"expression": "${item} + 1"}},
            "after": ["first"],
        },
        "answer": {"kind": "output", "value": "${nodes.each.output[0]}", "after": ["both", "each"]},
    },
}


async def test_run_is_started_followed_answered_and_rerun(open_page: NewPage) -> None:
    page = await open_page("/workflows", user="grapher")
    await page.get_by_role("button", name="New workflow").click()
    problems = page.get_by_role("complementary", name="Preview")
    await expect(problems).to_contain_text("Valid")
    text = page.get_by_label("New workflow (JSON or YAML)")
    await text.fill("name: sums\nnodes:\n  one: {kind: tool, tool: calcolate}")
    await expect(problems).to_contain_text("calcolate")
    await barrier_free(page, "the problems of a workflow")
    await text.fill(json.dumps(DEFINITION))
    await expect(problems).to_contain_text("Valid")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("status")).to_contain_text("Saved sums, version 1.")
    await page.get_by_role("link", name="sums").click()
    await page.get_by_role("button", name="Start", exact=True).click()
    await page.get_by_label("title *").fill("the list")
    await page.get_by_role("button", name="Start run").click()

    def node(path: str, state: str = "") -> Any:
        return page.locator(f'[data-node="{path}"]' + (f'[data-state="{state}"]' if state else ""))

    await expect(node("check", "waiting")).to_be_visible()
    await expect(node("first", "succeeded")).to_be_visible()
    await expect(node("both.a", "pending")).to_be_visible()
    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("paused")
    await page.get_by_role("button", name="Resume").click()
    await expect(page.get_by_role("button", name="Pause")).to_be_visible()
    await page.get_by_role("button", name="yes", exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("completed")
    await expect(node("both.b", "succeeded")).to_be_visible()
    await expect(node("nothing", "skipped")).to_be_visible()
    await expect(node("each", "succeeded")).to_contain_text("60 of 60")

    await node("first").click()
    opened = page.get_by_role("article", name="Node first")
    await sees(opened, "17 * 23", "391")
    await page.reload()
    await expect(opened).to_contain_text("391")
    await node("each").click()
    await page.get_by_role("link", name="30 to 59").click()
    await expect(node("each[59]", "succeeded")).to_be_visible()
    await page.go_back()

    await page.locator(".facts").first.get_by_role("link").first.click()
    await page.locator(".facts").get_by_role("link", name="sums").click()

    await node("both").click()
    await page.get_by_role("button", name="Rerun from this node").click()
    first_run = page.url
    await page.get_by_role("button", name="Rerun now").click()
    await page.wait_for_url(lambda url: url.partition("?")[0] != first_run.partition("?")[0])
    await expect(page.get_by_role("heading", level=1)).to_contain_text("completed")
    await expect(node("check", "succeeded")).to_contain_text("reused")
    await page.get_by_role("link", name="sums", exact=True).click()
    ended = page.get_by_role("region", name="Latest runs").get_by_role("row", name=re.compile("completed"))
    await expect(ended).to_have_count(2)
