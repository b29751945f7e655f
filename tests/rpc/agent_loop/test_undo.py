"""PreviewUndo, UndoRun, UndoCall and GetUndoReport: permissions, preconditions and responses."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pawl.agent.v1 import agent_pb2, undo_pb2
from pawl.agent.v1.conversation_pb2 import ImportConversationRequest
from pawl.client.history import history
from pawl.event.v1 import call_pb2, run_pb2
from tests.rpc.agent_loop.asking import reason
from tests.rpc.agent_loop.conftest import ADMIN, ME, OFFICE
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.stubs import AgentServiceAsyncStub, ConversationServiceAsyncStub

RUN = undo_pb2.UndoRunRequest(run_id="run_1")


@pytest.fixture(autouse=True)
async def run(ledger: PlayedLedger) -> None:
    """An ended run with one reversible call and two others."""
    await ledger.add_run()
    for number, name in enumerate(("write", "mail", "look"), 1):
        result = call_pb2.CallResult(content_json=b"null")
        if name == "write":
            inverse = call_pb2.Inverse(tool_name="unwrite", arguments_json=b'{"n":1}', summary="Take it back")
            result.inverse.CopyFrom(inverse)
        reads = call_pb2.Call(effect_class=call_pb2.EFFECT_CLASS_READ_ONLY)
        await ledger.add_call(
            f"call_{number}",
            call_pb2.CALL_STATE_SUCCEEDED,
            tool_name=name,
            spec=reads if name == "look" else None,
            result=result.SerializeToString(),
            end_time=datetime.fromtimestamp(number, UTC),
        )
    await ledger.finish()


async def preview(stub: AgentServiceAsyncStub) -> list[tuple[str, str]]:
    response = await stub.PreviewUndo(undo_pb2.PreviewUndoRequest(run_id="run_1"), metadata=ME)
    return [(call.call_id, undo_pb2.UndoState.Name(call.state).removeprefix("UNDO_STATE_")) for call in response.calls]


async def test_preview_shows_how_an_undo_would_affect_each_call(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    assert await preview(stub) == [
        ("call_3", "NOTHING_TO_UNDO"),
        ("call_2", "CANNOT_BE_UNDONE"),
        ("call_1", "TO_UNDO"),
    ]
    assert list(ledger.runs) == ["run_1"]
    response = await stub.PreviewUndo(undo_pb2.PreviewUndoRequest(run_id="run_1", call_id="call_1"), metadata=ME)
    assert [call.summary for call in response.calls] == ["Take it back"]


async def test_undo_is_a_run_in_the_same_conversation(stub: AgentServiceAsyncStub) -> None:
    undoing = (await stub.UndoRun(RUN, metadata=ME)).run

    assert (undoing.conversation_id, undoing.user_id) == ("conv_1", "me")
    assert undoing.undo == run_pb2.Undo(run_id="run_1", user_id="me")
    assert undoing.options.limits.run_timeout_seconds == 300.0


async def test_an_undo_by_an_admin_runs_for_the_user_and_is_recorded(stub: AgentServiceAsyncStub) -> None:
    undoing = (await stub.UndoRun(RUN, metadata=ADMIN)).run

    assert (undoing.user_id, undoing.undo.user_id) == ("me", "root")
    # The ledger treats both as starters of the run: neither may approve its calls, with any credential.
    assert undoing.delegate_user_id == "root"
    report = await stub.GetUndoReport(undo_pb2.GetUndoReportRequest(run_id=undoing.run_id), metadata=ADMIN)
    assert len(report.calls) == 3


async def test_an_undo_by_an_admin_through_a_delegate_records_both(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """HITL-4: the run names the admin and the credential of the delegate, and the delegate cannot approve its calls."""
    undoing = (await stub.UndoRun(RUN, metadata=OFFICE)).run
    assert (undoing.user_id, undoing.undo.user_id, undoing.delegate_user_id) == ("me", "root", "root")
    assert undoing.credential_id.startswith("file-")
    assert undoing.credential_id != (await stub.UndoRun(RUN, metadata=ADMIN)).run.credential_id
    assert ledger.people(undoing.run_id) == ("office",)


async def test_undo_has_the_roles_and_required_approvals_of_the_original_run(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """Otherwise inverse calls of role-restricted tools would fail, and tools that the user may not call would run."""
    original = run_pb2.Run(user_roles=["finance", "member"], options=run_pb2.RunOptions(approvals_required=3))
    ledger.put_run("run_1", options=original.SerializeToString())
    undoing = (await stub.UndoRun(RUN, metadata=ADMIN)).run
    kept = (undoing.user_id, list(undoing.user_roles), undoing.options.approvals_required)
    assert kept == ("me", ["finance", "member"], 3)


async def test_single_call_can_be_undone(stub: AgentServiceAsyncStub) -> None:
    request = undo_pb2.UndoCallRequest(run_id="run_1", call_id="call_9")
    assert await reason(stub.UndoCall(request, metadata=ME)) == "CALL_NOT_FOUND"
    request.call_id = "call_1"
    undoing = (await stub.UndoCall(request, metadata=ME)).run
    assert undoing.undo == run_pb2.Undo(run_id="run_1", call_id="call_1", user_id="me")


async def test_imported_run_cannot_be_undone(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = history(
        [
            {"role": "user", "content": "How warm is it?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "12"},
        ]
    )
    request = ImportConversationRequest(messages=messages)
    made = (await conversations.ImportConversation(request, metadata=ME)).conversation
    listing = agent_pb2.ListMessagesRequest(conversation_id=made.conversation_id)
    run_id = (await stub.ListMessages(listing, metadata=ME)).messages[0].run_id
    (shown,) = (await stub.PreviewUndo(undo_pb2.PreviewUndoRequest(run_id=run_id), metadata=ME)).calls
    assert (shown.state, "another system" in shown.reason) == (undo_pb2.UNDO_STATE_CANNOT_BE_UNDONE, True)
