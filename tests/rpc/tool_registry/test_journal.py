"""Effects happen at most once despite crashes, cancels and retries (I5, I12, OPS-5, HITL-3, decision 14, C5, C9)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest

from pawl.chassis.ids import CallId, CallKey, StoreId
from pawl.errors import DependencyUnavailable
from pawl.server.db.database import Database
from pawl.tool_registry.execution.executor import ExecutorOptions
from pawl.tool_registry.execution.store.journal import PostgresExecutionJournal
from pawl.tool_registry.rules.execution import succeeded
from pawl.tools import Category, EffectClass, ReconcileResult, cannot_say, did_not_happen, happened, tool
from pawl.values import Outcome
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, refusal, running
from tests.rpc.tool_registry.world import World, database_is_told, dead_process, execute


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, world: World) -> Any:
    async with running(database_url, tmp_path, world.tools()) as registry:
        yield registry


@pytest.mark.parametrize(
    ("finding", "expected", "effects"),
    [
        (happened("order 7"), ("SUCCEEDED", "order 7"), ["asked about call"]),
        (did_not_happen(), ("SUCCEEDED", "ordered"), ["asked about call", "ordered"]),
        (cannot_say(), ("UNKNOWN OUTCOME_UNKNOWN", None), ["asked about call"]),
    ],
)
async def test_reconcilable_tool_is_asked_for_a_calls_outcome(  # noqa: PLR0917
    database_url: str, registry: Registry, world: World, finding: ReconcileResult, expected: Any, effects: list[str]
) -> None:
    world.finding = finding
    async with dead_process(database_url, registry, "order", "call"):
        result = await registry.run("order", earlier_attempts=1)
        assert outcome(result) == expected[0]
        assert expected[1] in (None, content(result))
        assert await registry.run("order") == result
    assert world.effects == effects


async def test_process_that_lost_its_lease_stops_repeatable_calls(
    database_url: str, tmp_path: Path, world: World
) -> None:
    """I4: otherwise a call could still have its effect after another process had reported that it did not happen."""
    options = ExecutorOptions(lease_seconds=2, renew_seconds=0.2, grace_seconds=0.1)
    async with running(database_url, tmp_path, world.tools(), options=options, drain_seconds=0.1) as registry:
        asked = asyncio.ensure_future(registry.run("order", {"wait": True}, timeout_seconds=60))
        await world.begun.wait()
        await execute(database_url, "ALTER TABLE tool_registry.instances RENAME TO hidden")
        try:
            assert await refusal(asked) == "DEPENDENCY_UNAVAILABLE"
        finally:
            await execute(database_url, "ALTER TABLE tool_registry.hidden RENAME TO instances")
        world.finding = did_not_happen()
        world.release.set()

        async def runs_again() -> bool:
            try:
                return bool(content(await registry.run("order", {"wait": True})) == "ordered")
            except grpc.aio.AioRpcError:
                return False

        await until(runs_again)
    assert world.effects == ["asked about call", "ordered"]


async def test_old_entries_are_deleted_but_recent_entries_are_kept(database_url: str, registry: Registry) -> None:
    """I19: only entries that ended long enough ago are deleted."""
    await registry.run("pay", call="old")
    await registry.run("pay", call="young")
    await execute(
        database_url, "UPDATE tool_registry.executions SET ended_at = now() - interval '2 days' WHERE call_id = 'old'"
    )
    async with Database(database_url, application_name="test") as database:
        journal = PostgresExecutionJournal(database, instance_id="x", lease_seconds=1)
        assert await journal.forget(86400) == 1
        assert await journal.find(CallKey(StoreId("acme"), CallId("old"))) is None
        assert await journal.find(CallKey(StoreId("acme"), CallId("young"))) is not None


class FlakyJournal:
    def __init__(self, journal: PostgresExecutionJournal, faults: dict[str, list[str]]) -> None:
        self._journal = journal
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._journal, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            fault = self._faults[name].pop(0) if self._faults.get(name) else ""
            if fault == "before":
                raise DependencyUnavailable
            if fault == "broken":
                raise asyncpg.InternalServerError("could not read block")
            result = await method(*args, **kwargs)
            if fault == "after":
                raise DependencyUnavailable
            if fault == "broken after":
                raise asyncpg.InternalServerError("could not write block")
            return result

        return call


async def test_concurrent_replicas_run_a_call_once_and_return_the_same_result(
    database_url: str, tmp_path: Path, registry: Registry, world: World
) -> None:
    """I13: ids are per store. A different call with the same id in one store is rejected."""
    async with running(database_url, tmp_path, world.tools(), name="b") as other:
        asked = [asyncio.ensure_future(replica.run("pay", {"wait": True})) for replica in (registry, other) * 3]
        await world.begun.wait()
        world.release.set()
        results = await asyncio.gather(*asked)
        assert {content(result) for result in results} == {"paid 1"}
        assert await other.run("pay", {"wait": True}, earlier_attempts=1) == results[0]
    assert world.effects == ["paid 1"]
    for stream in (registry.stream("pay", {"amount": 2}), registry.stream("order")):
        assert await refusal(stream) == "INVALID_ARGUMENTS"
    await registry.run("pay", {"amount": 2}, who=context(store="other"))
    assert world.effects == ["paid 1", "paid 2"]


async def test_outcome_of_a_call_in_a_dead_process_is_unknown_until_an_operator_resolves_it(
    database_url: str, registry: Registry, world: World
) -> None:
    """I4, I5, C5, D9: the call is never repeated silently, even if the process turns out to be alive."""
    async with dead_process(database_url, registry, "pay", "call"):
        await database_is_told(database_url, alive=True)
        asked = asyncio.ensure_future(registry.run("pay"))
        done, _ = await asyncio.wait({asked}, timeout=0.3)
        assert not done, "a live process is awaited"
        await database_is_told(database_url, alive=False)
        first = await asked
        assert outcome(first) == "UNKNOWN OUTCOME_UNKNOWN"
        await database_is_told(database_url, alive=True)
        async with Database(database_url, application_name="dead") as database:
            journal = PostgresExecutionJournal(database, instance_id="dead", lease_seconds=60)
            stands = await journal.end(CallKey(StoreId("acme"), CallId("call")), succeeded(b'"late"', 1.0))
            assert stands.outcome is Outcome.UNKNOWN, "its late result changes nothing"
        assert (await registry.run("pay", earlier_attempts=5), world.effects) == (first, [])
        again = await registry.run("pay", unknowns_resolved=1)
        assert (content(again), await registry.run("pay", unknowns_resolved=1)) == ("paid 1", again)
    assert world.effects == ["paid 1"]


async def test_gated_call_never_runs_without_its_approval(registry: Registry, world: World) -> None:
    """I9, I10, HITL-3, C6: an approval is valid for one call with its arguments, in one run and store."""
    digest = (await registry.check("delete", {"path": "a"})).digest
    attempts: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("delete", {"path": "a"}, {}),
        ("delete", {"path": "a"}, {"approved_digest": "0" * 64}),
        ("delete", {"path": "b"}, {"approved_digest": digest}),
        ("delete", {"path": "a"}, {"approved_digest": digest, "call": "other"}),
        ("delete", {"path": "a"}, {"approved_digest": digest, "who": context(run="other")}),
        ("delete", {"path": "a"}, {"approved_digest": digest, "who": context(store="other")}),
        ("pay", {}, {"approved_digest": "0" * 64, "call": "ungated"}),
    ]
    for name, arguments, more in attempts:
        assert await refusal(registry.stream(name, arguments, **more)) == "APPROVAL_REQUIRED", (name, arguments, more)
    assert world.effects == []
    assert content(await registry.run("delete", {"path": "a"}, approved_digest=digest)) == "deleted a"


@pytest.mark.parametrize("name", ["pay", "order"])
async def test_call_whose_start_was_not_acknowledged_runs_once_on_retry(
    database_url: str, tmp_path: Path, world: World, name: str
) -> None:
    """Until the start is acknowledged, the process runs nothing, so the outcome is not in doubt."""
    faults: dict[str, list[str]] = {}
    async with running(
        database_url, tmp_path, world.tools(), wrap_journal=lambda journal: FlakyJournal(journal, faults)
    ) as registry:
        for number, fault in enumerate(("before", "after", "broken", "broken after"), 1):
            faults["begin"] = [fault]
            expected = "INTERNAL" if "broken" in fault else "DEPENDENCY_UNAVAILABLE"
            assert await refusal(registry.stream(name, call=f"c{number}")) == expected, fault
            assert outcome(await registry.run(name, call=f"c{number}", earlier_attempts=1)) == "SUCCEEDED", fault
            assert len(world.effects) == number


async def test_result_is_returned_only_after_it_is_stored(database_url: str, tmp_path: Path, world: World) -> None:
    """I8 for effects: callers never see a result that a crash could revert. A permanent fault is reported."""
    options = ExecutorOptions(grace_seconds=0.1, internal_seconds_max=0.5)
    faults: dict[str, list[str]] = {}
    async with running(
        database_url,
        tmp_path,
        world.tools(),
        options=options,
        wrap_journal=lambda journal: FlakyJournal(journal, faults),
    ) as registry:
        for number, some in enumerate((["before"] * 3, ["after"], ["broken after", "before"]), 1):
            faults["end"] = list(some)
            first = await registry.run("pay", call=f"c{number}")
            assert (content(first), await registry.run("pay", call=f"c{number}")) == ("paid 1", first)
            assert len(world.effects) == number
        faults["end"] = ["broken"] * 1000
        assert await refusal(registry.stream("pay", call="broken")) == "INTERNAL"
    assert len(faults["end"]) < 1000


@pytest.fixture
def unstoppable_threads() -> Iterator[threading.Event]:
    release = threading.Event()
    yield release
    release.set()


async def test_unstoppable_thread_is_reported_as_still_running(
    database_url: str, tmp_path: Path, unstoppable_threads: threading.Event
) -> None:
    """C5, I5: the effect of the tool may still happen. Every caller gets this result."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    @tool(category=Category.SAFE)
    def ship() -> str:
        """Ship."""
        loop.call_soon_threadsafe(begun.set)
        unstoppable_threads.wait(30)
        return "shipped"

    async with running(database_url, tmp_path, [ship]) as registry:
        asked = asyncio.ensure_future(registry.run("ship"))
        await begun.wait()
        answer = await registry.cancel()
        assert not answer.stopped
        assert (outcome(answer.result), await asked) == ("CANCELLED NOT_STOPPED", answer.result)
        unstoppable_threads.set()
        assert await registry.run("ship") == answer.result
        again = await registry.cancel()
        assert (again.stopped, again.result) == (False, answer.result)


