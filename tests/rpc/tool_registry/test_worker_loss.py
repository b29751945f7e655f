"""Workers that go away in the middle, come back, and are attached to another replica. TOOL-3, I5."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest

from pawl.tool.v1 import audit_pb2, execution_pb2, tool_pb2, worker_pb2
from pawl.tool_registry.adapters.postgres.workers import PostgresWorkerRepository
from pawl.tool_registry.app.workers.workers import WorkerOptions
from tests.poll import until
from tests.rpc.tool_registry.attached import AttachedWorker, EffectClass, Purpose, Status, attached, definition
from tests.rpc.tool_registry.digests import digest_of
from tests.rpc.tool_registry.registry import Registry, content, outcome, running

# Long enough for a test's steps, short enough to wait for its end.
BRIEF = WorkerOptions(lease_seconds=4.0, poll_seconds=0.1)
LASTING = WorkerOptions(lease_seconds=60.0, poll_seconds=0.1)

READ_ONLY = definition(effect=EffectClass.EFFECT_CLASS_READ_ONLY)
IDEMPOTENT = definition(effect=EffectClass.EFFECT_CLASS_IDEMPOTENT)
RECONCILABLE = definition(effect=EffectClass.EFFECT_CLASS_RECONCILABLE)
AT_MOST_ONCE = definition(effect=EffectClass.EFFECT_CLASS_AT_MOST_ONCE)

UNKNOWN = "UNKNOWN OUTCOME_UNKNOWN"


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, worker_options=BRIEF) as registry:
        yield registry


@pytest.fixture
async def lasting(database_url: str, tmp_path: Path) -> Any:
    """A registry in which no lease runs out."""
    async with running(database_url, tmp_path, worker_options=LASTING) as registry:
        yield registry


async def begun(registry: Registry, worker: AttachedWorker) -> tuple[asyncio.Future[Any], worker_pb2.Invocation]:
    asked = asyncio.ensure_future(registry.run("charge"))
    return asked, await worker.invocation()


async def invocation(worker: AttachedWorker) -> worker_pb2.Invocation:
    """The next call, however long it takes: the worker gives signs of life meanwhile."""
    found: asyncio.Future[Any] = asyncio.ensure_future(_invocation(worker))
    while not found.done():
        await worker.send(heartbeat=worker_pb2.WorkerHeartbeat())
        await asyncio.wait({found}, timeout=BRIEF.lease_seconds / 5)
    call: worker_pb2.Invocation = found.result()
    return call


async def _invocation(worker: AttachedWorker) -> worker_pb2.Invocation:
    while not isinstance(frame := await worker.next(), worker_pb2.Invocation):
        assert isinstance(frame, worker_pb2.WorkerHeartbeatAnswer)
    return frame


async def told(worker: AttachedWorker) -> object:
    """The next frame, past answers to heartbeats, of which one may come after the call that it was sent for."""
    while isinstance(frame := await worker.next(), worker_pb2.WorkerHeartbeatAnswer):
        pass
    return frame


async def answer(worker: AttachedWorker, call: worker_pb2.Invocation, **outcome: Any) -> int:
    """Send a result, and give the status of its receipt, past answers to heartbeats."""
    result = worker_pb2.WorkerResult(call_id=call.call_id, lease_epoch=call.lease_epoch)
    result.MergeFrom(worker_pb2.WorkerResult(**outcome or {"content_json": b'"done"'}))
    await worker.send(result=result)
    while not isinstance(frame := await worker.next(), worker_pb2.ResultReceipt):
        assert isinstance(frame, worker_pb2.WorkerHeartbeatAnswer | worker_pb2.InvocationCancel)
    return frame.status


@pytest.mark.parametrize("tool", [READ_ONLY, IDEMPOTENT])
async def test_what_may_run_again_goes_to_another_worker_with_the_same_key(
    registry: Registry, tool: tool_pb2.ToolDefinition
) -> None:
    async with attached(registry, tool) as first:
        asked, call = await begun(registry, first)
        first.vanish()
        async with attached(registry, tool, worker="w2") as second:
            again = await invocation(second)
            assert (again.call_id, again.arguments_json) == (call.call_id, call.arguments_json)
            assert again.lease_epoch > call.lease_epoch
            assert (call.attempt, again.attempt) == (1, 2)
            assert await answer(second, again) == Status.RESULT_STATUS_ACCEPTED
            assert outcome(await asked) == "SUCCEEDED"


async def test_what_may_happen_once_is_of_unknown_outcome(registry: Registry) -> None:
    async with attached(registry, AT_MOST_ONCE) as first, attached(registry, AT_MOST_ONCE, worker="w2") as second:
        asked, _ = await begun(registry, first)
        first.vanish()
        while not asked.done():
            await second.beat()
            await asyncio.wait({asked}, timeout=BRIEF.lease_seconds / 5)
        assert outcome(await asked) == UNKNOWN
        await second.send(drain=worker_pb2.WorkerDrain())
        assert await second.ended() is grpc.StatusCode.OK  # It was asked nothing.
    assert outcome(await registry.run("charge")) == UNKNOWN


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        ({"content_json": b'"found"'}, "SUCCEEDED"),
        ({"outcome_unknown": worker_pb2.OutcomeUnknown()}, UNKNOWN),
        ({"error_message": "the bank does not answer"}, UNKNOWN),
    ],
)
async def test_another_worker_is_asked_what_happened(
    registry: Registry, finding: dict[str, Any], expected: str
) -> None:
    async with attached(registry, RECONCILABLE) as first:
        asked, call = await begun(registry, first)
        first.vanish()
        async with attached(registry, RECONCILABLE, worker="w2") as second:
            question = await invocation(second)
            assert question.purpose == Purpose.INVOCATION_PURPOSE_RECONCILE
            assert question.call_id == call.call_id
            await answer(second, question, **finding)
            result = await asked
    assert outcome(result) == expected
    assert expected == UNKNOWN or content(result) == "found"


async def test_what_is_found_not_to_have_happened_runs(registry: Registry) -> None:
    async with attached(registry, RECONCILABLE) as first:
        asked, call = await begun(registry, first)
        first.vanish()
        async with attached(registry, RECONCILABLE, worker="w2") as second:
            await answer(second, await invocation(second), did_not_happen=worker_pb2.DidNotHappen())
            again = await invocation(second)
            assert (again.purpose, again.attempt) == (Purpose.INVOCATION_PURPOSE_RUN, 2)
            assert again.arguments_json == call.arguments_json
            await answer(second, again)
            assert outcome(await asked) == "SUCCEEDED"


async def test_a_worker_that_comes_back_keeps_its_call(lasting: Registry) -> None:
    async with attached(lasting, AT_MOST_ONCE) as first:
        asked, call = await begun(lasting, first)
        first.vanish()
    async with attached(lasting, AT_MOST_ONCE, held={call.call_id: call.lease_epoch}) as back:
        assert await answer(back, call) == Status.RESULT_STATUS_ACCEPTED
        assert outcome(await asked) == "SUCCEEDED"
        assert await answer(back, call) == Status.RESULT_STATUS_ACCEPTED


async def test_a_worker_that_comes_back_without_its_call_has_lost_it(lasting: Registry) -> None:
    """It is a new process under the same name; nobody waits for the end of a lease."""
    async with attached(lasting, AT_MOST_ONCE) as first:
        asked, call = await begun(lasting, first)
        first.vanish()
    async with attached(lasting, AT_MOST_ONCE) as back:
        assert outcome(await asked) == UNKNOWN
        assert await answer(back, call) == Status.RESULT_STATUS_LATE


async def told_late(registry: Registry, count: int) -> list[audit_pb2.AuditEntry]:
    """The entries of late results in the audit chain, once there are so many."""

    async def entries() -> list[audit_pb2.AuditEntry]:
        page = await registry.auditors["acme", "olga"].ListAudit(audit_pb2.ListAuditRequest(page_size=100))
        return [entry for entry in reversed(page.entries) if entry.reason == "LATE"]

    async def are_there() -> bool:
        return len(await entries()) >= count

    await until(are_there)
    return await entries()


async def ended_entries(registry: Registry) -> list[audit_pb2.AuditEntry]:
    page = await registry.auditors["acme", "olga"].ListAudit(audit_pb2.ListAuditRequest(page_size=100))
    return [entry for entry in page.entries if entry.kind == audit_pb2.AUDIT_KIND_RETURNED and entry.reason != "LATE"]


async def test_what_a_worker_brings_after_its_call_was_given_up_is_in_the_audit(
    lasting: Registry, database_url: str
) -> None:
    async with attached(lasting, AT_MOST_ONCE) as first:
        asked, call = await begun(lasting, first)
        first.vanish()
    async with attached(lasting, AT_MOST_ONCE) as back:
        assert outcome(await asked) == UNKNOWN
        assert await answer(back, call, content_json=b'  "late"') == Status.RESULT_STATUS_LATE
        (entry,) = await told_late(lasting, 1)
        (ended,) = await ended_entries(lasting)
        assert (entry.verdict, entry.result_sha256) == ("SUCCEEDED", await digest_of(database_url, b'"late"'))
        for name in ("user_id", "run_id", "call_id", "tool_name", "tool_version", "arguments_sha256"):
            assert getattr(entry, name) == getattr(ended, name), name


async def test_a_late_result_that_is_sent_again_is_told_once(lasting: Registry) -> None:
    async with attached(lasting, AT_MOST_ONCE, calls_max=2) as worker:
        for name in ("one", "two"):
            asked = asyncio.ensure_future(lasting.run("charge", call=name, timeout_seconds=5))
            call = await worker.invocation()
            assert isinstance(await worker.next(), worker_pb2.InvocationCancel)
            assert await answer(worker, call, error_message="too late") == Status.RESULT_STATUS_LATE
            entries = await told_late(lasting, 1 if name == "one" else 2)
            assert (entries[-1].call_id, entries[-1].verdict) == (name, "FAILED")
            assert await answer(worker, call) == Status.RESULT_STATUS_LATE
            assert outcome(await asked) == "FAILED TOOL_TIMEOUT"
        assert len(await told_late(lasting, 2)) == 2


async def test_a_late_result_is_told_by_any_replica_and_a_late_finding_by_none(
    database_url: str, tmp_path: Path
) -> None:
    async with (
        running(database_url, tmp_path, name="b", worker_options=LASTING) as there,
        attached(there, RECONCILABLE, calls_max=2) as worker,
    ):
        async with running(database_url, tmp_path, drain_seconds=0, worker_options=LASTING) as here:
            asked, call = await begun(here, worker)
        assert await answer(worker, call) == Status.RESULT_STATUS_LATE
        again = asyncio.ensure_future(there.run("charge", timeout_seconds=5))
        question = await invocation(worker)
        assert question.purpose == Purpose.INVOCATION_PURPOSE_RECONCILE
        assert isinstance(await told(worker), worker_pb2.InvocationCancel)
        assert await answer(worker, question) == Status.RESULT_STATUS_LATE
        assert outcome(await again) == UNKNOWN
        other = asyncio.ensure_future(there.run("charge", call="other", timeout_seconds=5))
        late = await invocation(worker)
        assert isinstance(await told(worker), worker_pb2.InvocationCancel)
        assert await answer(worker, late) == Status.RESULT_STATUS_LATE
        assert [entry.call_id for entry in await told_late(there, 2)] == ["call", "other"]
        await asyncio.wait({asked, other})


async def test_a_result_after_the_call_was_given_away_is_late(registry: Registry) -> None:
    async with attached(registry, IDEMPOTENT) as first:
        asked, call = await begun(registry, first)
        first.vanish()
        async with attached(registry, IDEMPOTENT, worker="w2") as second:
            again = await invocation(second)
            async with attached(registry, IDEMPOTENT, held={call.call_id: call.lease_epoch}) as back:
                cancel = worker_pb2.InvocationCancel(call_id=call.call_id, lease_epoch=call.lease_epoch)
                assert await back.next() == cancel
                assert await answer(back, call, content_json=b'"late"') == Status.RESULT_STATUS_LATE
                assert await answer(second, again) == Status.RESULT_STATUS_ACCEPTED
                assert content(await asked) == "done"


async def test_a_result_under_an_older_epoch_is_late_from_the_same_worker_too(lasting: Registry) -> None:
    async with attached(lasting, IDEMPOTENT) as first:
        asked, call = await begun(lasting, first)
        first.vanish()
    async with attached(lasting, IDEMPOTENT) as back:
        again = await back.invocation()
        assert (again.call_id, again.lease_epoch) == (call.call_id, call.lease_epoch + 1)
        assert await answer(back, call, content_json=b'"old"') == Status.RESULT_STATUS_LATE
        assert await answer(back, again) == Status.RESULT_STATUS_ACCEPTED
        assert content(await asked) == "done"


async def test_a_worker_has_one_stream(lasting: Registry) -> None:
    async with attached(lasting) as first, attached(lasting) as second:
        assert await first.ended() is grpc.StatusCode.CANCELLED
        await second.beat()


async def test_a_call_reaches_a_worker_of_another_replica(database_url: str, tmp_path: Path) -> None:
    async with (
        running(database_url, tmp_path, worker_options=LASTING) as here,
        running(database_url, tmp_path, name="b", worker_options=LASTING) as there,
        attached(there) as worker,
    ):
        responses = aiter(here.stream("charge"))
        first = asyncio.ensure_future(anext(responses))
        call = await worker.invocation()
        progress = worker_pb2.WorkerProgress(call_id="call", lease_epoch=call.lease_epoch, message="half")
        await worker.send(progress=progress)
        assert (await first).progress == execution_pb2.ExecutionProgress(message="half")
        assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert [content(response.result) async for response in responses] == ["done"]


@pytest.mark.parametrize("tool", [IDEMPOTENT, RECONCILABLE, AT_MOST_ONCE])
async def test_a_jump_of_the_clock_loses_no_worker(
    database_url: str, tmp_path: Path, tool: tool_pb2.ToolDefinition
) -> None:
    """For the database all leases have ended then, until the processes that workers are attached to renew them."""
    renewing = WorkerOptions(lease_seconds=60.0, poll_seconds=60.0)
    async with (
        running(database_url, tmp_path, worker_options=LASTING) as here,
        running(database_url, tmp_path, name="b", worker_options=renewing) as there,
        attached(there, tool) as worker,
    ):
        asked, call = await begun(here, worker)
        connection = await asyncpg.connect(database_url)
        move = "SET expires_at = expires_at - interval '2 hours'"
        try:
            await connection.execute(f"UPDATE tool_registry.workers {move}")
            done, _ = await asyncio.wait({asked}, timeout=1)
            assert not done
            await connection.execute(f"UPDATE tool_registry.workers {move.replace('-', '+')}")
        finally:
            await connection.close()
        assert await answer(worker, call) == Status.RESULT_STATUS_ACCEPTED
        assert outcome(await asked) == "SUCCEEDED"


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["add", "look", "settle", "finish"])
async def test_a_call_whose_worker_goes_on_survives_a_broken_database(
    lasting: Registry, monkeypatch: pytest.MonkeyPatch, name: str, is_done: bool
) -> None:
    faults = break_statement(monkeypatch, name, is_done=is_done)
    async with attached(lasting, AT_MOST_ONCE) as worker:
        asked, call = await begun(lasting, worker)
        assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert outcome(await asked) == "SUCCEEDED"
    assert len(faults) < 2


async def test_a_worker_keeps_its_stream_when_a_claim_fails(lasting: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = break_statement(monkeypatch, "claim", is_done=False)
    async with attached(lasting, AT_MOST_ONCE) as worker:
        while len(faults) == 2:
            await worker.beat()
        await worker.beat()


async def test_a_call_is_not_lost_with_the_answer_to_a_claim(
    lasting: Registry, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker lives, and holds a call by the record that it was never sent."""

    async def is_waiting() -> bool:
        statement = "SELECT count(*) FROM tool_registry.worker_calls WHERE state = 'WAITING'"
        return bool(await connection.fetchval(statement))

    connection = await asyncpg.connect(database_url)
    async with attached(lasting, AT_MOST_ONCE) as worker:
        asked, call = await begun(lasting, worker)
        following = asyncio.ensure_future(lasting.run("charge", call="call_2"))
        await until(is_waiting)
        faults = break_statement(monkeypatch, "claim", is_done=True, times=1)
        assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert outcome(await asked) == "SUCCEEDED"
        later = await invocation(worker)
        assert (later.call_id, faults) == ("call_2", [])
        assert await answer(worker, later) == Status.RESULT_STATUS_ACCEPTED
        assert outcome(await following) == "SUCCEEDED"
    await connection.close()


