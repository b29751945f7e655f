"""Executions that say nothing for too long count as lost. I5."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.tools import (
    Category,
    EffectClass,
    Tool,
    ToolContext,
    cannot_say,
    tool,
)
from tests.rpc.tool_registry import process_tools
from tests.rpc.tool_registry.registry import Registry, content, outcome, reason, refusal, running


def silent(effect: EffectClass) -> Tool[..., Any]:
    async def reconcile(_context: ToolContext) -> Any:
        return cannot_say()

    is_reconcilable = effect is EffectClass.RECONCILABLE

    @tool(
        name="work",
        category=Category.SAFE,
        effect=effect,
        timeout_seconds=60,
        heartbeat_seconds=1.0,
        reconcile=reconcile if is_reconcilable else None,
    )
    async def work(context: ToolContext) -> Any:
        """Get stuck the first time."""
        if context.attempt == 1:
            await context.checkpoint("half")
            await asyncio.Event().wait()
        return context.last_checkpoint

    return work


@pytest.mark.parametrize("effect", [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT])
async def test_what_may_be_repeated_is_to_be_asked_for_again(
    database_url: str, tmp_path: Path, effect: EffectClass
) -> None:
    async with running(database_url, tmp_path, [silent(effect)]) as registry:
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await registry.run("work")
        assert reason(lost.value)[0] is grpc.StatusCode.UNAVAILABLE
        assert content(await registry.run("work", earlier_attempts=1)) == "half"


class Stuck:
    """A function in a thread that looks at nothing, and is let go on."""

    def __init__(self, effect: EffectClass) -> None:
        self.begun: list[int] = []
        self.let_go = threading.Event()

        @tool(
            name="work",
            category=Category.SAFE,
            effect=effect,
            timeout_seconds=600,
            heartbeat_seconds=1.0,
        )
        def work(context: ToolContext) -> int:
            """Get stuck until it is let go."""
            self.begun.append(context.attempt)
            self.let_go.wait()
            return context.attempt

        self.tool = work

    async def get_stuck(self, registry: Registry) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await registry.run("work")
        assert self.begun == [1]


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def look() -> str:
    """Look."""
    return "seen"


async def test_nothing_begins_beside_a_function_that_continues(database_url: str, tmp_path: Path) -> None:
    """Its thread cannot be stopped: one call would take all threads of the registry, one after the other."""
    stuck = Stuck(EffectClass.IDEMPOTENT)
    async with running(database_url, tmp_path, [stuck.tool, look], threads_max=2) as registry:
        try:
            await stuck.get_stuck(registry)
            for number in range(1, 4):
                late = await registry.run("work", earlier_attempts=number, timeout_seconds=0.1)
                assert outcome(late) == "FAILED TOOL_TIMEOUT"
            assert stuck.begun == [1]
            assert content(await registry.run("look", call="other")) == "seen"
            again = asyncio.ensure_future(registry.run("work", earlier_attempts=4))
        finally:
            stuck.let_go.set()
        assert content(await again) == 5
    assert stuck.begun == [1, 5]


@pytest.mark.parametrize("effect", [EffectClass.AT_MOST_ONCE, EffectClass.RECONCILABLE])
async def test_what_may_happen_once_is_of_unknown_outcome(
    database_url: str, tmp_path: Path, effect: EffectClass
) -> None:
    async with running(database_url, tmp_path, [silent(effect)]) as registry:
        if attempts := int(effect is EffectClass.RECONCILABLE):
            assert await refusal(registry.run("work")) == "DEPENDENCY_UNAVAILABLE"
        for _ in range(2):
            assert outcome(await registry.run("work", earlier_attempts=attempts)) == "UNKNOWN OUTCOME_UNKNOWN"


async def test_a_tool_in_a_process_of_its_own_is_ended(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, [process_tools.get_stuck]) as registry:
        with pytest.raises(grpc.aio.AioRpcError):
            await registry.run("get_stuck")
        assert registry.executor.running_count == 0


async def test_progress_and_open_questions_are_signs_of_life(database_url: str, tmp_path: Path) -> None:
    """Also those of a thread."""
    options: dict[str, Any] = {"category": Category.SAFE, "timeout_seconds": 60, "heartbeat_seconds": 3.0}

    @tool(name="tell", effect=EffectClass.IDEMPOTENT, **options)
    def tell(context: ToolContext) -> str:
        """Tell progress for longer than it may be silent."""
        for _ in range(60):
            context.progress(message="on it")
            context.wait_cancelled(0.06)
        return "told" if not context.cancelled else "lost"

    @tool(name="ask", **options)
    async def ask(context: ToolContext) -> str:
        """Ask."""
        return await context.ask("Go on?")

    async with running(database_url, tmp_path, [tell, ask]) as registry:
        assert outcome(await registry.run("ask", call="asks")) == "INPUT_REQUIRED"
        assert content(await registry.run("tell", call="tells")) == "told"
        assert outcome(await registry.run("ask", call="asks")) == "INPUT_REQUIRED", "it waits still"