async def test_a_call_without_a_journal_can_be_cancelled_on_any_replica(database_url: str, tmp_path: Path) -> None:
    """I12: the caller may hang, or lose its connection to the replica without ending its stream."""
    begun = asyncio.Event()

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def look() -> str:
        """Look forever."""
        begun.set()
        await asyncio.Event().wait()
        return "never"

    async with (
        running(database_url, tmp_path, [look]) as registry,
        running(database_url, tmp_path, [look], name="b") as other,
    ):
        asked = asyncio.ensure_future(registry.run("look", timeout_seconds=300))
        await begun.wait()
        assert (await other.cancel()).stopped
        assert (outcome(await asked), registry.executor.running_count) == ("CANCELLED CANCELLED", 0)


async def test_stop_gives_running_calls_a_grace_period(database_url: str, tmp_path: Path, world: World) -> None:
    """OPS-5: a call that ends in time is recorded with its result."""
    async with running(database_url, tmp_path, world.tools(), drain_seconds=20) as registry:
        stream = registry.stream("pay", {"wait": True})
        reading = asyncio.ensure_future(stream.read())
        await world.begun.wait()
        stream.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        asyncio.get_running_loop().call_later(0.2, world.release.set)
    assert world.effects == ["paid 1"]
    async with running(database_url, tmp_path, world.tools()) as registry:
        assert content(await registry.run("pay", {"wait": True})) == "paid 1"


