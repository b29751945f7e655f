"""Workers that disconnect during calls, return, or attach to another replica (TOOL-3, I5)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest

from pawl.server.db.database import Database
from pawl.tool.v1 import audit_pb2, execution_pb2, tool_pb2, worker_pb2
from pawl.tool_registry.sources.worker.store.workers import PostgresWorkerRepository
from pawl.tool_registry.sources.worker.workers import WorkerOptions
from tests.poll import until
from tests.rpc.tool_registry.attached import (
    OPTIONS,
    EffectClass,
    Purpose,
    Status,
    attached,
    definition,
    start_call,
)
from tests.rpc.tool_registry.registry import Registry, content, outcome, running
from tests.rpc.tool_registry.world import digest_of

IDEMPOTENT = definition(effect=EffectClass.EFFECT_CLASS_IDEMPOTENT)
RECONCILABLE = definition(effect=EffectClass.EFFECT_CLASS_RECONCILABLE)
AT_MOST_ONCE = definition(effect=EffectClass.EFFECT_CLASS_AT_MOST_ONCE)

UNKNOWN = "UNKNOWN OUTCOME_UNKNOWN"


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, worker_options=OPTIONS) as registry:
        yield registry


@pytest.fixture
async def replicas(database_url: str, tmp_path: Path) -> Any:
    async with (
        running(database_url, tmp_path, worker_options=OPTIONS) as here,
        running(database_url, tmp_path, name="b", worker_options=OPTIONS) as there,
    ):
        yield here, there


async def test_lost_at_most_once_call_has_an_unknown_outcome(registry: Registry, database_url: str) -> None:
    async with attached(registry, AT_MOST_ONCE) as first, attached(registry, AT_MOST_ONCE, worker="w2") as second:
        asked, _ = await start_call(registry, first)
        await first.lose(database_url)
        assert outcome(await asked) == UNKNOWN
        await second.send(drain=worker_pb2.WorkerDrain())
        assert await second.ended() is grpc.StatusCode.OK  # The worker got no call
    assert outcome(await registry.run("charge")) == UNKNOWN


async def test_reconnected_worker_keeps_its_call(registry: Registry) -> None:
    async with attached(registry, AT_MOST_ONCE) as first:
        asked, call = await start_call(registry, first)
        first.vanish()
    async with attached(registry, AT_MOST_ONCE, held={call.call_id: call.lease_epoch}) as back:
        assert (await back.answer(call), outcome(await asked)) == (Status.RESULT_STATUS_ACCEPTED, "SUCCEEDED")
        assert await back.answer(call) == Status.RESULT_STATUS_ACCEPTED


async def test_result_after_the_call_was_reassigned_is_late(registry: Registry, database_url: str) -> None:
    async with attached(registry, IDEMPOTENT) as first:
        asked, call = await start_call(registry, first)
        await first.lose(database_url)
        async with attached(registry, IDEMPOTENT, worker="w2") as second:
            again = await second.invocation()
            async with attached(registry, IDEMPOTENT, held={call.call_id: call.lease_epoch}) as back:
                cancel = worker_pb2.InvocationCancel(call_id=call.call_id, lease_epoch=call.lease_epoch)
                assert await back.next() == cancel
                assert await back.answer(call, content_json=b'"late"') == Status.RESULT_STATUS_LATE
                assert (await second.answer(again), content(await asked)) == (Status.RESULT_STATUS_ACCEPTED, "done")


def break_statement(monkeypatch: pytest.MonkeyPatch, name: str, *, is_done: bool, times: int = 2) -> list[Exception]:
    """Make a statement fail `times` times, after its execution if `is_done`, otherwise before it.

    Returns the remaining faults.
    """
    faults: list[Exception] = [asyncpg.InternalServerError("could not read block")] * times
    whole = getattr(PostgresWorkerRepository, name)

    async def broken(*args: Any, **kwargs: Any) -> Any:
        result = await whole(*args, **kwargs) if is_done or not faults else None
        if faults:
            raise faults.pop()
        return result

    monkeypatch.setattr(PostgresWorkerRepository, name, broken)
    return faults


async def test_worker_returns_its_result_to_another_replica(replicas: tuple[Registry, Registry]) -> None:
    here, there = replicas
    async with attached(here) as first:
        asked, call = await start_call(here, first)
        async with attached(there, held={call.call_id: call.lease_epoch}) as second:
            assert await first.ended() is grpc.StatusCode.CANCELLED
            assert (await second.answer(call), outcome(await asked)) == (Status.RESULT_STATUS_ACCEPTED, "SUCCEEDED")


async def test_each_waiting_call_goes_to_one_replica(replicas: tuple[Registry, Registry]) -> None:
    here, there = replicas
    async with attached(here) as nobody:
        await nobody.send(drain=worker_pb2.WorkerDrain())
        await nobody.ended()
    asked = [asyncio.ensure_future(here.run("charge", call=f"call{number}")) for number in range(20)]
    async with attached(here, calls_max=10) as one, attached(there, worker="w2", calls_max=10) as two:
        calls = [await worker.invocation() for worker in (one, two) for _ in range(10)]
        assert sorted(call.call_id for call in calls) == sorted(f"call{number}" for number in range(20))
        for worker, handed in ((one, calls[:10]), (two, calls[10:])):
            for call in handed:
                assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert [outcome(await call) for call in asked] == ["SUCCEEDED"] * 20


@pytest.mark.parametrize("when", ["before", "after", "never"])
@pytest.mark.parametrize("tool", [AT_MOST_ONCE, RECONCILABLE])
async def test_call_continues_on_its_worker_when_its_registry_stops(
    database_url: str, tmp_path: Path, tool: tool_pb2.ToolDefinition, when: str
) -> None:
    """The worker answers before another registry gets the call, after that, or never."""
    async with (
        running(database_url, tmp_path, name="b", worker_options=OPTIONS) as there,
        attached(there, tool, worker="other") as other,
        attached(there, tool) as worker,
    ):
        async with running(database_url, tmp_path, drain_seconds=0, worker_options=OPTIONS) as here:
            await other.send(drain=worker_pb2.WorkerDrain())
            asked, call = await start_call(here, worker)
        await asyncio.wait({asked})
        if when == "before":
            assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        if when == "never":
            await worker.lose(database_url)
        again = asyncio.ensure_future(there.run("charge"))
        if when == "after":
            await until(lambda: there.executor.running_count == 1)
            assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        if when == "never" and tool is RECONCILABLE:
            async with attached(there, tool, worker="asked") as asked_worker:
                question = await asked_worker.invocation()
                assert question.purpose == Purpose.INVOCATION_PURPOSE_RECONCILE
                assert question.lease_epoch > call.lease_epoch
                await asked_worker.answer(question)
        assert outcome(await again) == (UNKNOWN if when == "never" and tool is AT_MOST_ONCE else "SUCCEEDED")


@pytest.mark.parametrize(
    ("tool", "finding", "expected"),
    [
        (IDEMPOTENT, None, "SUCCEEDED"),
        (RECONCILABLE, {"did_not_happen": worker_pb2.DidNotHappen()}, "SUCCEEDED"),
        (RECONCILABLE, {"content_json": b'"done"'}, "SUCCEEDED"),
        (RECONCILABLE, {"error_message": "the bank does not answer"}, UNKNOWN),
    ],
)
async def test_lost_call_is_repeated_or_reconciled_at_another_worker(
    registry: Registry,
    database_url: str,
    tool: tool_pb2.ToolDefinition,
    finding: dict[str, Any] | None,
    expected: str,
) -> None:
    async with attached(registry, tool) as first:
        asked, call = await start_call(registry, first)
        await first.lose(database_url)
        async with attached(registry, tool, worker="w2") as second:
            if finding is not None:
                question = await second.invocation()
                assert (question.purpose, question.call_id) == (Purpose.INVOCATION_PURPOSE_RECONCILE, call.call_id)
                await second.answer(question, **finding)
            if finding is None or "did_not_happen" in finding:
                again = await second.invocation()
                assert (again.call_id, again.arguments_json) == (call.call_id, call.arguments_json)
                assert again.lease_epoch > call.lease_epoch
                assert (again.purpose, call.attempt, again.attempt) == (Purpose.INVOCATION_PURPOSE_RUN, 1, 2)
                assert await second.answer(again) == Status.RESULT_STATUS_ACCEPTED
            assert outcome(await asked) == expected


async def test_result_after_the_call_was_abandoned_is_audited_once(registry: Registry, database_url: str) -> None:
    """The call is lost when a new process attaches under the worker's name, before any lease expires."""
    async with attached(registry, AT_MOST_ONCE) as first:
        asked, call = await start_call(registry, first)
        first.vanish()
    async with attached(registry, AT_MOST_ONCE) as back:
        assert outcome(await asked) == UNKNOWN
        for _ in range(2):
            assert await back.answer(call, content_json=b'  "late"') == Status.RESULT_STATUS_LATE
        request = audit_pb2.ListAuditRequest(kind=audit_pb2.AUDIT_KIND_RETURNED)

        async def entries() -> list[audit_pb2.AuditEntry]:
            return list((await registry.auditors["acme", "olga"].ListAudit(request)).entries)

        async def are_there() -> bool:
            return len(await entries()) == 2

        await until(are_there)
        late, ended = await entries()
        assert (late.reason, late.verdict) == ("LATE", "SUCCEEDED")
        assert late.result_sha256 == await digest_of(database_url, b'"late"')
        for name in ("user_id", "run_id", "call_id", "tool_name", "tool_version", "arguments_sha256"):
            assert getattr(late, name) == getattr(ended, name), name


