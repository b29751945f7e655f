"""Undo through the real services, also when one of them dies in the middle (HITL-7)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pawl.agent.v1 import steps_pb2, undo_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.poll import until
from tests.system.suite.client import Agent
from tests.system.suite.test_crash import owner

pytestmark = pytest.mark.asyncio(loop_scope="session")


def put(path: Path, line: str, seconds: float = 0.0) -> str:
    return f"call put_line with {json.dumps({'path': str(path), 'line': line, 'seconds': seconds})}"


async def three_lines(agent: Agent, path: Path, seconds: float = 0.0) -> run_pb2.Run:
    """A run that has ended, with a question between its effects."""
    first, second, third = (put(path, line, seconds) for line in ("one", "two", "three"))
    run = await agent.start(f"{first} then ask me which colour then {second} then {third} then what is 2 + 2")
    question = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    await agent.decide(question, call_pb2.DECISION_KIND_ANSWER, answer="blue")
    ended = await agent.until_ended(run.run_id)
    assert path.read_text() == "one\ntwo\nthree\n"
    return ended


async def undo(agent: Agent, run_id: str) -> run_pb2.Run:
    return (await agent.stub.UndoRun(undo_pb2.UndoRunRequest(run_id=run_id), metadata=agent.metadata)).run


async def report(agent: Agent, run_id: str) -> list[tuple[str, str]]:
    request = undo_pb2.GetUndoReportRequest(run_id=run_id)
    calls = (await agent.stub.GetUndoReport(request, metadata=agent.metadata)).calls
    return [(call.tool_name, undo_pb2.UndoState.Name(call.state).removeprefix("UNDO_STATE_")) for call in calls]


async def test_a_run_is_undone_backwards_across_a_question_and_only_once(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    run = await three_lines(agent, path)

    undoing = await undo(agent, run.run_id)
    ended = await agent.until_ended(undoing.run_id)

    # Each inverse fails unless its line is the last one.
    assert path.read_text() == ""
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert ended.usage.model_calls == 0
    told = [*(("put_line", "UNDONE"),) * 2, ("ask_user", "NOTHING_TO_UNDO"), ("put_line", "UNDONE")]
    assert [each for each in await report(agent, undoing.run_id) if each[0] != "calculate"] == told
    again = await undo(agent, run.run_id)
    await agent.until_ended(again.run_id)
    assert ("put_line", "ALREADY_UNDONE") in await report(agent, again.run_id)
    assert await agent.calls(again.run_id) == []


async def test_an_inverse_fails_by_itself_where_things_have_moved_on(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    run = await agent.start(f"{put(path, 'one')} then {put(path, 'two')}")
    await agent.until_ended(run.run_id)
    path.write_text(path.read_text() + "by somebody else\n")

    undoing = await undo(agent, run.run_id)
    ended = await agent.until_ended(undoing.run_id)

    assert await report(agent, undoing.run_id) == [("put_line", "FAILED"), ("put_line", "FAILED")]
    assert "the last line is not 'two' any more" in ended.output_text
    assert path.read_text() == "one\ntwo\nby somebody else\n"


async def test_a_destructive_inverse_waits_for_its_approval_and_the_conversation_goes_on(
    agent: Agent, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    run = await agent.start(f"call put_file with {json.dumps({'path': str(path)})}")
    await agent.until_ended(run.run_id)

    undoing = await undo(agent, run.run_id)
    waiting = await agent.until_pending(undoing.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    assert await report(agent, undoing.run_id) == [("put_file", "NEEDS_APPROVAL")]
    assert path.exists()
    await agent.decide(waiting, call_pb2.DECISION_KIND_APPROVE)
    await agent.until_ended(undoing.run_id)

    assert not path.exists()
    assert await report(agent, undoing.run_id) == [("put_file", "UNDONE")]
    after = await agent.start("what is 17 * 23?", conversation_id=run.conversation_id)
    assert "391" in (await agent.until_ended(after.run_id)).output_text


async def test_tasks_that_the_agent_made_are_taken_back_with_the_consent_of_the_user(agent: Agent) -> None:
    """HITL-7 with the built-in tools: deleting is destructive, so each deletion is approved."""
    run = await agent.start("add task Moving house with subtasks Pack the books and Cancel the lease")
    await agent.until_ended(run.run_id)
    assert "Pack the books" in (await tasks(agent))

    undoing = await undo(agent, run.run_id)
    shown = []
    while (await agent.get(undoing.run_id)).state != run_pb2.RUN_STATE_COMPLETED:
        waiting = (await agent.get(undoing.run_id)).pending_calls
        if waiting and waiting[0].call_id not in shown:
            shown.append(waiting[0].call_id)
            await agent.decide(waiting[0], call_pb2.DECISION_KIND_APPROVE)

    assert len(shown) == 3
    made = [("add_subtask", "UNDONE"), ("add_subtask", "UNDONE"), ("create_task", "UNDONE")]
    assert await report(agent, undoing.run_id) == made
    assert "Moving house" not in (await tasks(agent))


async def tasks(agent: Agent) -> str:
    """What the agent's tools say of the tasks of the user."""
    listed = await agent.start("call list_projects")
    await agent.until_ended(listed.run_id)
    return str((await agent.calls(listed.run_id))[0].result.content_json)


async def test_an_undo_goes_on_after_its_owner_was_killed_and_takes_nothing_back_twice(
    suite: Suite, tmp_path: Path
) -> None:
    path = tmp_path / "lines"
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc) as agent:
        run = await three_lines(agent, path, seconds=3.0)
        undoing = await undo(agent, run.run_id)

        async def first_is_taken() -> bool:
            return path.read_text() in {"one\ntwo\n", "one\n"}

        await until(first_is_taken)
        killed = await owner(suite)
    async with Agent(suite.endpoints.services["agent-loop"][1 - killed].grpc) as survivor:
        suite.kill("agent-loop", killed)
        ended = await survivor.until_ended(undoing.run_id)
        states = [call.state for call in await survivor.calls(undoing.run_id)]
    await suite.wait_ready("agent-loop", killed)
    assert ended.epoch > 1
    assert path.read_text() == ""
    assert states == [call_pb2.CALL_STATE_SUCCEEDED] * 3


async def test_the_steps_of_a_run_show_its_reasoning_as_it_was_streamed(agent: Agent) -> None:
    """HITL-8"""
    run = await agent.start("what is 2 + 2?")
    stream = agent.stub.WatchSteps(steps_pb2.WatchStepsRequest(run_id=run.run_id), metadata=agent.metadata)
    watched: dict[str, steps_pb2.Step] = {}
    async for response in stream:
        for change in response.changes:
            before = watched.get(change.step.step_id, steps_pb2.Step()).content if change.appends else ""
            change.step.content = before + change.step.content
            watched[change.step.step_id] = change.step

    listed = (await agent.stub.ListSteps(steps_pb2.ListStepsRequest(run_id=run.run_id), metadata=agent.metadata)).steps
    events = await agent.events(run.run_id)

    assert sorted(watched) == sorted(step.step_id for step in listed)
    assert all(watched[step.step_id] == step for step in listed)
    streamed = "".join(event.output_delta.reasoning for event in events if event.HasField("output_delta"))
    assert streamed
    assert "".join(step.content for step in listed if step.type == steps_pb2.STEP_TYPE_REASONING) == streamed
    kinds = [step.type for step in listed]
    assert kinds.index(steps_pb2.STEP_TYPE_TOOL_CALL) < kinds.index(steps_pb2.STEP_TYPE_RESULT)
    assert kinds[-1] == steps_pb2.STEP_TYPE_ANSWER
