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
    ExecutionContext,
    Tool,
    ToolContext,
    ToolDefinitionError,
    cannot_say,
    tool,
)
from tests.rpc.tool_registry import process_tools
from tests.rpc.tool_registry.registry import Registry, content, outcome, reason, running


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
    """A function in a thread that looks at nothing, and is let go on. It is reconciled if it is to be."""

    def __init__(self, effect: EffectClass) -> None:
        self.begun: list[int] = []
        self.asked: list[int] = []
        self.let_go = threading.Event()

        async def reconcile(context: ToolContext) -> Any:
            self.asked.append(context.attempt)
            return cannot_say()

        @tool(
            name="work",
            category=Category.SAFE,
            effect=effect,
            timeout_seconds=600,
            heartbeat_seconds=1.0,
            reconcile=reconcile if effect is EffectClass.RECONCILABLE else None,
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


@pytest.mark.parametrize("effect", [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT])
async def test_nothing_begins_beside_a_function_that_goes_on(
    database_url: str, tmp_path: Path, effect: EffectClass
) -> None:
    """Its thread cannot be stopped: one call would take all threads of the registry, one after the other."""
    stuck = Stuck(effect)
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


async def test_nobody_is_asked_what_happened_while_it_may_be_about_to(database_url: str, tmp_path: Path) -> None:
    stuck = Stuck(EffectClass.RECONCILABLE)
    async with running(database_url, tmp_path, [stuck.tool]) as registry:
        try:
            await stuck.get_stuck(registry)
            late = await registry.run("work", earlier_attempts=1, timeout_seconds=0.1)
            assert outcome(late) == "UNKNOWN OUTCOME_UNKNOWN"
            assert stuck.asked == []
        finally:
            stuck.let_go.set()
        assert outcome(await registry.run("work", earlier_attempts=1)) == "UNKNOWN OUTCOME_UNKNOWN"
    assert (stuck.begun, stuck.asked) == ([1], [])


async def test_what_may_happen_once_is_of_unknown_outcome(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, [silent(EffectClass.AT_MOST_ONCE)]) as registry:
        for _ in range(2):
            assert outcome(await registry.run("work")) == "UNKNOWN OUTCOME_UNKNOWN"


async def test_a_tool_that_can_say_what_happened_is_asked(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, [silent(EffectClass.RECONCILABLE)]) as registry:
        with pytest.raises(grpc.aio.AioRpcError):
            await registry.run("work")
        assert outcome(await registry.run("work", earlier_attempts=1)) == "UNKNOWN OUTCOME_UNKNOWN"


async def test_a_tool_in_a_process_of_its_own_is_ended(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, [process_tools.get_stuck]) as registry:
        with pytest.raises(grpc.aio.AioRpcError):
            await registry.run("get_stuck")
        assert registry.executor.running_count == 0


async def test_progress_checkpoints_and_open_questions_are_signs_of_life(database_url: str, tmp_path: Path) -> None:
    """Also those of a thread."""

    def options(name: str, effect: EffectClass = EffectClass.IDEMPOTENT) -> dict[str, Any]:
        common = {"category": Category.SAFE, "timeout_seconds": 60, "heartbeat_seconds": 3.0}
        return {"name": name, "effect": effect, **common}

    @tool(**options("tell"))
    def tell(context: ToolContext) -> str:
        """Tell progress."""
        for _ in range(60):
            context.progress(message="on it")
            context.wait_cancelled(0.06)
        return "told" if not context.cancelled else "lost"

    @tool(**options("keep"))
    async def keep(context: ToolContext) -> str:
        """Keep checkpoints."""
        for number in range(20):
            await context.checkpoint(number)
            await asyncio.sleep(0.18)
        return "kept"

    asked = threading.Event()

    @tool(**options("ask", EffectClass.AT_MOST_ONCE))
    async def ask(context: ToolContext) -> str:
        """Ask."""
        asked.set()
        return await context.ask("Go on?")

    async with running(database_url, tmp_path, [tell, keep, ask]) as registry:
        assert outcome(await registry.run("ask", call="asks")) == "INPUT_REQUIRED"
        assert content(await registry.run("tell", call="tells")) == "told"
        assert content(await registry.run("keep", call="keeps")) == "kept"
        assert asked.is_set()
        assert outcome(await registry.run("ask", call="asks")) == "INPUT_REQUIRED", "it waits still"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heartbeat_seconds": 0.01}, "must be 0.1 to 86400"),
        ({"heartbeat_seconds": -1}, "must be 0.1 to 86400"),
        ({"heartbeat_seconds": 5, "context": ExecutionContext.FRONTEND}, "that the registry runs"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolDefinitionError, match=said):

        @tool(category=Category.SAFE, **options)
        async def work() -> None:
            """Work."""
