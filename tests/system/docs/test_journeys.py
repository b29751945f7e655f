"""Compares the paths in architecture.md with the actual calls of the services, in order."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, Self
from unittest.mock import patch

import pytest
import pytest_asyncio

from pawl.agent.v1 import agent_pb2
from pawl.event.v1 import call_pb2
from pawl.launcher import Suite, SuiteOptions
from tests.leaks.load import running
from tests.poll import until
from tests.system.suite.client import Agent

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

ARCHITECTURE: Final = Path(__file__).parents[3] / "docs/design/architecture.md"
_STEP: Final = re.compile(r"^\d+\. `([\w/]+)\.py` `([\w.]+)`", re.MULTILINE)
_STEP_OF_A_RUN: Final = re.compile(r"^\d+\. `([\w.]+):([\w.]+)`", re.MULTILINE)

Step = tuple[str, str]


class Calls:
    def __init__(self, wanted: Sequence[Step]) -> None:
        self._wanted = wanted
        self._made: list[Step] = []

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        step = (frame.f_globals.get("__name__", ""), frame.f_code.co_qualname)
        if event == "call" and step in self._wanted:
            self._made.append(step)

    def missing(self) -> list[Step]:
        made = iter(self._made)
        return [step for step in self._wanted if step not in made]


def journey(title: str) -> list[Step]:
    section = ARCHITECTURE.read_text(encoding="utf-8").split(f"\n### {title}\n")[1].split("\n#")[0]
    return [(f"pawl.{path.replace('/', '.')}", name) for path, name in _STEP.findall(section)]


async def travelled(steps: Sequence[Step], travel: Callable[[], Awaitable[object]]) -> None:
    assert steps
    with Calls(steps) as calls:
        await travel()
        with suppress(TimeoutError):
            await until(lambda: not calls.missing())
    assert calls.missing() == [], "this step is not called, or not after the previous one"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Agent]:
    folder = tmp_path_factory.mktemp("journeys")
    with patch.dict(os.environ):
        async with (
            Suite(SuiteOptions(data=folder / "data", stages=())) as suite,
            running(suite, folder) as services,
            Agent(services["agent_loop"]) as agent,
        ):
            yield agent


async def test_run_takes_the_documented_path(agent: Agent) -> None:
    """The path ends with the notification, which follows the end of the run."""
    steps: list[Step] = _STEP_OF_A_RUN.findall(ARCHITECTURE.read_text(encoding="utf-8"))
    await travelled(steps, lambda: agent.start("what is 17 * 23"))


async def test_start_run_takes_the_documented_path(agent: Agent) -> None:
    await travelled(journey("From StartRun to its row"), lambda: agent.start("what is 17 * 23?"))


async def test_model_chunk_takes_the_documented_path(agent: Agent) -> None:
    run = await agent.start("count to 200 slowly")
    events = agent.watch(run.run_id)

    async def some_output() -> None:
        seen = 0
        async for event in events:
            seen += bool(event.output_delta.text)
            if seen == 5:
                return

    await travelled(journey("From a chunk of the model to a watcher"), some_output)
    await agent.stub.CancelRun(agent_pb2.CancelRunRequest(run_id=run.run_id), metadata=agent.metadata)
    await agent.until_ended(run.run_id)


async def test_gated_call_takes_the_documented_path(agent: Agent) -> None:
    run = await agent.start("e-mail kim@example.com about Lunch: See you at noon")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)

    async def approve() -> None:
        await agent.decide(call, call_pb2.DECISION_KIND_APPROVE)
        await agent.until_ended(run.run_id)

    await travelled(journey("From an approval to the effect"), approve)
