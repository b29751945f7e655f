"""Tools of remote workers: they attach, execute calls and cancel them (TOOL-3)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, tool_pb2, worker_pb2
from pawl.tool_registry.sources.worker.workers import WorkerOptions
from pawl.tools import Category, tool
from tests.poll import until
from tests.rpc.tool_registry.attached import Purpose, Status, attached, definition, hello, start_call, stream
from tests.rpc.tool_registry.registry import Registry, content, context, error_of, outcome, refusal, running

OTHER_KEY = "key-of-machine-of-other"


@tool(category=Category.SAFE)
async def loaded() -> str:
    """Exist already."""
    return "loaded"


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, [loaded]) as registry:
        yield registry


async def test_worker_does_not_get_more_concurrent_calls_than_it_requests(registry: Registry) -> None:
    async with attached(registry, calls_max=2) as worker:
        asked = [asyncio.ensure_future(registry.run("charge", call=call)) for call in ("a", "b", "c")]
        first, second = await worker.invocation(), await worker.invocation()
        await worker.beat()  # Nothing else was sent before this response
        await worker.answer(first)
        third = await worker.invocation()
        assert third.call_id not in {first.call_id, second.call_id}
        for call in (second, third):
            await worker.answer(call)
        assert [outcome(await call) for call in asked] == ["SUCCEEDED"] * 3


async def no_worker_error(registry: Registry, call: str) -> str:
    """Return the error of a call without a worker.

    On a busy machine the call may time out first; if so, the next try has a longer timeout.
    """
    for seconds in (1, 4, 16, 64):
        result = await registry.run("charge", call=f"{call}_{seconds}", timeout_seconds=seconds)
        if outcome(result) != "FAILED TOOL_TIMEOUT":
            break
    return error_of(result)


async def test_call_without_a_worker_is_an_error(registry: Registry) -> None:
    async with attached(registry) as worker:
        busy, call = await start_call(registry, worker, "first")
        assert "busy" in await no_worker_error(registry, "second")
        await worker.send(drain=worker_pb2.WorkerDrain())
        await worker.answer(call)
        await busy
        assert await worker.ended() is grpc.StatusCode.OK
    assert "no worker in the group 'billing'" in await no_worker_error(registry, "third")
    asked = asyncio.ensure_future(registry.run("charge", call="fourth"))
    await until(lambda: registry.executor.running_count > 0)
    async with attached(registry, worker="w2") as worker:
        await worker.answer(await worker.invocation())
        assert outcome(await asked) == "SUCCEEDED", "it waits for a worker"


async def test_a_draining_worker_finishes_its_calls_and_does_not_get_new_ones(registry: Registry) -> None:
    async with attached(registry, calls_max=2) as worker:
        asked, call = await start_call(registry, worker, "first")
        await worker.send(drain=worker_pb2.WorkerDrain())
        await worker.beat()
        async with attached(registry, worker="w2") as other:
            second = asyncio.ensure_future(registry.run("charge", call="second"))
            await other.answer(await other.invocation())
            assert outcome(await second) == "SUCCEEDED"
        assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert await worker.ended() is grpc.StatusCode.OK
        assert outcome(await asked) == "SUCCEEDED"


async def test_silent_worker_loses_its_stream(database_url: str, tmp_path: Path) -> None:
    options = WorkerOptions(lease_seconds=0.1, poll_seconds=0.05)
    async with running(database_url, tmp_path, worker_options=options) as registry, attached(registry) as worker:
        assert await worker.ended() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_stopping_registry_lets_its_workers_finish_their_calls(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, drain_seconds=20) as registry, attached(registry) as worker:
        asked, call = await start_call(registry, worker)
        registry.stop()
        await worker.beat()
        assert await worker.answer(call) == Status.RESULT_STATUS_ACCEPTED
        assert await worker.ended() is grpc.StatusCode.UNAVAILABLE
        assert outcome(await asked) == "SUCCEEDED"


async def test_a_worker_gets_the_context_of_a_call_and_its_result_counts_only_once(registry: Registry) -> None:
    async with attached(registry) as worker:
        assert await worker.answer(worker_pb2.Invocation(call_id="x", lease_epoch=1)) == Status.RESULT_STATUS_UNKNOWN
        responses = aiter(registry.stream("charge", {"amount": 3}))
        first = asyncio.ensure_future(anext(responses))
        call = await worker.invocation()
        assert (call.tool_name, call.arguments_json, call.call_id) == ("charge", b'{"amount":3}', "call")
        behalf = (call.store_id, call.user_id, call.conversation_id, call.run_id)
        assert behalf == ("acme", "ann", "conversation", "run")
        assert (call.purpose, call.attempt, call.lease_epoch) == (Purpose.INVOCATION_PURPOSE_RUN, 1, 1)
        half: dict[str, Any] = {"fraction": 0.5, "message": "half"}
        await worker.send(progress=worker_pb2.WorkerProgress(call_id="call", lease_epoch=call.lease_epoch, **half))
        assert (await first).progress == execution_pb2.ExecutionProgress(**half)
        saved: dict[str, Any] = {"call_id": "call", "lease_epoch": call.lease_epoch, "content_json": b"1"}
        await worker.send(checkpoint=worker_pb2.WorkerCheckpoint(number=1, **saved))
        assert (await worker.next()).kept
        after: Any = await anext(responses)
        assert after.progress == execution_pb2.ExecutionProgress(**half, has_checkpoint=True)
        inverse = call_pb2.Inverse(tool_name="refund", arguments_json=b'{"amount":3}', summary="refund 3")
        given = {"content_json": b'{"charged": 3}', "inverse": inverse}
        assert await worker.answer(call, **given) == Status.RESULT_STATUS_ACCEPTED
        assert await worker.answer(call, 2) == Status.RESULT_STATUS_ACCEPTED
        (result,) = [response.result async for response in responses]
        assert (outcome(result), content(result), result.result.inverse) == ("SUCCEEDED", {"charged": 3}, inverse)
        assert content(await registry.run("charge", {"amount": 3})) == {"charged": 3}


async def test_other_stores_cannot_see_run_or_remove_worker_tools(registry: Registry) -> None:
    """I13: workers of other stores cannot send results of the store's calls either."""
    remove = tool_pb2.UnregisterToolRequest(name="charge")
    async with attached(registry) as worker:
        listed = await registry.users["other", "ann"].ListTools(tool_pb2.ListToolsRequest())
        assert "charge" not in [found.definition.name for found in listed.tools]
        assert await refusal(registry.stream("charge", who=context(store="other"))) == "TOOL_NOT_FOUND"
        assert await refusal(registry.users["other", "machine"].UnregisterTool(remove)) == "TOOL_NOT_FOUND"
        async with attached(registry, key=OTHER_KEY) as foreign:
            asked, call = await start_call(registry, worker)
            assert await foreign.answer(call, "stolen") == Status.RESULT_STATUS_UNKNOWN
            await worker.answer(call, "ours")
            assert content(await asked) == "ours"
    found = (await registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))).tool
    assert (found.source, found.version) == ("worker:billing", 1), "they stay"
    assert await refusal(registry.ann.UnregisterTool(remove)) == "TOOL_NOT_FOUND"
    await registry.users["acme", "machine"].UnregisterTool(remove)
    assert await refusal(registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))) == "TOOL_NOT_FOUND"


