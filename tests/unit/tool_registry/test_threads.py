"""Threads of tools: reused, and never in each other's way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.tool_registry.adapters.python.runner import PythonRunner
from tests.poll import PATIENCE_SECONDS


async def test_a_timeout_error_of_a_preview_is_not_that_it_takes_too_long() -> None:
    def preview() -> None:
        raise TimeoutError("of its own")

    async with PythonRunner(threads_max=1) as runner:
        with pytest.raises(TimeoutError, match="of its own"):
            await runner.answer("tool", preview)


async def test_a_function_that_raises_stop_iteration_fails_and_leaves_its_place() -> None:
    tool: Any = SimpleNamespace(bind=lambda *_: lambda: next(iter(())), is_async=False, marks_begun=True)
    context: Any = None
    async with PythonRunner(threads_max=1) as runner:
        for _ in range(2):
            async with asyncio.timeout(PATIENCE_SECONDS):
                with pytest.raises(RuntimeError, match="StopIteration"):
                    await runner.start(tool, {}, context).result()
        assert runner.threads_busy == 0
