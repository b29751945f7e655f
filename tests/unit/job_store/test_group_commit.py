"""Group commit: the order of operations. No caller waits forever, and no operation fails because of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import RunId, StoreId
from pawl.errors import DependencyUnavailable, LeaseLost, Overloaded, PawlError, ShuttingDown
from pawl.job_store.ledger import group_commit
from pawl.job_store.ledger.group_commit import WORK_MAX, GroupCommit, Lane, Lanes
from pawl.job_store.ledger.ports import GroupConflict, LogRow, Written
from pawl.job_store.ledger.rules.unit_of_work import Operation, RowKeys, UnitOfWork
from tests.poll import until

STORE = StoreId("s")


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
        self.alone: set[str] = set()
        self.steps: list[str] = []
        self.steps_raise: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()

    async def write_steps(self, operations: Sequence[Operation[Any]]) -> Written:
        names = [operation.name for operation in operations if isinstance(operation, Named)]
        if self.steps_raise is not None:
            raise self.steps_raise
        self.steps += [name for name in names if name in self.alone]
        return Written(outcomes=[name if name in self.alone else None for name in names])

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

    def batches_written(self, sizes: Iterable[int]) -> None: ...

    def work_ended(self, *work: Sequence[object]) -> None: ...

    def refused(self, error: PawlError) -> None:
        self.reasons.append(error.reason)


@pytest.fixture
def journal() -> ScriptedJournal:
    return ScriptedJournal()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@asynccontextmanager
async def running(
    journal: ScriptedJournal, recorder: Recorder, *, one_store: bool = False
) -> AsyncIterator[GroupCommit]:
    other: Any = recorder
    async with GroupCommit(
        journal, other, other, monotonic=lambda: 0.0, lifecycle_written=lambda: None, one_store=one_store
    ) as commit:
        yield commit


@pytest.fixture
async def commit(journal: ScriptedJournal, recorder: Recorder) -> AsyncIterator[GroupCommit]:
    async with running(journal, recorder) as commit:
        yield commit


async def run_all(commit: GroupCommit, *names: str, size_bytes: int = 1) -> list[Any]:
    """Return the answer to each operation, or the type of its error."""
    operations = (commit.run(Named(name), size_bytes=size_bytes, store_id=STORE) for name in names)
    answers = await asyncio.gather(*operations, return_exceptions=True)
    return [type(answer) if isinstance(answer, Exception) else answer for answer in answers]


def starting(commit: GroupCommit, name: str) -> asyncio.Task[str]:
    return asyncio.create_task(commit.run(Named(name), size_bytes=1, store_id=STORE))


async def test_operations_that_arrive_during_a_write_share_the_next_group(
    journal: ScriptedJournal, recorder: Recorder
) -> None:
    async with running(journal, recorder) as commit:
        journal.open.clear()
        first = starting(commit, "first")
        await until(lambda: len(journal.groups) == 1)
        rest = asyncio.create_task(run_all(commit, "a", "b", "c"))
        await asyncio.sleep(0)
        journal.open.set()
        assert [await first, await rest] == ["first", ["a", "b", "c"]]
    assert journal.groups == [["first"], ["a", "b", "c"]]
    assert (recorder.sizes, recorder.events) == ([1, 3], [b"first", b"a", b"b", b"c"])


@pytest.mark.parametrize("in_background", [True, False])
async def test_a_foreground_operation_waits_for_company_only_if_others_of_its_kind_are_usual(
    journal: ScriptedJournal, commit: GroupCommit, in_background: bool
) -> None:
    def start(name: str, *, in_background: bool = False) -> asyncio.Task[str]:
        run = commit.run(Named(name), size_bytes=1, store_id=STORE, in_background=in_background)
        return asyncio.create_task(run)

    journal.open.clear()
    crowd = [start("first")]
    await until(lambda: len(journal.groups) == 1)
    crowd += [start("more", in_background=in_background) for _ in range(8)]
    await asyncio.sleep(0)
    journal.open.set()
    await asyncio.gather(*crowd)
    one = start("one")
    for _ in range(5):
        await asyncio.sleep(0)
    await asyncio.gather(one, start("two"))
    assert journal.groups[2:] == ([["one"], ["two"]] if in_background else [["one", "two"]])


async def test_a_foreground_operation_does_not_wait_while_background_operations_wait_for_company(
    journal: ScriptedJournal, commit: GroupCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(name: str, *, in_background: bool = True) -> asyncio.Task[str]:
        run = commit.run(Named(name), size_bytes=1, store_id=STORE, in_background=in_background)
        return asyncio.create_task(run)

    monkeypatch.setattr(group_commit, "_GATHER_SECONDS", 30.0)
    journal.open.clear()
    crowd = [start("first")]
    await until(lambda: len(journal.groups) == 1)
    crowd += [start("more") for _ in range(8)]
    await asyncio.sleep(0)
    journal.open.set()
    await asyncio.gather(*crowd)
    one = start("one")
    for _ in range(5):
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await asyncio.gather(one, start("two", in_background=False))
    assert journal.groups[2:] == [["one", "two"]]


async def test_groups_are_limited_in_number_and_bytes(journal: ScriptedJournal, commit: GroupCommit) -> None:
    await run_all(commit, *map(str, range(group_commit.OPERATIONS_MAX + 1)))
    assert max(map(len, journal.groups)) == group_commit.OPERATIONS_MAX
    journal.groups.clear()
    await run_all(commit, "a", "b", "c", size_bytes=group_commit.GROUP_BYTES_MAX)
    assert journal.groups == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("faults", "names", "answers"),
    [
        ({"refuses": {"bad": LeaseLost()}}, ["good", "bad"], ["good", LeaseLost]),
        ({"raises": [GroupConflict()] * 100}, ["a"], [DependencyUnavailable]),
        ({"raises": [DependencyUnavailable()]}, ["a", "b"], [DependencyUnavailable] * 2),
        ({"poison": "poison"}, ["a", "poison", "b"], ["a", ValueError, "b"]),
        ({"alone": {"step"}, "steps_raise": DependencyUnavailable()}, ["step"], [DependencyUnavailable]),
        ({"alone": {"step"}, "steps_raise": GroupConflict()}, ["step", "command"], ["step", "command"]),
        ({"alone": {"step"}, "steps_raise": ValueError("it does not fit")}, ["step", "command"], ["step", "command"]),
    ],
    ids=["refusal", "conflicts", "outage", "poison", "outage at a step", "conflict at a step", "poisonous step"],
)
async def test_a_fault_fails_only_the_operations_that_it_affects(
    journal: ScriptedJournal, commit: GroupCommit, faults: dict[str, Any], names: list[str], answers: list[Any]
) -> None:
    """I20: operations that can be written alone or in the next group do not fail."""
    for name, value in faults.items():
        setattr(journal, name, value)
    assert await run_all(commit, *names) == answers
    if "steps_raise" in faults:
        assert journal.groups == [names] * (answers == names), "only after an outage the group is not written"
    journal.raises, journal.steps_raise = [], None
    assert await run_all(commit, "later") == ["later"]


async def test_a_failed_announcement_does_not_stop_the_writer(recorder: Recorder, commit: GroupCommit) -> None:
    recorder.fails = True
    assert [await run_all(commit, name) for name in "ab"] == [["a"], ["b"]]


async def test_refusals_are_counted_by_reason(
    journal: ScriptedJournal, recorder: Recorder, commit: GroupCommit
) -> None:
    journal.refuses = {"bad": LeaseLost()}
    await run_all(commit, "good", "bad")
    assert recorder.reasons == ["LEASE_LOST"]


async def test_an_unexpected_error_never_leaves_callers_waiting(
    recorder: Recorder, commit: GroupCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(60):
        with monkeypatch.context() as broken:
            broken.setattr(recorder, "group_written", lambda **_: 1 // 0)
            assert [await run_all(commit, "a") for _ in range(3)] == [[ZeroDivisionError]] * 3
        assert await run_all(commit, "b") == ["b"]


async def test_a_cancelled_caller_does_not_affect_others(journal: ScriptedJournal, commit: GroupCommit) -> None:
    journal.open.clear()
    gone = starting(commit, "gone")
    await until(lambda: len(journal.groups) == 1)
    gone.cancel()
    never_taken = starting(commit, "never taken")
    await asyncio.sleep(0)
    never_taken.cancel()
    stays = starting(commit, "stays")
    await asyncio.sleep(0)
    journal.open.set()
    assert (await stays, journal.groups) == ("stays", [["gone"], ["stays"]])


async def test_the_queue_is_bounded(commit: GroupCommit, monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: operations over the limit are refused."""
    monkeypatch.setattr(group_commit, "WAITING_MAX", 2)
    assert await run_all(commit, "a", "b", "c") == ["a", "b", Overloaded]


