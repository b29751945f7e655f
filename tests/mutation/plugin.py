"""Records which test runs which line, in this process and in every process that a test starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any

import coverage
import pytest

_VARIABLES = ("COVERAGE_PROCESS_START", "PYTEST_CURRENT_TEST")


def pytest_configure() -> None:
    """Pass coverage's environment variables to every child process, even one with its own environment."""
    start, start_async = subprocess.Popen.__init__, asyncio.create_subprocess_exec

    def popen(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **_measured(kwargs))

    async def create(*args: Any, **kwargs: Any) -> Any:
        return await start_async(*args, **_measured(kwargs))

    subprocess.Popen.__init__ = popen  # type: ignore[method-assign]
    asyncio.create_subprocess_exec = create


def _measured(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("env") is None:
        return kwargs
    return kwargs | {"env": dict(kwargs["env"]) | {name: os.environ[name] for name in _VARIABLES if name in os.environ}}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Record lines under the name of the current test."""
    recorder = coverage.Coverage.current()
    if recorder is not None:
        recorder.switch_context(item.nodeid)
    return (yield)
