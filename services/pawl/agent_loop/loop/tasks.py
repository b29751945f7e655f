"""Runs named tasks alongside a run's drive, and collects the facts that they return."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from pawl.agent_loop.loop.rules.fact import Fact


class Tasks:
    """One run's named tasks. Not safe to share between runs."""

    def __init__(self, on_end: asyncio.Event) -> None:
        self._on_end = on_end
        self._tasks: dict[str, asyncio.Task[Fact | None]] = {}
        self._facts: list[Fact] = []
        self._failure: BaseException | None = None

    @property
    def under_way(self) -> frozenset[str]:
        return frozenset(self._tasks)

    def start(self, name: str, work: Coroutine[Any, Any, Fact | None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda ended: self._ended(name, ended))

    def facts(self) -> tuple[Fact, ...]:
        """Return and clear the facts collected so far.

        Raises:
            Exception: A task raised this exception, which is a bug.
        """
        if self._failure is not None:
            raise self._failure
        facts, self._facts = tuple(self._facts), []
        return facts

    async def cut(self, name: str) -> bool:
        """Cancel a task and wait for it to end. Return whether it was cancelled before it had ended."""
        task = self._tasks.get(name)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    async def cancel_all(self) -> None:
        """Cancel all tasks and wait for them to end. Detached executions in the registry continue."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, name: str, task: asyncio.Task[Fact | None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if not task.cancelled():
            self._failure = self._failure or task.exception()
            fact = None if task.exception() else task.result()
            if fact is not None:
                self._facts.append(fact)
        self._on_end.set()