async def test_invalid_worker_result_becomes_an_error_result(registry: Registry) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"error_message": "the card was refused"}, "FAILED TOOL_ERROR"),
        ({"outcome_unknown": worker_pb2.OutcomeUnknown()}, "UNKNOWN OUTCOME_UNKNOWN"),
        ({"did_not_happen": worker_pb2.DidNotHappen()}, "UNKNOWN OUTCOME_UNKNOWN"),
        ({"content_json": b"{"}, "FAILED TOOL_ERROR"),
        ({"content_json": b"1", "inverse": call_pb2.Inverse(tool_name="no name")}, "FAILED TOOL_ERROR"),
        ({"content_json": b"1", "inverse": call_pb2.Inverse(tool_name="x", arguments_json=b"[]")}, "FAILED TOOL_ERROR"),
        ({"content_json": b'"' + b"a" * 2**20 + b'"'}, "FAILED RESULT_TOO_LARGE"),
    ]
    async with attached(registry) as worker:
        for number, (given, expected) in enumerate(rows):
            asked = asyncio.ensure_future(registry.run("charge", call=f"c{number}"))
            assert await worker.answer(await worker.invocation(), **given) == Status.RESULT_STATUS_ACCEPTED
            assert outcome(await asked) == expected, number


async def test_a_cancellation_reaches_the_worker_which_may_still_finish_the_call(registry: Registry) -> None:
    async with attached(registry) as worker:
        for call, listens in (("one", True), ("two", False)):
            asked, given = await start_call(registry, worker, call)
            cancelling = asyncio.ensure_future(registry.cancel(call))
            assert (await worker.next()) == worker_pb2.InvocationCancel(call_id=call, lease_epoch=given.lease_epoch)
            if listens:
                assert await worker.answer(given, error_message="stopped") == Status.RESULT_STATUS_LATE
            assert (await cancelling).stopped is listens
            assert outcome(await asked) == f"CANCELLED {'CANCELLED' if listens else 'NOT_STOPPED'}"
        assert await worker.answer(given) == Status.RESULT_STATUS_LATE


async def refused_hello(registry: Registry, first: dict[str, Any], key: str = "key-of-machine-of-acme") -> str:
    async with stream(registry, key) as worker:
        await worker.send(**first)
        return await refusal(worker.next())


