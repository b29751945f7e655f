"""Effects happen at most once, whoever dies and whoever asks again. I5, HITL-3, decision 14, C5, C9."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest

from pawl.chassis.database import Database
from pawl.chassis.ids import CallId, CallKey, StoreId
from pawl.errors import DependencyUnavailable
from pawl.tool_registry.adapters.postgres.journal import PostgresExecutionJournal
from pawl.tool_registry.app.execution.executor import ExecutorOptions
from pawl.tool_registry.app.policy.ports import ExecutionJournal
from pawl.tool_registry.domain.execution import Outcome, succeeded
from pawl.tools import ReconcileResult, cannot_say, did_not_happen, happened
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, reason, running
from tests.rpc.tool_registry.world import World, database_is_told, dead_process, execute, refused


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, world: World) -> Any:
    async with running(database_url, tmp_path, world.tools()) as registry:
        yield registry


async def test_asking_again_gives_the_stored_result(registry: Registry, world: World) -> None:
    first = await registry.run("pay")
    assert await registry.run("pay", earlier_attempts=1) == first
    assert world.effects == ["paid 1"]


async def test_many_who_ask_at_once_get_one_effect_and_one_result(registry: Registry, world: World) -> None:
    results = await asyncio.gather(*(registry.run("pay") for _ in range(10)))
    assert world.effects == ["paid 1"]
    assert {result.SerializeToString() for result in results} == {results[0].SerializeToString()}


async def test_replicas_asked_at_once_give_one_effect_and_one_result(
    database_url: str, tmp_path: Path, registry: Registry, world: World
) -> None:
    async with running(database_url, tmp_path, world.tools(), name="b") as other:
        asked = [asyncio.ensure_future(replica.run("pay", {"wait": True})) for replica in (registry, other) * 3]
        await world.begun.wait()
        world.release.set()
        results = await asyncio.gather(*asked)
    assert world.effects == ["paid 1"]
    assert {content(result) for result in results} == {"paid 1"}


async def test_a_call_goes_on_when_its_caller_leaves(registry: Registry, world: World) -> None:
    stream = registry.stream("pay", {"wait": True})
    reading = asyncio.ensure_future(stream.read())
    await world.begun.wait()
    stream.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    world.release.set()
    assert content(await registry.run("pay", {"wait": True})) == "paid 1"
    assert world.effects == ["paid 1"]


async def test_a_failure_is_stored_too(registry: Registry, world: World) -> None:
    call, first = await registry.run_out_of_time("pay", {"wait": True})
    assert "may have had its effect" in content(first)["error"]
    world.release.set()
    assert await registry.run("pay", {"wait": True}, call=call) == first
    assert world.effects == []


async def test_another_call_under_the_same_id_is_refused(registry: Registry, world: World) -> None:
    await registry.run("pay", {"amount": 1})
    invalid = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENTS")
    assert await refused(registry.stream("pay", {"amount": 2})) == invalid
    assert await refused(registry.stream("order")) == invalid
    assert world.effects == ["paid 1"]


async def test_the_same_id_in_another_store_is_another_call(registry: Registry, world: World) -> None:
    """I13."""
    await registry.run("pay")
    await registry.run("pay", who=context(store="other"))
    assert world.effects == ["paid 1", "paid 1"]


async def test_a_call_of_a_process_that_died_is_unknown_for_good(
    database_url: str, registry: Registry, world: World
) -> None:
    """I5: said, not guessed; and never silently run again."""
    async with dead_process(database_url, registry, "pay", "call"):
        first = await registry.run("pay", earlier_attempts=1)
        assert outcome(first) == "UNKNOWN OUTCOME_UNKNOWN"
        # Also if the process turns out to live after all.
        await database_is_told(database_url, alive=True)
        assert await registry.run("pay", earlier_attempts=2) == first
    assert world.effects == []


async def test_a_late_end_of_a_process_that_was_given_up_changes_nothing(
    database_url: str, registry: Registry, world: World
) -> None:
    """I4, C5."""
    async with dead_process(database_url, registry, "pay", "call"):
        unknown = await registry.run("pay")
        async with Database(database_url, application_name="dead") as database:
            journal = PostgresExecutionJournal(database, instance_id="dead", lease_seconds=60)
            stands = await journal.end(CallKey(StoreId("acme"), CallId("call")), succeeded(b'"late"', 1.0))
            assert stands.outcome is Outcome.UNKNOWN
        assert await registry.run("pay") == unknown


async def test_an_unknown_call_runs_again_only_on_the_finding_of_an_operator(
    database_url: str, registry: Registry, world: World
) -> None:
    """D9."""
    async with dead_process(database_url, registry, "pay", "call"):
        await registry.run("pay")
        assert outcome(await registry.run("pay", earlier_attempts=5)) == "UNKNOWN OUTCOME_UNKNOWN"
        again = await registry.run("pay", unknowns_resolved=1)
        assert content(again) == "paid 1"
        assert await registry.run("pay", unknowns_resolved=1) == again
    assert world.effects == ["paid 1"]


@pytest.mark.parametrize(
    ("finding", "expected", "effects"),
    [
        (happened("order 7"), ("SUCCEEDED", "order 7"), ["asked about call"]),
        (did_not_happen(), ("SUCCEEDED", "ordered"), ["asked about call", "ordered"]),
        (cannot_say(), ("UNKNOWN OUTCOME_UNKNOWN", None), ["asked about call"]),
    ],
)
async def test_a_reconcilable_tool_is_asked_what_became_of_a_call(  # noqa: PLR0917
    database_url: str, registry: Registry, world: World, finding: ReconcileResult, expected: Any, effects: list[str]
) -> None:
    world.finding = finding
    async with dead_process(database_url, registry, "order", "call"):
        result = await registry.run("order", earlier_attempts=1)
        assert outcome(result) == expected[0]
        assert expected[1] in (None, content(result))
        assert await registry.run("order") == result
    assert world.effects == effects


async def test_a_living_process_is_waited_for(database_url: str, registry: Registry, world: World) -> None:
    async with dead_process(database_url, registry, "pay", "call"):
        await database_is_told(database_url, alive=True)
        asked = asyncio.ensure_future(registry.run("pay"))
        done, _ = await asyncio.wait({asked}, timeout=0.3)
        assert not done
        await database_is_told(database_url, alive=False)
        assert outcome(await asked) == "UNKNOWN OUTCOME_UNKNOWN"


@pytest.mark.parametrize("name", ["pay", "order"])
async def test_a_jump_of_the_clock_ends_no_lease(database_url: str, tmp_path: Path, world: World, name: str) -> None:
    """For the database all leases have ended then: nobody concludes that before it has waited for a whole one."""
    kept: list[ExecutionJournal] = []
    slow = ExecutorOptions(lease_seconds=60, renew_seconds=60)
    move = "UPDATE tool_registry.instances SET expires_at = expires_at - interval '2 hours'"

    def keep(journal: ExecutionJournal) -> ExecutionJournal:
        kept.append(journal)
        return journal

    async with (
        running(database_url, tmp_path, world.tools(), options=slow, watch_seconds=60, wrap_journal=keep) as asker,
        running(database_url, tmp_path, world.tools(), name="b", options=slow) as holder,
    ):
        held = asyncio.ensure_future(holder.run(name, {"wait": True}, timeout_seconds=60))
        await world.begun.wait()
        await execute(database_url, f"{move} WHERE instance_id LIKE 'b%'")
        await kept[0].renew()
        await kept[0].forget(86400)
        asked = asyncio.ensure_future(asker.run(name, {"wait": True}, timeout_seconds=60))
        done, _ = await asyncio.wait({asked, held}, timeout=0.5)
        assert not done
        world.release.set()
        assert outcome(await asked) == outcome(await held) == "SUCCEEDED"
    assert len(world.effects) == 1


async def test_a_gated_call_never_runs_without_its_approval(registry: Registry, world: World) -> None:
    """I10, HITL-3, C6."""
    digest = (await registry.check("delete", {"path": "a"})).digest
    needed = (grpc.StatusCode.FAILED_PRECONDITION, "APPROVAL_REQUIRED")
    attempts: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"path": "a"}, {}),
        ({"path": "a"}, {"approved_digest": "0" * 64}),
        ({"path": "b"}, {"approved_digest": digest}),
        ({"path": "a"}, {"approved_digest": digest, "call": "other"}),
        ({"path": "a"}, {"approved_digest": digest, "who": context(run="other")}),
        ({"path": "a"}, {"approved_digest": digest, "who": context(store="other")}),
    ]
    for arguments, more in attempts:
        assert await refused(registry.stream("delete", arguments, **more)) == needed
    assert world.effects == []
    assert content(await registry.run("delete", {"path": "a"}, approved_digest=digest)) == "deleted a"


async def test_an_approval_of_another_call_stops_also_a_call_that_needs_none(registry: Registry, world: World) -> None:
    """I9: when in doubt, no."""
    stream = registry.stream("pay", approved_digest="0" * 64)
    assert await refused(stream) == (grpc.StatusCode.FAILED_PRECONDITION, "APPROVAL_REQUIRED")
    assert world.effects == []


async def test_a_process_that_lost_its_lease_stops_what_another_may_repeat(
    database_url: str, tmp_path: Path, world: World
) -> None:
    """I4: a reconcilable call must not run on while somebody else is told that it has not happened."""
    options = ExecutorOptions(lease_seconds=2, renew_seconds=0.2, grace_seconds=0.1)
    async with running(database_url, tmp_path, world.tools(), options=options, drain_seconds=0.1) as registry:
        asked = asyncio.ensure_future(registry.run("order", {"wait": True}, timeout_seconds=60))
        await world.begun.wait()
        await execute(database_url, "ALTER TABLE tool_registry.instances RENAME TO hidden")
        try:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asked
        finally:
            await execute(database_url, "ALTER TABLE tool_registry.hidden RENAME TO instances")
        assert reason(error.value)[:2] == (grpc.StatusCode.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE")
        world.finding = did_not_happen()
        world.release.set()

        async def runs_again() -> bool:
            try:
                return bool(content(await registry.run("order", {"wait": True})) == "ordered")
            except grpc.aio.AioRpcError:
                return False

        await until(runs_again)
    assert world.effects == ["asked about call", "ordered"]


async def test_a_process_has_a_lease_while_it_holds_something_and_lets_it_go_at_rest(
    database_url: str, tmp_path: Path, world: World
) -> None:
    """Each renewal is a write, and nobody asks whether a process lives that holds nothing."""
    options = ExecutorOptions(lease_seconds=2, renew_seconds=0.2, grace_seconds=0.1)
    async with (
        Database(database_url, application_name="test") as database,
        running(database_url, tmp_path, world.tools(), options=options) as registry,
    ):

        async def seconds_left() -> float:
            left = "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM tool_registry.instances"
            return float(await database.fetchval(left))

        async def has_lapsed() -> bool:
            return await seconds_left() < 0

        for call in ("first", "second"):
            await until(has_lapsed)
            asked = asyncio.ensure_future(registry.run("pay", {"wait": True}, call=call, timeout_seconds=60))
            await world.begun.wait()
            before = asyncio.get_running_loop().time() + await seconds_left()
            assert await seconds_left() > 0

            async def is_renewed(before: float = before) -> bool:
                return asyncio.get_running_loop().time() + await seconds_left() > before + 0.5

            await until(is_renewed)
            world.release.set()
            assert outcome(await asked) == "SUCCEEDED"
            world.begun.clear()
            world.release.clear()


async def test_old_entries_are_forgotten_and_young_ones_are_not(database_url: str, registry: Registry) -> None:
    """I19."""
    await registry.run("pay", call="old")
    await registry.run("pay", call="young")
    await execute(
        database_url, "UPDATE tool_registry.executions SET ended_at = now() - interval '2 days' WHERE call_id = 'old'"
    )
    async with Database(database_url, application_name="test") as database:
        journal = PostgresExecutionJournal(database, instance_id="x", lease_seconds=1)
        assert await journal.forget(86400) == 1
        assert await journal.look(CallKey(StoreId("acme"), CallId("old"))) is None
        assert await journal.look(CallKey(StoreId("acme"), CallId("young"))) is not None


class FlakyJournal:
    """A journal whose database goes away: `before` a statement, or `after` it was carried out; or is broken then."""

    def __init__(self, journal: ExecutionJournal, faults: dict[str, list[str]]) -> None:
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


@pytest.mark.parametrize("fault", ["before", "after", "broken", "broken after"])
@pytest.mark.parametrize("name", ["pay", "order"])
async def test_a_call_whose_beginning_got_no_answer_is_run_once_by_the_next_who_asks(
    database_url: str, tmp_path: Path, world: World, name: str, fault: str
) -> None:
    """Nothing ran on the strength of the entry, and the process knows that: no doubt, no question."""
    faults = {"begin": [fault]}
    async with running(
        database_url, tmp_path, world.tools(), wrap_journal=lambda journal: FlakyJournal(journal, faults)
    ) as registry:
        code, _ = await refused(registry.stream(name))
        assert code is (grpc.StatusCode.INTERNAL if "broken" in fault else grpc.StatusCode.UNAVAILABLE)
        assert outcome(await registry.run(name, earlier_attempts=1)) == "SUCCEEDED"
    assert len(world.effects) == 1


@pytest.mark.parametrize(
    "faults", [["before"] * 3, ["after"], ["before", "after", "before"], ["broken"] * 2, ["broken after", "before"]]
)
async def test_a_result_is_given_once_it_is_stored_however_often_that_fails(
    database_url: str, tmp_path: Path, world: World, faults: list[str]
) -> None:
    """I8 for effects: nobody sees a result that a crash could take back."""
    async with running(
        database_url, tmp_path, world.tools(), wrap_journal=lambda journal: FlakyJournal(journal, {"end": faults})
    ) as registry:
        first = await registry.run("pay")
        assert content(first) == "paid 1"
        assert await registry.run("pay") == first
    assert world.effects == ["paid 1"]


async def test_a_journal_that_stays_broken_is_believed_in_the_end(
    database_url: str, tmp_path: Path, world: World
) -> None:
    """A caller is told of a fault that does not pass; a database that is away is waited for."""
    options = ExecutorOptions(grace_seconds=0.1, internal_seconds_max=0.2)
    faults = {"end": ["broken"] * 1000}
    async with running(
        database_url,
        tmp_path,
        world.tools(),
        options=options,
        wrap_journal=lambda journal: FlakyJournal(journal, faults),
    ) as registry:
        code, _ = await refused(registry.stream("pay"))
    assert code is grpc.StatusCode.INTERNAL
    assert len(faults["end"]) < 1000