async def test_the_actual_state_of_a_call_that_outlives_shutdown_is_recorded(
    database_url: str, tmp_path: Path, world: World
) -> None:
    """If the effect may have happened, the outcome is unknown. A reconcilable tool can report whether it happened."""
    async with running(database_url, tmp_path, world.tools(), drain_seconds=0.1) as registry:
        streams = [registry.stream(name, {"wait": True}, call=name) for name in ("pay", "order")]
        reading = [asyncio.ensure_future(stream.read()) for stream in streams]

        await until(lambda: registry.executor.running_count == 2 and world.begun.is_set())
    assert len(await asyncio.gather(*reading, return_exceptions=True)) == 2
    world.finding = happened("order 7")
    world.release.set()
    async with running(database_url, tmp_path, world.tools()) as registry:
        assert outcome(await registry.run("pay", {"wait": True}, call="pay")) == "UNKNOWN OUTCOME_UNKNOWN"
        assert content(await registry.run("order", {"wait": True}, call="order")) == "order 7"
    assert world.effects == ["asked about order"]


async def test_a_cancellation_works_on_any_replica_and_is_permanent(
    database_url: str, tmp_path: Path, registry: Registry, world: World
) -> None:
    """C5: a completed result never overwrites a cancel. I12: a call that is cancelled before its start never starts."""
    before = await registry.cancel("later")
    assert (before.stopped, before.HasField("result")) == (True, False)
    assert outcome(await registry.run("pay", call="later")) == "CANCELLED CANCELLED"
    async with running(database_url, tmp_path, world.tools(), name="b") as other:
        for call, replica in (("here", registry), ("there", other)):
            asked = asyncio.ensure_future(registry.run("pay", {"wait": True}, call=call))
            await world.begun.wait()
            answer = await replica.cancel(call, wait=10)
            assert (answer.stopped, outcome(answer.result)) == (True, "CANCELLED CANCELLED")
            assert await asked == await registry.run("pay", {"wait": True}, call=call) == answer.result
            assert (await registry.cancel(call)).result == answer.result
            world.begun.clear()
    world.release.set()
    assert world.effects == []
    done = await registry.run("pay", call="done")
    answer = await registry.cancel("done")
    assert (answer.stopped, answer.result) == (True, done), "an ended call is unchanged"
    for wait in (-1.0, 10.5, float("nan")):
        assert await refusal(registry.cancel(wait=wait)) == "INVALID_FIELD"


async def test_cancelled_call_in_a_dead_process_has_an_unknown_outcome(
    database_url: str, registry: Registry, world: World
) -> None:
    """I5: no part of the call is still running, but nobody knows whether it took effect."""
    async with dead_process(database_url, registry, "pay", "call"):
        await database_is_told(database_url, alive=True)
        assert not (await registry.cancel(wait=0.2)).stopped
        await database_is_told(database_url, alive=False)
        answer = await registry.cancel()
        assert (answer.stopped, outcome(answer.result)) == (True, "UNKNOWN OUTCOME_UNKNOWN")
    assert world.effects == []
