"""Agents with their own instructions also get the guidelines on questions and background calls."""

from __future__ import annotations

import pytest

from pawl.agent_loop.loop.rules import background
from pawl.agent_loop.loop.rules.guidelines import ASKING, GUIDELINES
from pawl.agent_loop.loop.rules.run import RunOptions
from tests.fakes.model import says
from tests.fakes.registry import tool
from tests.unit.agent_loop.test_jobs import Story

OWN = "You are a clerk."
QUESTIONS = ASKING.format(tool="ask")
CALLS = background.INSTRUCTIONS


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        (RunOptions(instructions=OWN), [OWN, QUESTIONS, CALLS]),
        (RunOptions(instructions=OWN, tool_names=("work",)), [OWN, CALLS]),
        (RunOptions(instructions=OWN, without_background=True), [OWN, QUESTIONS]),
        (RunOptions(instructions=OWN, without_tools=True), [OWN]),
        (RunOptions(instructions=OWN, without_guidelines=True), [OWN]),
        # The deployment's default instructions explain questions.
        (RunOptions(instructions=f"{GUIDELINES}\n\nBe brief."), [f"{GUIDELINES}\n\nBe brief.", CALLS]),
        (RunOptions(), [CALLS]),
    ],
)
async def test_guidelines_are_added_to_other_instructions(options: RunOptions, prompt: list[str]) -> None:
    story = Story(says("Yes."))
    story.world.registry.verdicts = {"ask": tool("ASK", context="HUMAN"), "work": tool()}
    story.say("hello", options)
    await story.until(lambda: story.is_over)
    system, *_ = story.world.model.requests[0].messages
    assert system == {"role": "system", "content": "\n\n".join(prompt)}