async def test_a_record_that_stays_broken_is_believed_in_the_end(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = WorkerOptions(lease_seconds=60.0, poll_seconds=0.1, internal_seconds_max=0.2)
    async with (
        running(database_url, tmp_path, worker_options=options) as registry,
        attached(registry, AT_MOST_ONCE) as worker,
    ):
        asked, call = await begun(registry, worker)
        break_statement(monkeypatch, "look", is_done=False, times=1000)
        assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert outcome(await asked) == UNKNOWN


def break_statement(monkeypatch: pytest.MonkeyPatch, name: str, *, is_done: bool, times: int = 2) -> list[Exception]:
    """Have a statement of the record fail, before or after it `is_done`; returns the faults that are left."""
    faults: list[Exception] = [asyncpg.InternalServerError("could not read block")] * times
    whole = getattr(PostgresWorkerRepository, name)

    async def broken(*args: Any, **kwargs: Any) -> Any:
        result = await whole(*args, **kwargs) if is_done or not faults else None
        if faults:
            raise faults.pop()
        return result

    monkeypatch.setattr(PostgresWorkerRepository, name, broken)
    return faults


async def test_a_cancel_reaches_a_worker_of_another_replica(database_url: str, tmp_path: Path) -> None:
    async with (
        running(database_url, tmp_path, worker_options=LASTING) as here,
        running(database_url, tmp_path, name="b", worker_options=LASTING) as there,
        attached(there) as worker,
    ):
        asked, call = await begun(here, worker)
        cancelled = asyncio.ensure_future(here.cancel())
        assert isinstance(await worker.next(), worker_pb2.InvocationCancel)
        assert await worker.answer(call) == Status.RESULT_STATUS_LATE
        assert (await cancelled).stopped
        assert outcome(await asked) == "CANCELLED CANCELLED"


async def test_a_worker_brings_its_result_to_another_replica(database_url: str, tmp_path: Path) -> None:
    async with (
        running(database_url, tmp_path, worker_options=LASTING) as here,
        running(database_url, tmp_path, name="b", worker_options=LASTING) as there,
        attached(here) as first,
    ):
        asked, call = await begun(here, first)
        async with attached(there, held={call.call_id: call.lease_epoch}) as second:
            assert await first.ended() is grpc.StatusCode.CANCELLED
            assert await answer(second, call) == Status.RESULT_STATUS_ACCEPTED
            assert outcome(await asked) == "SUCCEEDED"


async def test_each_waiting_call_goes_to_one_replica(database_url: str, tmp_path: Path) -> None:
    async with (
        running(database_url, tmp_path, worker_options=LASTING) as here,
        running(database_url, tmp_path, name="b", worker_options=LASTING) as there,
    ):
        async with attached(here) as nobody:
            await nobody.send(drain=worker_pb2.WorkerDrain())
            await nobody.ended()
        asked = [asyncio.ensure_future(here.run("charge", call=f"call{number}")) for number in range(20)]
        async with attached(here, calls_max=10) as one, attached(there, worker="w2", calls_max=10) as two:
            calls = [await invocation(worker) for worker in (one, two) for _ in range(10)]
            assert sorted(call.call_id for call in calls) == sorted(f"call{number}" for number in range(20))
            for worker, handed in ((one, calls[:10]), (two, calls[10:])):
                for call in handed:
                    assert await answer(worker, call) == Status.RESULT_STATUS_ACCEPTED
            assert [outcome(await call) for call in asked] == ["SUCCEEDED"] * 20


async def test_a_result_for_a_registry_that_died_is_late(database_url: str, tmp_path: Path) -> None:
    """The journal will say that the outcome is unknown, so nobody may believe that it was taken."""
    async with running(database_url, tmp_path, name="b", worker_options=LASTING) as there, attached(there) as worker:
        async with running(database_url, tmp_path, drain_seconds=0, worker_options=LASTING) as here:
            asked, call = await begun(here, worker)
        assert await answer(worker, call) == Status.RESULT_STATUS_LATE
        assert outcome(await there.run("charge")) == UNKNOWN
        await asyncio.wait({asked})


async def test_a_worker_is_asked_about_the_call_of_a_registry_that_died(database_url: str, tmp_path: Path) -> None:
    async with (
        running(database_url, tmp_path, name="b", worker_options=LASTING) as there,
        attached(there, RECONCILABLE, calls_max=2) as worker,
    ):
        async with running(database_url, tmp_path, drain_seconds=0, worker_options=LASTING) as here:
            asked, call = await begun(here, worker)
        await asyncio.wait({asked})
        again = asyncio.ensure_future(there.run("charge"))
        question = await until_invocation(worker)
        assert question.purpose == Purpose.INVOCATION_PURPOSE_RECONCILE
        assert question.lease_epoch > call.lease_epoch
        assert question.arguments_json == b""
        assert await answer(worker, question, did_not_happen=worker_pb2.DidNotHappen()) == Status.RESULT_STATUS_ACCEPTED
        run = await until_invocation(worker)
        assert (run.purpose, run.arguments_json) == (Purpose.INVOCATION_PURPOSE_RUN, call.arguments_json)
        assert await answer(worker, run) == Status.RESULT_STATUS_ACCEPTED
        assert outcome(await again) == "SUCCEEDED"


async def until_invocation(worker: AttachedWorker) -> worker_pb2.Invocation:
    """The next call, past what is taken back."""
    while not isinstance(frame := await worker.next(), worker_pb2.Invocation):
        assert isinstance(frame, worker_pb2.InvocationCancel)
    return frame


async def test_nothing_of_a_call_is_kept_when_it_is_over(database_url: str, lasting: Registry) -> None:
    async with attached(lasting) as worker:
        asked = asyncio.ensure_future(lasting.run("charge", {"amount": 7}))
        await worker.answer(await worker.invocation())
        await asked
    connection = await asyncpg.connect(database_url)
    try:

        async def is_empty() -> bool:
            row = await connection.fetchrow("SELECT state, details, answer FROM tool_registry.worker_calls")
            assert row is not None
            return tuple(row) == ("DONE", b"", None)

        await until(is_empty)
    finally:
        await connection.close()
