"""Group commit: no caller waits for ever, and no operation fails for the fault of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pawl.chassis.ids import RunId, StoreId
from pawl.errors import DependencyUnavailable, LeaseLost, Overloaded, PawlError, ShuttingDown
from pawl.job_store.ledger import group_commit
from pawl.job_store.ledger.group_commit import GroupCommit
from pawl.job_store.ledger.ports import GroupConflict, LogRow, Operation, Written
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork


@dataclass(frozen=True)
class Named:
    name: str
    row_keys: RowKeys = field(default_factory=RowKeys)

    def apply(self, unit: UnitOfWork) -> str:
        return self.name


class ScriptedJournal:
    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.raises: list[Exception] = []
        self.refuses: dict[str, PawlError] = {}
        self.poison: str | None = None
        self.open = asyncio.Event()
        self.open.set()

    async def write(self, operations: Sequence[Operation[Any]]) -> Written:
        names = [operation.name for operation in operations if isinstance(operation, Named)]
        self.groups.append(names)
        await self.open.wait()
        if self.raises:
            raise self.raises.pop(0)
        if self.poison in names:
            raise ValueError("the database cannot hold this")
        return Written(
            outcomes=[self.refuses.get(name, name) for name in names],
            events=[
                LogRow(store_id=StoreId("s"), run_id=RunId("r"), last_seq=1, first_seq=1, events=name.encode())
                for name in names
            ],
            wakeups=[],
            work_ready=False,
            lifecycle_count=1,
        )


class Recorder:
    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.fails = False
        self.sizes: list[int] = []
        self.reasons: list[str] = []

    async def publish(self, events: Sequence[LogRow]) -> None:
        if self.fails:
            raise ValueError("no announcement")
        self.events += [row.events for row in events]

    def group_written(self, *, operations: int, seconds: float) -> None:
        self.sizes.append(operations)

    def refused(self, error: PawlError) -> None:
        self.reasons.append(error.reason)


@pytest.fixture
def journal() -> ScriptedJournal:
    return ScriptedJournal()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@asynccontextmanager
async def running(journal: ScriptedJournal, recorder: Recorder) -> AsyncIterator[GroupCommit]:
    everything_else: Any = recorder
    async with GroupCommit(
        journal, everything_else, everything_else, monotonic=lambda: 0.0, lifecycle_written=lambda: None
    ) as commit:
        yield commit


async def run_all(commit: GroupCommit, names: Sequence[str], *, size_bytes: int = 1) -> list[Any]:
    operations = [Named(name) for name in names]
    return await asyncio.gather(
        *(commit.run(operation, size_bytes=size_bytes) for operation in operations), return_exceptions=True
    )


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0)


async def test_operations_that_arrive_during_a_write_share_the_next_group(
    journal: ScriptedJournal, recorder: Recorder
) -> None:
    async with running(journal, recorder) as commit:
        journal.open.clear()
        first = asyncio.create_task(commit.run(Named("first"), size_bytes=1))
        await until(lambda: len(journal.groups) == 1)
        rest = asyncio.create_task(run_all(commit, ["a", "b", "c"]))
        await asyncio.sleep(0)
        journal.open.set()
        assert [await first, await rest] == ["first", ["a", "b", "c"]]
    assert journal.groups == [["first"], ["a", "b", "c"]]
    assert recorder.sizes == [1, 3]
    assert recorder.events == [b"first", b"a", b"b", b"c"]


async def test_groups_are_limited_in_number_and_bytes(journal: ScriptedJournal, recorder: Recorder) -> None:
    async with running(journal, recorder) as commit:
        await run_all(commit, [str(number) for number in range(group_commit.OPERATIONS_MAX + 1)])
        assert max(map(len, journal.groups)) == group_commit.OPERATIONS_MAX
        journal.groups.clear()
        await run_all(commit, ["a", "b", "c"], size_bytes=group_commit.GROUP_BYTES_MAX)
        assert journal.groups == [["a"], ["b"], ["c"]]


async def test_a_refused_operation_does_not_affect_its_group(journal: ScriptedJournal, recorder: Recorder) -> None:
    journal.refuses = {"bad": LeaseLost()}
    async with running(journal, recorder) as commit:
        good, bad = await run_all(commit, ["good", "bad"])
    assert good == "good"
    assert isinstance(bad, LeaseLost)
    assert recorder.reasons == ["LEASE_LOST"]


async def test_endless_conflicts_are_reported_as_unavailable(journal: ScriptedJournal, recorder: Recorder) -> None:
    journal.raises = [GroupConflict()] * 100
    async with running(journal, recorder) as commit:
        assert [type(answer) for answer in await run_all(commit, ["a"])] == [DependencyUnavailable]


async def test_without_a_database_all_callers_of_the_group_get_an_error(
    journal: ScriptedJournal, recorder: Recorder
) -> None:
    journal.raises = [DependencyUnavailable()]
    async with running(journal, recorder) as commit:
        answers = await run_all(commit, ["a", "b"])
        assert [type(answer) for answer in answers] == [DependencyUnavailable] * 2
        assert await run_all(commit, ["a", "b"]) == ["a", "b"]


async def test_one_poison_operation_does_not_fail_the_others(journal: ScriptedJournal, recorder: Recorder) -> None:
    """I20."""
    journal.poison = "poison"
    async with running(journal, recorder) as commit:
        answers = await run_all(commit, ["a", "poison", "b"])
    assert [answers[0], type(answers[1]), answers[2]] == ["a", ValueError, "b"]


async def test_a_failed_announcement_does_not_stop_the_writer(journal: ScriptedJournal, recorder: Recorder) -> None:
    recorder.fails = True
    async with running(journal, recorder) as commit:
        assert await run_all(commit, ["a"]) == ["a"]
        assert await run_all(commit, ["b"]) == ["b"]


async def test_an_unexpected_error_never_leaves_callers_waiting(
    journal: ScriptedJournal, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(60), running(journal, recorder) as commit:
        with monkeypatch.context() as broken:
            broken.setattr(recorder, "group_written", lambda **_: 1 // 0)
            for _ in range(3):
                (answer,) = await run_all(commit, ["a"])
                assert isinstance(answer, ZeroDivisionError)
        assert await run_all(commit, ["b"]) == ["b"]


async def test_a_cancelled_caller_does_not_affect_others(journal: ScriptedJournal, recorder: Recorder) -> None:
    async with running(journal, recorder) as commit:
        journal.open.clear()
        gone = asyncio.create_task(commit.run(Named("gone"), size_bytes=1))
        await until(lambda: len(journal.groups) == 1)
        gone.cancel()
        never_taken = asyncio.create_task(commit.run(Named("never taken"), size_bytes=1))
        await asyncio.sleep(0)
        never_taken.cancel()
        stays = asyncio.create_task(commit.run(Named("stays"), size_bytes=1))
        await asyncio.sleep(0)
        journal.open.set()
        assert await stays == "stays"
    assert journal.groups == [["gone"], ["stays"]]


async def test_the_queue_is_bounded(
    journal: ScriptedJournal, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I19."""
    monkeypatch.setattr(group_commit, "WAITING_MAX", 2)
    async with running(journal, recorder) as commit:
        answers = await run_all(commit, ["a", "b", "c"])
    assert answers[:2] == ["a", "b"]
    assert isinstance(answers[2], Overloaded)


async def test_shutdown_writes_waiting_operations_and_refuses_new_ones(
    journal: ScriptedJournal, recorder: Recorder
) -> None:
    async with running(journal, recorder) as commit:
        journal.open.clear()
        waiting = [asyncio.create_task(commit.run(Named(name), size_bytes=1)) for name in ("a", "b")]
        await until(lambda: len(journal.groups) == 1)
        asyncio.get_running_loop().call_soon(journal.open.set)
    assert [await task for task in waiting] == ["a", "b"]
    with pytest.raises(ShuttingDown):
        await commit.run(Named("late"), size_bytes=1)