async def test_invalid_hello_is_rejected(registry: Registry) -> None:
    front_end = definition(context=call_pb2.EXECUTION_CONTEXT_FRONTEND)
    rows: list[tuple[dict[str, Any], str]] = [
        ({"heartbeat": worker_pb2.WorkerHeartbeat()}, "HELLO_REQUIRED"),
        ({"hello": hello([])}, "INVALID_FIELD"),
        ({"hello": hello([definition()] * 201)}, "INVALID_FIELD"),
        ({"hello": hello([definition(), definition()])}, "INVALID_FIELD"),
        ({"hello": hello([definition()], calls_max=257)}, "INVALID_FIELD"),
        ({"hello": hello([definition()], group="no group")}, "INVALID_ID"),
        ({"hello": hello([front_end])}, "INVALID_FIELD"),
        ({"hello": hello([definition(arguments_schema_json=b"{}")])}, "INVALID_SCHEMA"),
        ({"hello": hello([definition("loaded")])}, "TOOL_EXISTS"),
    ]
    for first, expected in rows:
        assert await refused_hello(registry, first) == expected, first
    async with attached(registry):
        thieves = {"hello": hello([definition("also"), definition()], group="thieves")}
        assert await refused_hello(registry, thieves) == "TOOL_EXISTS", "a name belongs to the group that registered it"
        register = tool_pb2.RegisterToolRequest(definition=front_end, replace=True)
        assert await refusal(registry.ann.RegisterTool(register)) == "TOOL_EXISTS"
    names = [found.definition.name for found in (await registry.ann.ListTools(tool_pb2.ListToolsRequest())).tools]
    assert "also" not in names


async def test_a_group_belongs_to_its_first_user_and_only_an_admin_can_relax_its_tools(registry: Registry) -> None:
    """Other workers of the store must not get a group's calls or remove the approval of its tools."""
    gated = definition(category=call_pb2.TOOL_CATEGORY_DESTRUCTIVE)
    denied, robot = "PERMISSION_DENIED", "key-of-robot-of-acme"
    remove = tool_pb2.UnregisterToolRequest(name="charge")
    async with attached(registry, gated):
        assert await refused_hello(registry, {"hello": hello([definition()], worker="thief")}, robot) == denied
        assert await refusal(registry.users["acme", "robot"].UnregisterTool(remove)) == denied
        async with attached(registry, gated, worker="w2", key="key-of-root-of-acme"):
            pass
    assert await refused_hello(registry, {"hello": hello([gated], worker="thief")}, robot) == denied
    for removed in (False, True):
        if removed:
            await registry.users["acme", "root"].UnregisterTool(remove)
        assert await refused_hello(registry, {"hello": hello([definition()])}) == denied
    async with attached(registry, definition(), key="key-of-root-of-acme"):
        found = (await registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))).tool
    assert found.definition.category == call_pb2.TOOL_CATEGORY_SAFE


async def test_admins_worker_takes_over_a_front_end_tool_name(registry: Registry) -> None:
    front_end = definition(context=call_pb2.EXECUTION_CONTEXT_FRONTEND)
    await registry.ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end))
    assert await refused_hello(registry, {"hello": hello([definition()])}) == "TOOL_EXISTS"
    async with attached(registry, definition(), key="key-of-root-of-acme"):
        found = (await registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))).tool
    assert found.definition.context == call_pb2.EXECUTION_CONTEXT_BACKEND


async def test_older_worker_does_not_restore_its_tool_version(registry: Registry) -> None:
    """During a deploy both versions are attached. When the newer worker leaves, the older version applies again."""
    old, new = definition(), definition(description="Charge an amount, better.")
    request = tool_pb2.GetToolRequest(name="charge")
    async with attached(registry, old, worker="old") as before:
        async with attached(registry, new, worker="new") as after:
            async with attached(registry, old, worker="old2"):
                assert (await registry.ann.GetTool(request)).tool.version == 2
            asked = asyncio.ensure_future(registry.run("charge", version=1))
            await after.answer(await after.invocation(), "new")
            assert content(await asked) == "new"
            await before.beat()
            await after.send(drain=worker_pb2.WorkerDrain())
            await after.ended()
        async with attached(registry, old, worker="old3"):
            found = (await registry.ann.GetTool(request)).tool
            assert (found.version, found.definition.description) == (3, old.description)


async def test_worker_still_gets_calls_after_a_rollback_and_roll_forward(database_url: str, tmp_path: Path) -> None:
    """A definition that is registered again counts as new.

    It applies when no worker with the other definition is left.
    """
    old, new = definition(), definition(description="Charge an amount, better.")
    options = WorkerOptions(lease_seconds=1.0, poll_seconds=0.05)
    async with running(database_url, tmp_path, worker_options=options) as registry:

        async def version() -> int:
            return int((await registry.ann.GetTool(tool_pb2.GetToolRequest(name="charge"))).tool.version)

        async def is_in_force() -> bool:
            await forward.beat()
            return await version() == 4

        for each, last in ((old, 1), (new, 2)):
            async with attached(registry, each, worker="first") as worker:
                await worker.send(drain=worker_pb2.WorkerDrain())
                await worker.ended()
            assert await version() == last
        async with attached(registry, old, worker="back") as back, attached(registry, new, worker="forward") as forward:
            assert await version() == 3
            await back.send(drain=worker_pb2.WorkerDrain())
            await back.ended()
            await until(is_in_force)
            asked = asyncio.ensure_future(registry.run("charge", version=4))
            await forward.answer(await forward.invocation(), "new")
            assert content(await asked) == "new"