async def test_shutdown_writes_waiting_operations_and_refuses_new_ones(
    journal: ScriptedJournal, recorder: Recorder
) -> None:
    async with running(journal, recorder) as commit:
        journal.open.clear()
        waiting = [starting(commit, name) for name in ("a", "b")]
        await until(lambda: len(journal.groups) == 1)
        asyncio.get_running_loop().call_soon(journal.open.set)
    assert [await task for task in waiting] == ["a", "b"]
    with pytest.raises(ShuttingDown):
        await commit.run(Named("late"), size_bytes=1, store_id=STORE)


# Lane, store, number and size; size 0 means that the caller has gone.
Waiting = tuple[Lane, str, int, int]

WAITING = st.lists(st.tuples(st.sampled_from(Lane), st.sampled_from("abc"), st.integers(0, 30)), max_size=300)


def filled(drawn: list[tuple[Lane, str, int]]) -> Lanes[Waiting]:
    lanes = Lanes[Waiting]()
    for number, (lane, store, size) in enumerate(drawn):
        lanes.put(lane, StoreId(store), (lane, store, number, size))
    return lanes


def groups(lanes: Lanes[Waiting], **limits: Any) -> list[list[Waiting]]:
    found = []
    while lanes:
        found.append(lanes.next_group(lambda each: each[3], **limits))
    return found


