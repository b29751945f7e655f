from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from pawl.agent_loop.loop.rules.run import Undo
from pawl.agent_loop.titles.titles import SECONDS_MAX, TitleMaker
from pawl.chassis.ids import RunId
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import run_pb2
from pawl.job.v1.titles_pb2 import (
    ClaimTitlesRequest,
    ClaimTitlesResponse,
    SetTitleRequest,
    SetTitleResponse,
    TitleTask,
)
from tests.fakes.loop_world import CountingMeter, World
from tests.fakes.model import FakeModel, Script, fails, says
from tests.fakes.virtual_time import VirtualClock
from tests.unit.agent_loop.scenario import VERDICTS


class Ledger:
    def __init__(self, tasks: Sequence[TitleTask], *, refuses: type[Exception] | None = None) -> None:
        self.tasks = list(tasks)
        self.refuses = refuses
        self.brought: list[tuple[str, str, run_pb2.Usage]] = []

    async def ClaimTitles(self, request: ClaimTitlesRequest) -> ClaimTitlesResponse:
        claimed, self.tasks = self.tasks[: request.titles_max], self.tasks[request.titles_max :]
        return ClaimTitlesResponse(tasks=claimed)

    async def SetTitle(self, request: SetTitleRequest) -> SetTitleResponse:
        self.brought.append((request.conversation_id, request.text, request.usage))
        if self.refuses is not None:
            raise self.refuses
        return SetTitleResponse()


def task(conversation_id: str = "conv_0", model: str = "") -> TitleTask:
    return TitleTask(
        store_id="acme",
        conversation_id=conversation_id,
        attempt=1,
        model=model,
        user_text="How warm is it?",
        answer_text="12 degrees.",
    )


def tasks(count: int) -> list[TitleTask]:
    return [task(conversation_id=f"conv_{number}") for number in range(count)]


async def made(ledger: Ledger, model: FakeModel) -> TitleMaker:
    stub: Any = ledger
    maker = TitleMaker(stub, model, clock=VirtualClock(), meter=CountingMeter(), default_model="default")
    loop = asyncio.create_task(maker.run())
    await asyncio.sleep(5 * SECONDS_MAX)
    assert not loop.done()
    loop.cancel()
    return maker


async def test_the_answering_model_writes_the_title_from_what_it_saw() -> None:
    ledger, model = Ledger([task(model="steady"), task()]), FakeModel([says("Warmth"), says("Warmth")])
    await made(ledger, model)
    asked, other = model.requests
    assert (asked.model, other.model, asked.tools) == ("steady", "default", ())
    assert asked.output_tokens_max == 512
    assert [message["role"] for message in asked.messages] == ["system", "user"]
    assert asked.messages[1]["content"] == "User: How warm is it?\n\nAssistant: 12 degrees."
    used = run_pb2.Usage(input_tokens=10, output_tokens=5, model_calls=1)
    assert ledger.brought == [("conv_0", "Warmth", used)] * 2


@pytest.mark.parametrize("script", [fails(), fails(after=says("Half a ti")[:1]), [2 * SECONDS_MAX]])
async def test_a_failing_model_gives_no_title_and_does_not_block_others(script: Script) -> None:
    ledger = Ledger(tasks(6))
    await made(ledger, FakeModel([script, *[says("Warmth")] * 5]))
    assert sorted(text for _, text, _ in ledger.brought) == ["", *["Warmth"] * 5]


@pytest.mark.parametrize("error", [DependencyUnavailable, ValueError])
async def test_a_title_that_cannot_be_stored_does_not_block_others(error: type[Exception]) -> None:
    ledger = Ledger(tasks(6), refuses=error)
    await made(ledger, FakeModel([]))
    assert len(ledger.brought) == 6


@pytest.mark.parametrize("makes_titles", [False, True])
async def test_only_an_answered_run_requests_a_title(makes_titles: bool) -> None:
    world = World(VERDICTS, [says("Done."), fails(retryable=False)])
    world.dependencies = dataclasses.replace(world.dependencies, makes_titles=makes_titles)
    first = world.ledger.submit("hello")
    await world.finish(first)
    assert [step.asks_title for step in world.ledger.steps][-1] is makes_titles
    assert sum(step.asks_title for step in world.ledger.steps) == makes_titles
    before = len(world.ledger.steps)
    await world.finish(world.ledger.submit("fail"))
    await world.finish(world.ledger.submit("undo", undo=Undo(run_id=RunId(first.run_id))))
    assert not any(step.asks_title for step in world.ledger.steps[before:])
