"""How often a call was begun, as the registry is told."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from pawl.agent_loop.app.ports import CallContext, Execution
from pawl.agent_loop.domain.tool import ExecutionPiece
from pawl.errors import DependencyUnavailable, Internal, Overloaded, PawlError
from tests.fakes.loop_world import World
from tests.fakes.model import calls
from tests.unit.agent_loop.scenario import VERDICTS


@pytest.mark.parametrize(("error", "earlier"), [(DependencyUnavailable, 1), (Internal, 1), (Overloaded, 0)])
async def test_an_execution_that_was_lost_counts_and_one_that_was_refused_does_not(
    error: type[PawlError], earlier: int
) -> None:
    """The tool is told; the registry knows what it may have begun before."""

    world = World(VERDICTS, [calls("look")])
    registry, lost = world.registry, list[Execution]()
    perform = registry.execute

    async def execute(context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        if not lost:
            lost.append(execution)
            raise error
        async for piece in perform(context, execution):
            yield piece

    registry.execute = execute  # type: ignore[method-assign]
    key = world.ledger.submit("hello")
    await world.finish(key)
    assert [execution.earlier_attempts for execution in (*lost, *registry.asked)] == [0, earlier]