@given(drawn=WAITING, operations_max=st.integers(64, 128), bytes_max=st.integers(1, 2000), one_store=st.booleans())
def test_operations_are_written_once_and_in_order_in_bounded_groups(
    drawn: list[tuple[Lane, str, int]], operations_max: int, bytes_max: int, one_store: bool
) -> None:
    found = groups(filled(drawn), operations_max=operations_max, bytes_max=bytes_max, one_store=one_store)
    assert sorted(each[2] for group in found for each in group) == [n for n, each in enumerate(drawn) if each[2]]
    for lane in Lane:
        for store in "abc":
            numbers = [each[2] for group in found for each in group if each[:2] == (lane, store)]
            assert numbers == sorted(numbers)
    for group in found:
        assert len(group) <= operations_max
        assert sum(each[3] for each in group[:-1]) < bytes_max
        assert not one_store or len({each[1] for each in group}) <= 1


def test_a_store_with_only_the_runs_own_work_gets_one_of_the_first_two_groups() -> None:
    lanes = filled([(Lane.PEOPLE, store, 1) for store in "abcdef"] + [(Lane.WORK, "w", 1)])
    first_two = [lanes.next_group(lambda each: each[3], operations_max=9, bytes_max=9, one_store=True) for _ in "12"]
    assert "w" in {each[1] for group in first_two for each in group}


async def test_groups_of_one_store_are_written_in_parallel(journal: ScriptedJournal, recorder: Recorder) -> None:
    names = [f"store-{number}" for number in range(group_commit.STORE_QUEUES * 4)]
    async with running(journal, recorder, one_store=True) as commit:
        journal.open.clear()
        done = asyncio.gather(*(commit.run(Named(name), size_bytes=1, store_id=StoreId(name)) for name in names))
        await until(lambda: len(journal.groups) == group_commit.STORE_QUEUES)
        journal.open.set()
        assert await done == names
    assert all(len(group) == 1 for group in journal.groups)


@given(people=st.integers(0, 300), work=st.integers(0, 300))
def test_user_requests_come_first_but_the_runs_own_work_keeps_its_quota(people: int, work: int) -> None:
    lanes = filled([(Lane.PEOPLE, "a", 1)] * people + [(Lane.WORK, "a", 1)] * work)
    group = [each[0] for each in lanes.next_group(lambda each: each[3], operations_max=128, bytes_max=10_000)]
    assert group == sorted(group, key=lambda lane: lane is Lane.WORK)
    if people:
        assert group.count(Lane.WORK) == min(work, WORK_MAX)
        assert group.count(Lane.PEOPLE) == min(people, 128 - min(work, WORK_MAX))
    else:
        assert len(group) == min(work, 128)


def test_large_user_messages_leave_room_for_work() -> None:
    lanes = filled([(Lane.PEOPLE, "a", 40)] * 5 + [(Lane.WORK, "b", 1)])
    group = lanes.next_group(lambda each: each[3], operations_max=128, bytes_max=100)
    assert [each[0] for each in group] == [Lane.PEOPLE, Lane.PEOPLE, Lane.WORK]


@given(noise=st.integers(0, 1000), lane=st.sampled_from(Lane), others=st.integers(0, 60))
def test_a_busy_store_does_not_delay_others(noise: int, lane: Lane, others: int) -> None:
    lanes = filled([(lane, "noisy", 1)] * noise)
    for number in range(others):
        lanes.put(lane, StoreId(f"quiet-{number}"), (lane, "quiet", number, 1))
    group = lanes.next_group(lambda each: each[3], operations_max=128, bytes_max=10_000)
    assert sum(each[1] == "quiet" for each in group) == others


async def test_steps_are_written_at_once_and_the_other_operations_share_a_transaction(
    journal: ScriptedJournal, recorder: Recorder
) -> None:
    journal.alone = {"step", "other"}
    async with running(journal, recorder) as commit:
        for names in (["step", "command", "other", "late"], ["step"]):
            assert await run_all(commit, *names) == names
    assert (journal.steps, journal.groups) == (["step", "other", "step"], [["command", "late"]])
    assert recorder.sizes == [2, 2, 1]
