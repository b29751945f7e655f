"""The Python client through the whole suite, while replicas of agent-loop die."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pawl.client import AsyncClient, Client, Piece, approve, edit
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.tools import Category, EffectClass, ToolContext, tool
from tests.keys import LOCAL_KEY

pytestmark = pytest.mark.asyncio(loop_scope="session")


def arguments(suite: Suite) -> dict[str, Any]:
    """How to reach the suite, at all replicas of agent-loop."""
    addresses = [replica.grpc for replica in suite.endpoints.services["agent-loop"]]
    tools = suite.endpoints.services["tool-registry"][0].grpc
    return {
        "address": addresses,
        "api_key": LOCAL_KEY,
        "environment": {"PAWL_TOOL_REGISTRY_ADDRESS": tools},
        "retry_seconds": 30.0,
    }


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
def show_report(title: str, context: ToolContext) -> dict[str, str]:
    """Shows a report to the user."""
    context.progress(0.5, "drawing")
    return {"shown": title, "to": context.user_id}


async def test_text_and_events_are_whole_although_each_replica_is_killed_while_they_come(suite: Suite) -> None:
    """EVT-1, OPS-4: what was said is void where it says so."""
    async with AsyncClient(**arguments(suite)) as pawl:
        run = await pawl.start("count to 40 slowly")
        shown, killed = "", 0
        async for piece in pawl.text(run.run_id):
            shown = shown[: len(shown) - piece.takes_back] + piece
            if killed < 2 and len(shown) > 10:
                suite.kill("agent-loop", killed)
                killed += 1
                await suite.wait_ready("agent-loop", killed - 1)
        done = await pawl.result(run.run_id)
        assert done.state == run_pb2.RUN_STATE_COMPLETED
        answers = [message.text async for message in pawl.messages(run.conversation_id)][1:]
        assert shown == "\n\n".join(answers)
        seqs = [event.seq async for event in pawl.watch(run.run_id) if not hasattr(event, "from_seq")]
        assert seqs == list(range(1, done.last_seq + 1))


async def test_a_program_without_asyncio_starts_shows_approves_and_uploads(suite: Suite, tmp_path: Path) -> None:
    """FE-2, HITL-2."""
    (tmp_path / "closed.txt").write_text("The office is closed on 24 December.")

    def program() -> tuple[str, str, run_pb2.Run, list[str]]:
        with Client(**arguments(suite)) as pawl, pawl.session(tools=[show_report]) as session:
            pawl.upload(tmp_path / "closed.txt")
            named = [document.name for document in pawl.documents()]
            shown = session.start('call show_report with {"title": "Plan"}')
            text = "".join(pawl.text(shown))
            (call,) = pawl.calls(shown)
            mail = pawl.start("e-mail kim@example.com about Lunch: See you at noon")
            waiting = pawl.get(mail.run_id, wait_seconds=30)
            (gated,) = waiting.pending_calls
            pending = [item for item in pawl.pending() if isinstance(item, call_pb2.Call)]
            # Tests before this one may have left theirs.
            assert [item.call_id for item in pending if item.run_id == mail.run_id] == [gated.call_id]
            changed = {"to": "kim@example.com", "subject": "Dinner", "body": "See you at eight"}
            pawl.decide(edit(gated, changed))
            done = pawl.result(mail.run_id)
            return text, call.result.content_json.decode(), done, named

    text, result, done, named = await asyncio.to_thread(program)
    assert isinstance(text, str)
    assert result == '{"shown":"Plan","to":"me"}'
    assert done.state == run_pb2.RUN_STATE_COMPLETED
    assert "closed.txt" in named


async def test_a_front_end_goes_on_at_another_replica(suite: Suite) -> None:
    """FE-2: it is told that it was lost, and its run is whole."""
    lost = asyncio.Event()
    async with (
        AsyncClient(**arguments(suite)) as pawl,
        pawl.session(tools=[show_report], on_lost=lost.set) as session,
    ):
        first = pawl.agent[0]
        run_id = await session.start("count to 200 slowly")
        seqs: list[int] = []
        async for frame in session:
            if frame.HasField("end"):
                break
            seqs.append(frame.event.seq)
            if len(seqs) == 5:
                suite.kill("agent-loop", 0)
        assert lost.is_set(), f"it was not at {first}"
        await suite.wait_ready("agent-loop", 0)
        assert seqs == list(range(1, (await pawl.get(run_id)).last_seq + 1))


async def test_a_decision_is_taken_once_whoever_answers(suite: Suite) -> None:
    """HITL-2, I2: the replica is killed at the moment of the decision."""
    async with AsyncClient(**arguments(suite)) as pawl:
        run = await pawl.start("e-mail kim@example.com about Lunch: See you at noon")
        (call,) = (await pawl.get(run.run_id, wait_seconds=30)).pending_calls
        suite.kill("agent-loop", 0)
        await pawl.decide(approve(call))
        done = await pawl.result(run.run_id)
        await suite.wait_ready("agent-loop", 0)
        (settled,) = [each async for each in pawl.calls(run.run_id)]
        assert settled.state == call_pb2.CALL_STATE_SUCCEEDED
        assert done.state == run_pb2.RUN_STATE_COMPLETED
        assert isinstance(await anext(pawl.text(run.run_id)), Piece)


async def test_a_program_finds_names_labels_and_archives_conversations(suite: Suite) -> None:
    async with AsyncClient(**arguments(suite)) as pawl:
        run = await pawl.start("what is 17 * 23", conversation_key="ticket-7")
        await pawl.result(run.run_id)
        found = await pawl.get_conversation(conversation_key="ticket-7")
        assert found.conversation_id == run.conversation_id
        named = await pawl.update_conversation(found.conversation_id, title="Sums", labels={"case": "7"})
        assert (named.title, dict(named.labels)) == ("Sums", {"case": "7"})
        assert [each.title async for each in pawl.list_conversations(labels={"case": "7"})] == ["Sums"]
        await pawl.update_conversation(found.conversation_id, archived=True, labels={})
        assert [each async for each in pawl.list_conversations(labels={"case": "7"})] == []
        archived = [each.conversation_id async for each in pawl.list_conversations(archived=True)]
        assert found.conversation_id in archived
