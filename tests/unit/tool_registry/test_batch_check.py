"""What becomes of calls that only read when their check, or their end, is slow or cannot be written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.chassis.ids import CallId, CallKey, StoreId
from pawl.errors import DependencyUnavailable
from pawl.tool_registry.app.execution.batch_check import BatchCheck
from pawl.tool_registry.app.execution.execution import CancelCause, Execution
from pawl.tool_registry.app.policy.admission import ReadTimeouts
from pawl.tool_registry.app.policy.audit import AuditTrail
from pawl.tool_registry.app.policy.call import Proposal
from pawl.tool_registry.domain.definition import EffectClass
from pawl.tool_registry.domain.execution import ExecutionResult, succeeded
from tests.fakes import virtual_time

STORE = StoreId("acme")
RESULT = succeeded(b"1", 0.0)
TIMEOUTS = ReadTimeouts(default=10.0, most=10.0)

Course = Callable[["World", Any, Execution], Coroutine[Any, Any, None]]


class World:
    """A check of calls that are given as what becomes of each; the audit log takes a second for each append."""

    def __init__(self, *courses: Course) -> None:
        self.written: list[str] = []
        self.executions: list[Execution] = []
        self.kept: list[Execution] = []
        self.is_log_there = True
        self.cached: ExecutionResult | None = None
        self.appends = 0
        self._courses = dict(zip("abc", courses, strict=False))
        self._tasks: list[asyncio.Task[None]] = []
        self.trail = AuditTrail(self, lambda: 0.0)  # type: ignore[arg-type]
        audit: Any = SimpleNamespace(write=self.trail.write, ended=self.ended)
        self._jobs = [
            SimpleNamespace(
                context=SimpleNamespace(call_id=CallId(name)), proposal=Proposal(drafts=(_draft(f"{name} PROPOSED"),))
            )
            for name in self._courses
        ]
        admission: Any = SimpleNamespace(
            cache=SimpleNamespace(find=lambda _: self.cached),
            judge_batch=self._judge_batch,
            reads_of=lambda *_: self._jobs,
        )
        self.checks = BatchCheck(admission, self, audit)  # type: ignore[arg-type]

    async def append(self, drafts: Sequence[Any]) -> frozenset[StoreId]:
        """Be the log."""
        self.appends += 1
        await asyncio.sleep(1.0)
        if not self.is_log_there:
            raise DependencyUnavailable
        self.written += [draft.what for draft in drafts]
        return frozenset()

    async def begin(self, job: Any) -> Execution:
        """Be the executor."""
        key = CallKey(STORE, job.context.call_id)
        execution = Execution(key, fingerprint="", effect=EffectClass.READ_ONLY, answers=())
        self.executions.append(execution)
        course = self._courses[job.context.call_id]
        self._tasks.append(asyncio.ensure_future(course(self, job, execution)))
        return execution

    def keep(self, execution: Execution) -> None:
        """Be the executor."""
        self.kept.append(execution)

    async def end(self, job: Any, execution: Execution) -> None:
        """End a call, and write that down."""
        await self.ended(job, RESULT)
        execution.finish(RESULT)

    async def ended(self, job: Any, result: ExecutionResult, *, reason: str = "") -> None:
        """Be the trail as far as ends go."""
        name = job.context.call_id
        await self.trail.write([*job.proposal.claim(with_end=True), _draft(f"{name} {reason or 'RETURNED'}")])

    async def _judge_batch(self, proposed: object, known_names: object) -> list[Any]:
        return [
            SimpleNamespace(verdict=SimpleNamespace(call_id=job.context.call_id), draft=job.proposal.drafts[0])
            for job in self._jobs
        ]


def _draft(what: str) -> Any:
    return SimpleNamespace(store_id=STORE, what=what)


async def quick(world: World, job: Any, execution: Execution) -> None:
    await world.end(job, execution)


async def slow(world: World, job: Any, execution: Execution) -> None:
    await asyncio.sleep(0.5)
    await world.end(job, execution)


async def endless(world: World, job: Any, execution: Execution) -> None:
    """Nothing."""


async def lost(world: World, job: Any, execution: Execution) -> None:
    job.proposal.claim(with_end=True)
    execution.fail(DependencyUnavailable())


def test_no_check_is_written_after_the_end_of_its_call() -> None:
    async def main() -> None:
        world = World(slow, quick)
        checked = await world.checks.check([], [], TIMEOUTS)
        assert sorted(world.written) == ["a PROPOSED", "a RETURNED", "b PROPOSED", "b RETURNED"]
        for name in "ab":
            assert world.written.index(f"{name} PROPOSED") < world.written.index(f"{name} RETURNED")
        assert all(result is not None for _, result in checked)

    virtual_time.run(main())


def test_all_that_the_cache_has_is_written_down_together() -> None:
    async def main() -> None:
        world = World(endless, endless, endless)
        world.cached = RESULT
        checked = await world.checks.check([], [], TIMEOUTS)
        assert [result for _, result in checked] == [RESULT] * 3
        assert world.written == [f"{name} {what}" for name in "abc" for what in ("PROPOSED", "CACHED")]
        assert world.appends == 1
        assert not world.executions

    virtual_time.run(main())


def test_what_goes_on_is_kept_for_who_executes_it_and_its_check_is_written_before() -> None:
    async def main() -> None:
        world = World(endless)
        ((_, result),) = await world.checks.check([], [], TIMEOUTS)
        assert result is None
        assert world.written == ["a PROPOSED"]
        assert world.kept == world.executions

    virtual_time.run(main())


def test_what_goes_on_is_left_if_its_check_cannot_be_written() -> None:
    async def main() -> None:
        world = World(endless)
        world.is_log_there = False
        with pytest.raises(DependencyUnavailable):
            await world.checks.check([], [], TIMEOUTS)
        assert not world.kept
        assert world.executions[0].cancelled.result() is CancelCause.CALLERS_GONE

    virtual_time.run(main())


def test_what_goes_on_is_left_if_the_caller_leaves_while_its_check_is_written() -> None:
    async def main() -> None:
        world = World(endless)
        asked = asyncio.ensure_future(world.checks.check([], [], TIMEOUTS))
        await asyncio.sleep(0.5)
        asked.cancel()
        await asyncio.wait([asked])
        assert not world.kept
        assert world.executions[0].cancelled.result() is CancelCause.CALLERS_GONE

    virtual_time.run(main())


def test_no_verdict_is_given_whose_entry_was_lost_with_the_end_of_its_call() -> None:
    async def main() -> None:
        world = World(lost)
        with pytest.raises(DependencyUnavailable):
            await world.checks.check([], [], TIMEOUTS)

    virtual_time.run(main())
