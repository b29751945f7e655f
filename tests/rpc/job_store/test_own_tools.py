"""Runs with tools of their own: kept with the run, given to its worker, and offered to no other client (FE-2, I23)."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.errors import InvalidField, RequestIdReused, ToolExists
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.tool.v1 import tool_pb2
from tests.rpc.job_store.conftest import StartReplica
from tests.rpc.job_store.user import Owner, User


def tool(name: str = "show") -> tool_pb2.OwnTool:
    definition = tool_pb2.ToolDefinition(name=name, description="Show it.")
    return tool_pb2.OwnTool(definition=definition, definition_sha256="ab" * 32)


async def begin(user: User, *tools: tool_pb2.OwnTool, request_id: str = "", **fields: Any) -> run_pb2.Run:
    message = pb.SubmitMessageRequest(
        store_id=user.store_id,
        user_id=user.user_id,
        text="hello",
        policy=fields.pop("policy", pb.MESSAGE_POLICY_QUEUE),
        request_id=request_id,
        conversation_id=fields.pop("conversation_id", ""),
    )
    values: dict[str, Any] = {"loop_state": b"begun", "asked_tools_sha256": b"asked"} | fields
    return (await user.ask("StartRun", message=message, tools=tools, **values)).run


async def owned(user: User, run_id: str) -> Owner:
    (claimed,) = await user.claim()
    assert claimed.run_id == run_id
    return user.owner(run_id, claimed.epoch)


async def test_its_worker_gets_them_with_the_state_that_they_came_with(user: User) -> None:
    run = await begin(user, tool(), tool("ask"), client_id="tab")
    assert run.own_tools == run_pb2.OwnTools(names=["show", "ask"], client_id="tab")
    owner = await owned(user, run.run_id)
    loaded = await owner.load()
    assert list(loaded.own_tools) == [tool(), tool("ask")]
    assert loaded.loop_state == b"begun"
    assert loaded.run.own_tools == run.own_tools
    await owner.commit(state=run_pb2.RUN_STATE_RUNNING, loop_state=b"later")
    assert (await owner.load()).loop_state == b"later"


async def test_a_run_says_which_there_are_and_only_a_service_is_given_them_whole(user: User) -> None:
    run = await begin(user, tool())
    assert (await user.run(run.run_id)).own_tools.names == ["show"]
    answer = await user.ask("GetRun", run_id=run.run_id)
    assert not answer.own_tools
    answer = await user.ask("GetRun", run_id=run.run_id, user_id="")
    assert list(answer.own_tools) == [tool()]


async def test_the_same_request_starts_it_once_and_other_tools_are_another_request(user: User) -> None:
    run = await begin(user, tool(), request_id="r1")
    assert (await begin(user, tool(), request_id="r1")).run_id == run.run_id
    with pytest.raises(RequestIdReused):
        await begin(user, tool("other"), request_id="r1", asked_tools_sha256=b"others")
    with pytest.raises(RequestIdReused):
        await user.submit(request_id="r1")


async def test_one_that_may_not_be_started_any_more_is_given_if_it_was(user: User) -> None:
    with pytest.raises(ToolExists):
        await begin(user, request_id="r1", only_repeat=True)
    run = await begin(user, tool(), request_id="r1")
    assert (await begin(user, request_id="r1", only_repeat=True)).run_id == run.run_id


async def test_a_message_without_tools_that_may_not_come_any_more_is_given_if_it_came(user: User) -> None:
    with pytest.raises(ToolExists):
        await begin(user, request_id="r1", only_repeat=True, asked_tools_sha256=b"")
    run = (await user.submit(request_id="r1", conversation_id="")).run
    again = await begin(user, request_id="r1", only_repeat=True, asked_tools_sha256=b"")
    assert again.run_id == run.run_id
    assert not again.HasField("own_tools")


async def test_what_is_wrong_leaves_nothing_behind(user: User) -> None:
    for tools in ((), (tool(), tool()), tuple(tool(f"t{number}") for number in range(65))):
        with pytest.raises(InvalidField):
            await begin(user, *tools)
    with pytest.raises(InvalidField):
        await begin(user, tool(), policy=pb.MESSAGE_POLICY_STEER)
    listed = await user.ask("ListRuns")
    assert not listed.runs


async def test_their_calls_are_leased_to_their_client_alone_also_by_another_replica(start_two: list[User]) -> None:
    user, other = start_two
    run = await begin(user, tool(), client_id="tab")
    owner = await owned(user, run.run_id)
    names = {"call_1": "show", "call_2": "registered"}
    calls = [
        owner.call(call_id, call_pb2.CALL_STATE_OFFERED, index=index, tool_name=name)
        for index, (call_id, name) in enumerate(names.items())
    ]
    await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
    await owner.park(run_pb2.WAIT_KIND_TOOL_RESULT, calls=calls)
    for client in ("other", "tab2"):
        refused = await other.lease(run.run_id, "call_1", client)
        assert (refused.granted, refused.call.offer.client_id) == (False, "")
    assert (await other.lease(run.run_id, "call_2", "other")).granted
    assert (await other.lease(run.run_id, "call_1", "tab")).granted
    again = await user.lease(run.run_id, "call_1", "tab", session_id="ses_2")
    assert (again.granted, again.call.offer.offer_epoch) == (True, 1)


async def test_without_a_client_any_of_the_user_may_take_them(user: User) -> None:
    run = await begin(user, tool())
    owner = await owned(user, run.run_id)
    await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
    await owner.park(
        run_pb2.WAIT_KIND_TOOL_RESULT, calls=[owner.call("call_1", call_pb2.CALL_STATE_OFFERED, tool_name="show")]
    )
    assert (await user.lease(run.run_id, "call_1", "any")).granted


@pytest.fixture
async def start_two(start: StartReplica) -> list[User]:
    return [User((await start()).stub), User((await start()).stub)]
