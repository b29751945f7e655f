"""Tools of remote workers: attached, called, cancelled. TOOL-3."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.database import Database
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, tool_pb2, worker_pb2
from pawl.tool_registry.app.workers.workers import WorkerOptions
from pawl.tools import Category, tool
from tests.poll import until
from tests.rpc.tool_registry.attached import Purpose, Status, attached, definition, hello, stream
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, reason, running

OTHER_KEY = "key-of-machine-of-other"


@tool(category=Category.SAFE)
async def loaded() -> str:
    """Be there already."""
    return "loaded"


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, [loaded]) as registry:
        yield registry


async def test_a_worker_runs_a_call_with_what_it_must_know(registry: Registry) -> None:
    async with attached(registry) as worker:
        asked = asyncio.ensure_future(registry.run("charge", {"amount": 3}))
        call = await worker.invocation()
        assert (call.tool_name, call.arguments_json, call.call_id) == ("charge", b'{"amount":3}', "call")
        assert (call.store_id, call.user_id, call.conversation_id, call.run_id) == (
            "acme",
            "ann",
            "conversation",
            "run",
        )
        assert (call.purpose, call.attempt, call.lease_epoch) == (Purpose.INVOCATION_PURPOSE_RUN, 1, 1)
        assert await worker.answer(call, {"charged": 3}) == Status.RESULT_STATUS_ACCEPTED
        result = await asked
    assert outcome(result) == "SUCCEEDED"
    assert content(result) == {"charged": 3}


async def test_its_tools_are_in_the_register_of_its_store_and_stay(registry: Registry) -> None:
    async with attached(registry):
        pass
    found = (await registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))).tool
    assert (found.source, found.version) == ("worker:billing", 1)


async def test_its_tools_are_taken_out_by_who_may_attach_workers(registry: Registry) -> None:
    request = tool_pb2.UnregisterToolRequest(name="charge")
    async with attached(registry):
        pass
    for store, user in (("acme", "ann"), ("other", "machine")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry.users[store, user].UnregisterTool(request)
        assert reason(caught.value)[1] == "TOOL_NOT_FOUND"
    await registry.users["acme", "machine"].UnregisterTool(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))
    assert reason(caught.value)[1] == "TOOL_NOT_FOUND"


async def test_no_other_store_sees_or_runs_its_tools(registry: Registry) -> None:
    """I13."""
    async with attached(registry) as worker:
        listed = await registry.users["other", "ann"].ListTools(tool_pb2.ListToolsRequest())
        assert "charge" not in [found.definition.name for found in listed.tools]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await registry.run("charge", who=context(store="other"))
        assert reason(error.value)[1] == "TOOL_NOT_FOUND"
        async with attached(registry, key=OTHER_KEY) as foreign:
            asked = asyncio.ensure_future(registry.run("charge"))
            call = await worker.invocation()
            assert await foreign.answer(call, "stolen") == Status.RESULT_STATUS_UNKNOWN
            await worker.answer(call, "ours")
            assert content(await asked) == "ours"


async def test_progress_reaches_the_caller(registry: Registry) -> None:
    async with attached(registry) as worker:
        responses = aiter(registry.stream("charge"))
        first = asyncio.ensure_future(anext(responses))
        call = await worker.invocation()
        await worker.send(
            progress=worker_pb2.WorkerProgress(
                call_id="call", lease_epoch=call.lease_epoch, fraction=0.5, message="half"
            )
        )
        assert (await first).progress == execution_pb2.ExecutionProgress(fraction=0.5, message="half")
        await worker.answer(call)
        assert [content(response.result) async for response in responses] == ["done"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"error_message": "the card was refused"}, "FAILED TOOL_ERROR"),
        ({"outcome_unknown": worker_pb2.OutcomeUnknown()}, "UNKNOWN OUTCOME_UNKNOWN"),
        ({"did_not_happen": worker_pb2.DidNotHappen()}, "UNKNOWN OUTCOME_UNKNOWN"),
        ({"content_json": b"{"}, "FAILED TOOL_ERROR"),
        ({"content_json": b"1", "inverse": call_pb2.Inverse(tool_name="no name")}, "FAILED TOOL_ERROR"),
        ({"content_json": b"1", "inverse": call_pb2.Inverse(tool_name="x", arguments_json=b"[]")}, "FAILED TOOL_ERROR"),
        ({"content_json": b'"' + b"a" * 2**20 + b'"'}, "FAILED RESULT_TOO_LARGE"),
    ],
)
async def test_what_a_worker_cannot_give_is_an_error_result(
    registry: Registry, given: dict[str, Any], expected: str
) -> None:
    async with attached(registry) as worker:
        asked = asyncio.ensure_future(registry.run("charge"))
        assert await worker.answer(await worker.invocation(), **given) == Status.RESULT_STATUS_ACCEPTED
        assert outcome(await asked) == expected


async def test_the_way_back_is_kept(registry: Registry) -> None:
    inverse = call_pb2.Inverse(tool_name="refund", arguments_json=b'{"amount":3}', summary="refund 3")
    async with attached(registry) as worker:
        asked = asyncio.ensure_future(registry.run("charge"))
        await worker.answer(await worker.invocation(), content_json=b"1", inverse=inverse)
        assert (await asked).result.inverse == inverse


async def test_two_workers_share_a_tool(registry: Registry) -> None:
    async with attached(registry) as one, attached(registry, worker="w2") as two:
        asked = [asyncio.ensure_future(registry.run("charge", call=call)) for call in ("a", "b")]
        calls = [await one.invocation(), await two.invocation()]
        for worker, call in zip((one, two), calls, strict=True):
            await worker.answer(call)
        assert [outcome(await call) for call in asked] == ["SUCCEEDED"] * 2


async def test_a_worker_gets_no_more_calls_at_once_than_it_wants(registry: Registry) -> None:
    async with attached(registry, calls_max=2) as worker:
        asked = [asyncio.ensure_future(registry.run("charge", call=call)) for call in ("a", "b", "c")]
        first, second = await worker.invocation(), await worker.invocation()
        await worker.beat()  # Nothing else was sent before this answer.
        await worker.answer(first)
        third = await worker.invocation()
        assert third.call_id not in {first.call_id, second.call_id}
        for call in (second, third):
            await worker.answer(call)
        assert [outcome(await call) for call in asked] == ["SUCCEEDED"] * 3


async def test_a_call_waits_for_a_worker(registry: Registry) -> None:
    async with attached(registry) as worker:
        await worker.send(drain=worker_pb2.WorkerDrain())
        assert await worker.ended() is grpc.StatusCode.OK
    asked = asyncio.ensure_future(registry.run("charge"))
    await until(lambda: _has_pending(registry))
    async with attached(registry, worker="w2") as worker:
        await worker.answer(await worker.invocation())
        assert outcome(await asked) == "SUCCEEDED"


async def _has_pending(registry: Registry) -> bool:
    return registry.executor.running_count > 0


async def untaken(registry: Registry, call: str) -> str:
    """The error of a call that no worker takes; on a busy machine one may end before that is found out."""
    for seconds in (1, 4, 16, 64):
        result = await registry.run("charge", call=f"{call}_{seconds}", timeout_seconds=seconds)
        if outcome(result) != "FAILED TOOL_TIMEOUT":
            break
    assert outcome(result) == "FAILED TOOL_ERROR"
    return str(content(result)["error"])


async def test_a_call_that_no_worker_takes_says_so(registry: Registry) -> None:
    async with attached(registry) as worker:
        busy = asyncio.ensure_future(registry.run("charge", call="first"))
        call = await worker.invocation()
        assert "busy" in await untaken(registry, "second")
        await worker.send(drain=worker_pb2.WorkerDrain())
        await worker.answer(call)
        await busy
        assert await worker.ended() is grpc.StatusCode.OK
    assert "no worker of the group 'billing'" in await untaken(registry, "third")


async def test_a_worker_that_drains_ends_its_calls_and_gets_no_new_ones(registry: Registry) -> None:
    async with attached(registry, calls_max=2) as worker:
        asked = asyncio.ensure_future(registry.run("charge", call="first"))
        call = await worker.invocation()
        await worker.send(drain=worker_pb2.WorkerDrain())
        await worker.beat()
        async with attached(registry, worker="w2") as other:
            second = asyncio.ensure_future(registry.run("charge", call="second"))
            await other.answer(await other.invocation())
            assert outcome(await second) == "SUCCEEDED"
        assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert await worker.ended() is grpc.StatusCode.OK
        assert outcome(await asked) == "SUCCEEDED"


async def test_a_cancel_reaches_the_worker(registry: Registry) -> None:
    async with attached(registry) as worker:
        asked = asyncio.ensure_future(registry.run("charge"))
        call = await worker.invocation()
        cancelled = asyncio.ensure_future(registry.cancel())
        cancel = await worker.next()
        assert cancel == worker_pb2.InvocationCancel(call_id="call", lease_epoch=call.lease_epoch)
        assert await worker.answer(call, error_message="stopped") == Status.RESULT_STATUS_LATE
        assert (await cancelled).stopped
        assert outcome(await asked) == "CANCELLED CANCELLED"


async def test_a_worker_that_goes_on_after_a_cancel_is_said_to_go_on(registry: Registry) -> None:
    async with attached(registry) as worker:
        asked = asyncio.ensure_future(registry.run("charge"))
        call = await worker.invocation()
        assert not (await registry.cancel()).stopped
        assert outcome(await asked) == "CANCELLED NOT_STOPPED"
        assert isinstance(await worker.next(), worker_pb2.InvocationCancel)
        assert await worker.answer(call) == Status.RESULT_STATUS_LATE


async def test_a_call_out_of_time_is_taken_back(registry: Registry) -> None:
    async with attached(registry) as worker:
        asked = asyncio.ensure_future(registry.run("charge", timeout_seconds=5))
        call = await worker.invocation()
        assert isinstance(await worker.next(), worker_pb2.InvocationCancel)
        assert await worker.answer(call) == Status.RESULT_STATUS_LATE
        assert outcome(await asked) == "FAILED TOOL_TIMEOUT"


async def test_a_result_that_nobody_asked_for_is_unknown(registry: Registry) -> None:
    async with attached(registry) as worker:
        assert await worker.answer(worker_pb2.Invocation(call_id="x", lease_epoch=1)) == Status.RESULT_STATUS_UNKNOWN


async def test_a_result_sent_twice_counts_once_and_gets_the_same_receipt(registry: Registry) -> None:
    async with attached(registry) as worker:
        asked = asyncio.ensure_future(registry.run("charge"))
        call = await worker.invocation()
        assert await worker.answer(call, 1) == Status.RESULT_STATUS_ACCEPTED
        assert await worker.answer(call, 2) == Status.RESULT_STATUS_ACCEPTED
        assert content(await asked) == 1
        assert content(await registry.run("charge")) == 1


@pytest.mark.parametrize(
    ("first", "code", "expected"),
    [
        ({"heartbeat": worker_pb2.WorkerHeartbeat()}, "INVALID_ARGUMENT", "HELLO_REQUIRED"),
        ({"hello": hello([])}, "INVALID_ARGUMENT", "INVALID_FIELD"),
        ({"hello": hello([definition()] * 201)}, "INVALID_ARGUMENT", "INVALID_FIELD"),
        ({"hello": hello([definition(), definition()])}, "INVALID_ARGUMENT", "INVALID_FIELD"),
        ({"hello": hello([definition()], calls_max=257)}, "INVALID_ARGUMENT", "INVALID_FIELD"),
        ({"hello": hello([definition()], group="no group")}, "INVALID_ARGUMENT", "INVALID_ID"),
        (
            {"hello": hello([definition(context=call_pb2.EXECUTION_CONTEXT_FRONTEND)])},
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
        ),
        ({"hello": hello([definition(arguments_schema_json=b"{}")])}, "INVALID_ARGUMENT", "INVALID_SCHEMA"),
        ({"hello": hello([definition("loaded")])}, "ALREADY_EXISTS", "TOOL_EXISTS"),
    ],
)
async def test_a_hello_that_cannot_be_is_refused(
    registry: Registry, first: dict[str, Any], code: str, expected: str
) -> None:
    async with stream(registry, "key-of-machine-of-acme") as worker:
        await worker.send(**first)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await worker.next()
    assert reason(error.value)[:2] == (grpc.StatusCode[code], expected)


async def test_a_name_belongs_to_the_group_that_has_it(registry: Registry) -> None:
    async with attached(registry):
        async with stream(registry, "key-of-machine-of-acme") as thief:
            await thief.send(hello=hello([definition("also"), definition()], group="thieves"))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await thief.next()
        assert reason(error.value)[1] == "TOOL_EXISTS"
        front_end = definition(context=call_pb2.EXECUTION_CONTEXT_FRONTEND)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await registry.ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end, replace=True))
        assert reason(error.value)[1] == "TOOL_EXISTS"
    names = [found.definition.name for found in (await registry.ann.ListTools(tool_pb2.ListToolsRequest())).tools]
    assert "also" not in names


async def test_only_workers_and_admins_may_attach(registry: Registry) -> None:
    for key, code in (("key-of-ann-of-acme", "PERMISSION_DENIED"), ("no-such-key-at-all", "UNAUTHENTICATED")):
        async with stream(registry, key) as worker:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await worker.next()
        assert error.value.code() is grpc.StatusCode[code]


async def test_a_silent_worker_loses_its_stream(database_url: str, tmp_path: Path) -> None:
    options = WorkerOptions(lease_seconds=0.1, poll_seconds=0.05)
    async with running(database_url, tmp_path, worker_options=options) as registry, attached(registry) as worker:
        assert await worker.ended() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_worker_of_an_older_version_does_not_bring_it_back(registry: Registry) -> None:
    """During a deploy both are there; when the newer one has gone, the older one counts again."""
    old, new = definition(), definition(description="Charge an amount, better.")
    async with attached(registry, old, worker="old") as before:
        async with attached(registry, new, worker="new") as after:
            async with attached(registry, old, worker="old2"):
                found = (await registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))).tool
                assert found.version == 2
            asked = asyncio.ensure_future(registry.run("charge", version=1))
            await after.answer(await after.invocation(), "new")
            assert content(await asked) == "new"
            await before.beat()
            await after.send(drain=worker_pb2.WorkerDrain())
            await after.ended()
        async with attached(registry, old, worker="old3"):
            found = (await registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))).tool
            assert (found.version, found.definition.description) == (3, old.description)


async def test_a_group_is_the_users_who_had_it_first(registry: Registry) -> None:
    """Another worker of the store must not get the calls of a group, nor say that a tool of it needs no approval."""
    gated = definition(category=call_pb2.TOOL_CATEGORY_DESTRUCTIVE)
    async with attached(registry, gated):
        async with stream(registry, "key-of-robot-of-acme") as thief:
            await thief.send(hello=hello([definition()], worker="thief"))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await thief.next()
        assert reason(error.value)[1] == "PERMISSION_DENIED"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await registry.users["acme", "robot"].UnregisterTool(tool_pb2.UnregisterToolRequest(name="charge"))
        assert reason(error.value)[1] == "PERMISSION_DENIED"
        async with attached(registry, gated, worker="w2", key="key-of-root-of-acme"):
            pass
    await registry.users["acme", "machine"].UnregisterTool(tool_pb2.UnregisterToolRequest(name="charge"))
    async with attached(registry, definition("bill"), key="key-of-robot-of-acme"):
        found = (await registry.ann.GetTool(tool_pb2.GetToolRequest(name="bill"))).tool
    assert found.source == "worker:billing"


@pytest.mark.parametrize(("worker", "key"), [("w1", "key-of-machine-of-acme"), ("new", "key-of-root-of-acme")])
async def test_a_group_of_before_there_were_owners_is_for_its_workers_and_admins(
    database_url: str, registry: Registry, worker: str, key: str
) -> None:
    """Not for who comes first after the deploy."""
    async with attached(registry, definition(), worker="w1"):
        pass
    async with Database(database_url, application_name="test") as database, database.acquire() as connection:
        await connection.execute("DELETE FROM tool_registry.worker_groups")
        await connection.execute("UPDATE tool_registry.tool_versions SET user_id = ''")
    for stranger in ("key-of-robot-of-acme", "key-of-machine-of-acme"):
        async with stream(registry, stranger) as thief:
            await thief.send(hello=hello([definition()], worker="thief"))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await thief.next()
        assert reason(error.value)[1] == "PERMISSION_DENIED"
        assert "before groups had owners" in str(error.value.details())
    async with attached(registry, definition(), worker=worker, key=key):
        async with stream(registry, "key-of-robot-of-acme") as thief:
            await thief.send(hello=hello([definition()], worker=worker))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await thief.next()
        assert reason(error.value)[1] == "PERMISSION_DENIED"
    async with Database(database_url, application_name="test") as database, database.acquire() as connection:
        owner = await connection.fetchval("SELECT user_id FROM tool_registry.worker_groups")
    assert owner == key.split("-")[2]


async def test_a_worker_makes_its_tool_laxer_only_as_an_admin(registry: Registry) -> None:
    gated = definition(category=call_pb2.TOOL_CATEGORY_DESTRUCTIVE)
    async with attached(registry, gated):
        pass
    for taken_out in (False, True):
        if taken_out:
            await registry.users["acme", "machine"].UnregisterTool(tool_pb2.UnregisterToolRequest(name="charge"))
        async with stream(registry, "key-of-machine-of-acme") as worker:
            await worker.send(hello=hello([definition()]))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await worker.next()
        assert reason(error.value)[1] == "PERMISSION_DENIED"
    async with attached(registry, definition(), key="key-of-root-of-acme"):
        found = (await registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))).tool
    assert found.definition.category == call_pb2.TOOL_CATEGORY_SAFE


async def test_a_worker_that_was_rolled_back_and_forward_gets_its_calls(database_url: str, tmp_path: Path) -> None:
    """Its definition was there before and is not older for that; when the other one has no worker left, it counts."""
    old, new = definition(), definition(description="Charge an amount, better.")
    options = WorkerOptions(lease_seconds=1.0, poll_seconds=0.05)

    async def version(of: Registry) -> int:
        return int((await of.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))).tool.version)

    async with running(database_url, tmp_path, worker_options=options) as registry:
        for each, last in ((old, 1), (new, 2)):
            async with attached(registry, each, worker="first") as worker:
                await worker.send(drain=worker_pb2.WorkerDrain())
                await worker.ended()
            assert await version(registry) == last
        async with attached(registry, old, worker="back") as back, attached(registry, new, worker="forward") as forward:
            assert await version(registry) == 3
            await back.send(drain=worker_pb2.WorkerDrain())
            await back.ended()

            async def is_in_force() -> bool:
                await forward.beat()
                return await version(registry) == 4

            await until(is_in_force)
            asked = asyncio.ensure_future(registry.run("charge", version=4))
            await forward.answer(await forward.invocation(), "new")
            assert content(await asked) == "new"


async def test_a_registry_that_stops_lets_its_workers_end_their_calls(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, drain_seconds=20) as registry, attached(registry) as worker:
        asked = asyncio.ensure_future(registry.run("charge"))
        call = await worker.invocation()
        registry.stop()
        await worker.beat()
        assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert await worker.ended() is grpc.StatusCode.UNAVAILABLE
        assert outcome(await asked) == "SUCCEEDED"