async def test_calls_progress_and_cancels_cross_replicas(
    replicas: tuple[Registry, Registry],
) -> None:
    here, there = replicas
    async with attached(there) as worker:
        responses = aiter(here.stream("charge"))
        first = asyncio.ensure_future(anext(responses))
        call = await worker.invocation()
        progress = worker_pb2.WorkerProgress(call_id="call", lease_epoch=call.lease_epoch, message="half")
        await worker.send(progress=progress)
        assert (await first).progress == execution_pb2.ExecutionProgress(message="half")
        assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert [content(response.result) async for response in responses] == ["done"]
        asked, call = await start_call(here, worker, "cancelled")
        cancelled = asyncio.ensure_future(here.cancel("cancelled"))
        assert isinstance(await worker.next(), worker_pb2.InvocationCancel)
        assert await worker.answer(call) == Status.RESULT_STATUS_LATE
        assert (await cancelled).stopped
        assert outcome(await asked) == "CANCELLED CANCELLED"


async def test_call_of_a_live_worker_survives_a_broken_database(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(registry, AT_MOST_ONCE) as worker:
        for name in ("add", "find", "settle", "finish", "claim"):
            for is_done in (False, True) if name != "claim" else (False,):
                with monkeypatch.context() as patch:
                    faults = break_statement(patch, name, is_done=is_done)
                    asked, call = await start_call(registry, worker, f"{name}_{is_done}")
                    assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
                    assert outcome(await asked) == "SUCCEEDED", (name, is_done)
                    assert len(faults) < 2


async def test_a_finished_call_does_not_leave_any_records(database_url: str, registry: Registry) -> None:
    async with attached(registry) as worker:
        asked = asyncio.ensure_future(registry.run("charge", {"amount": 7}))
        await worker.answer(await worker.invocation())
        await asked
    async with Database(database_url, application_name="test") as database:
        left = "SELECT state = 'DONE' AND details = '' AND answer IS NULL FROM tool_registry.worker_calls"
        await until(lambda: database.fetchval(left))


async def test_call_survives_a_lost_response_to_its_claim(
    registry: Registry, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the worker would count as busy with a call that it never received."""
    async with (
        Database(database_url, application_name="test") as database,
        attached(registry, AT_MOST_ONCE) as worker,
    ):
        asked, call = await start_call(registry, worker)
        following = asyncio.ensure_future(registry.run("charge", call="call_2"))
        waiting = "SELECT 1 FROM tool_registry.worker_calls WHERE state = 'WAITING'"
        await until(lambda: database.fetchval(waiting))
        faults = break_statement(monkeypatch, "claim", is_done=True, times=1)
        assert (await worker.answer(call), outcome(await asked)) == (Status.RESULT_STATUS_ACCEPTED, "SUCCEEDED")
        later = await worker.invocation()
        assert (later.call_id, faults, await worker.answer(later)) == ("call_2", [], Status.RESULT_STATUS_ACCEPTED)
        assert outcome(await following) == "SUCCEEDED"


async def test_call_with_a_permanently_broken_record_has_an_unknown_outcome(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = WorkerOptions(lease_seconds=60.0, poll_seconds=0.1, internal_seconds_max=0.2)
    async with (
        running(database_url, tmp_path, worker_options=options) as registry,
        attached(registry, AT_MOST_ONCE) as worker,
    ):
        asked, call = await start_call(registry, worker)
        break_statement(monkeypatch, "find", is_done=False, times=1000)
        assert (await worker.answer(call), outcome(await asked)) == (Status.RESULT_STATUS_ACCEPTED, UNKNOWN)
