"""Background work ends correctly even if a service crashes or is deployed in the middle of it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest

from pawl.client import AsyncClient
from tests.poll import until
from tests.system.background.stories import (
    GrantedSeries,
    Mail,
    Monitor,
    OneShotJob,
    PlainSeries,
    ScheduleFires,
    Story,
    TriggerEvents,
    WebhookDelivery,
    check_ledger,
)
from tests.system.background.world import SERVICES, World

STORIES: Final[Mapping[str, type[Story]]] = {
    "job": OneShotJob,
    "series": PlainSeries,
    "monitor": Monitor,
    "grant": GrantedSeries,
    "schedule": ScheduleFires,
    "trigger": TriggerEvents,
    "webhook": WebhookDelivery,
    "mail": Mail,
}
WAYS: Final = {"kill": World.kill, "deploy": World.deploy, "roll": World.roll}
# The stories that every test run plays; TESTS_STORIES=all plays all of them.
SOME: Final = (
    ("job", "tool-registry", "kill"),
    ("job", "tool-registry", "deploy"),
    ("series", "agent-loop", "kill"),
    ("series", "job-store", "roll"),
    ("monitor", "job-store", "kill"),
    ("monitor", "agent-loop", "deploy"),
    ("grant", "tool-registry", "kill"),
    ("grant", "agent-loop", "roll"),
    ("schedule", "job-store", "kill"),
    ("schedule", "agent-loop", "deploy"),
    ("trigger", "job-store", "deploy"),
    ("trigger", "tool-registry", "roll"),
    ("trigger", "notifier", "kill"),
    ("webhook", "notifier", "kill"),
    ("webhook", "notifier", "roll"),
    ("mail", "notifier", "kill"),
    ("mail", "notifier", "deploy"),
)
EVERY: Final = tuple(itertools.product(STORIES, SERVICES, WAYS))


def test_short_test_selection_covers_each_fault_and_story() -> None:
    assert {(service, how) for _, service, how in SOME} == set(itertools.product(SERVICES, WAYS))
    assert all(sum(story == name for story, *_ in SOME) >= 2 for name in STORIES)


def by_fault(combinations: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], list[str]]:
    """Return the stories for each fault. They run in parallel, each in its own store."""
    found: dict[tuple[str, str], list[str]] = {}
    for story, service, how in combinations:
        found.setdefault((service, how), []).append(story)
    return found


PLAYED: Final = by_fault(EVERY if os.environ.get("TESTS_STORIES") == "all" else SOME)


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("death", PLAYED, ids="-".join)
async def test_story_survives_service_crashes_and_deployments(
    world: World, tmp_path: Path, death: tuple[str, str]
) -> None:
    service, how = death
    tools_die = death == ("tool-registry", "kill")
    async with AsyncExitStack() as stack:
        stories = [
            STORIES[name](world, await stack.enter_async_context(world.client()), tmp_path, tools_die=tools_die)
            for name in PLAYED[death]
        ]
        await asyncio.gather(*(story.begin() for story in stories))
        await asyncio.gather(*(until(story.is_in_the_middle) for story in stories))
        await WAYS[how](world, service)
        await asyncio.gather(*(story.check() for story in stories))
        await asyncio.gather(*(check_ledger(story.pawl) for story in stories))


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("server", ["postgres", "nats"])
async def test_story_survives_database_and_nats_outages(
    world: World, pawl: AsyncClient, tmp_path: Path, server: str
) -> None:
    """Running work continues, due work is not repeated, and nothing needs a restart."""
    stories = [story(world, pawl, tmp_path) for story in (OneShotJob, PlainSeries, Monitor, ScheduleFires)]
    await asyncio.gather(*(story.begin() for story in stories))
    await asyncio.gather(*(until(story.is_in_the_middle) for story in stories))
    await world.suite.stop_process(server)
    await world.suite.start_process(server)
    for story in stories:
        await story.check()
    await check_ledger(pawl)
