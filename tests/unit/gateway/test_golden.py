"""The golden log as AG-UI; tests/unit/agent_loop and web/client read the same log, and tell the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pawl.gateway.domain.agui import Fold
from tests.golden import GAP, LOG, TOLD
from tests.unit.gateway.agui_page import Page


def page_of(events: list[dict[str, Any]]) -> Page:
    """Return a page that took events of one run of AG-UI."""
    page = Page()
    for event in [{"type": "RUN_STARTED"}, *events]:
        page.take(json.loads(json.dumps(event)))
    return page


def shown(page: Page) -> list[dict[str, str]]:
    """Return what a page shows, in its order."""
    results = {each["toolCallId"]: each["content"] for each in page.of("tool")}
    told: list[dict[str, str]] = []
    for message in page.messages:
        if message["role"] == "reasoning" and message["content"]:
            told.append({"reasoning": message["content"]})
        if message["role"] == "assistant" and message["content"]:
            told.append({"text": message["content"]})
        for call in message.get("toolCalls", ()):
            function = call["function"]
            named = {"call": call["id"], "tool": function["name"], "arguments": function["arguments"]}
            told.append(named | {"result": results[call["id"]]})
    return told


@pytest.mark.parametrize("legacy", [False, True])
def test_ag_ui_tells_the_golden_log_as_everybody_does(legacy: bool) -> None:
    log = json.loads(LOG.read_text())
    fold = Fold(log[0]["runId"], legacy=legacy)
    assert shown(page_of([event for each in log for event in fold.fold(each)])) == json.loads(TOLD.read_text())
    for place in range(2, len(log)):  # whoever comes in mid-run
        fold = Fold(log[0]["runId"], legacy=legacy)
        for each in log[:place]:
            fold.fold(each)
        events = [*fold.attach(), *(event for each in log[place:] for event in fold.fold(each))]
        assert shown(page_of(events)) == json.loads(TOLD.read_text()), place


def test_ag_ui_tells_it_so_behind_a_gap_too() -> None:
    gap, last = json.loads(GAP.read_text()), json.loads(LOG.read_text())[-1]
    fold = Fold(gap["runId"], legacy=False)
    assert shown(page_of([*fold.gap(gap), *fold.fold(last)])) == json.loads(TOLD.read_text())
