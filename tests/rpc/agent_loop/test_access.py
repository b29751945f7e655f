"""Tenant isolation, reused request ids and an unavailable ledger."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.agent.v1 import (
    agent_pb2,
    jobs_pb2,
    operator_pb2,
    steps_pb2,
    types_pb2,
    undo_pb2,
)
from pawl.event.v1 import run_pb2
from tests.rpc.agent_loop.asking import (
    EDIT,
    MISSING,
    Api,
    Row,
    check_refusals,
    decide,
    failure,
    fork,
    get,
    importing,
    job,
    reason,
    resolve,
    search,
    start,
    top_up,
    update,
)
from tests.rpc.agent_loop.conftest import APPROVER, BOSS, FOREIGN_BOSS, ME, OPERATOR, OTHER_USERS
from tests.rpc.agent_loop.ledger import PlayedLedger

pytestmark = pytest.mark.usefixtures("gated_run")


def of_run(run_id: str, call_id: str = "call_1") -> list[Any]:
    """Return a valid request for every method that a user calls about a run."""
    result = types_pb2.ToolResult(call_id=call_id, content_json=b"1")
    return [
        agent_pb2.GetRunRequest(run_id=run_id),
        agent_pb2.CancelRunRequest(run_id=run_id),
        agent_pb2.ListCallsRequest(run_id=run_id),
        decide(call_id, run_id, kind=EDIT, arguments_json=b"{}"),
        agent_pb2.SubmitToolResultsRequest(run_id=run_id, results=[result]),
        agent_pb2.WatchRunRequest(run_id=run_id),
        steps_pb2.ListStepsRequest(run_id=run_id),
        steps_pb2.WatchStepsRequest(run_id=run_id),
        top_up(run_id=run_id),
        undo_pb2.PreviewUndoRequest(run_id=run_id),
        undo_pb2.UndoRunRequest(run_id=run_id),
        undo_pb2.UndoCallRequest(run_id=run_id, call_id=call_id),
        undo_pb2.GetUndoReportRequest(run_id=run_id),
        jobs_pb2.GetJobRequest(job_id=run_id),
        jobs_pb2.StopJobRequest(job_id=run_id),
        jobs_pb2.PauseJobRequest(job_id=run_id),
        jobs_pb2.ResumeJobRequest(job_id=run_id),
    ]


def of_operators(run_id: str) -> list[Any]:
    return [
        operator_pb2.RedriveRunRequest(run_id=run_id),
        operator_pb2.EndRunRequest(run_id=run_id),
        resolve(agent_pb2.RESOLUTION_TELL_MODEL, run_id=run_id),
    ]


@pytest.mark.parametrize("other_user", [*OTHER_USERS, BOSS])
async def test_resources_of_other_users_look_exactly_like_missing_ones(
    api: Api, ledger: PlayedLedger, other_user: Any
) -> None:
    """I8, I13: the error is NOT_FOUND with the same message as for an absent id, even for operators."""
    await ledger.add_run("job_1", conversation_id="conv_of_job_1")
    ledger.put_run("job_1", reports_to="conv_1", options=run_pb2.Run(job=run_pb2.Job()).SerializeToString())
    key = (await api(start(conversation_key="k"))).run.conversation_id
    for run_id in ("run_1", "job_1"):
        for mine, absent in zip(of_run(run_id), of_run(MISSING, MISSING), strict=True):
            found, missing = [await failure(api(request, other_user)) for request in (mine, absent)]
            assert (found.reason, found.message) == (missing.reason, missing.message), type(mine).__name__
            assert found.kind.value == "NOT_FOUND"
    of_conversation = [
        *(get(conversation_id=key), get(conversation_key="k"), update(key, title="yours"), fork(key)),
        *(job(conversation_id="conv_1"), jobs_pb2.StopJobsRequest(conversation_id="conv_1")),
    ]
    await check_refusals(api, [(request, "CONVERSATION_NOT_FOUND") for request in of_conversation], other_user)
    assert not (await api(agent_pb2.ListRunsRequest(), other_user)).runs
    assert not (await api(agent_pb2.ListPendingRequest(), other_user)).calls
    assert not (await api(search(query="hello"), other_user)).conversations
    assert not (await api(jobs_pb2.ListJobsRequest(conversation_id="conv_1"), other_user)).jobs
    assert not ledger.commands


async def test_only_store_operators_act_on_other_users_runs(api: Api, ledger: PlayedLedger) -> None:
    """I13: other users are rejected whether or not the run exists; operators of another store find nothing."""
    await ledger.need_attention(run_pb2.ATTENTION_REASON_QUARANTINED)
    requests = [*of_operators("run_1"), *of_operators(MISSING)]
    listing = operator_pb2.ListAttentionRequest()
    ending = operator_pb2.EndJobsRequest(request_id="e1")
    for metadata in (ME, APPROVER, *OTHER_USERS):
        refused = [(request, "PERMISSION_DENIED") for request in (*requests, listing, ending)]
        await check_refusals(api, [*refused], metadata)
    for mine, absent in zip(of_operators("run_1"), of_operators(MISSING), strict=True):
        found, missing = [await failure(api(request, FOREIGN_BOSS)) for request in (mine, absent)]
        assert (found.reason, found.message) == (missing.reason, missing.message)
        assert found.reason == "RUN_NOT_FOUND"
    assert not (await api(listing, FOREIGN_BOSS)).runs
    assert not ledger.commands


async def test_a_request_id_identifies_one_request(api: Api, ledger: PlayedLedger) -> None:
    """I2: a repeated request gets the same response, and a different request with the id is rejected."""
    await ledger.add_run("run_0", conversation_id="conv_0")
    await ledger.finish("run_0")
    made = (await api(importing(request_id="i"))).conversation.conversation_id
    pairs: list[tuple[Any, Any]] = [
        (start(request_id="s"), start("Bye", request_id="s")),
        (start(request_id="l", labels={"a": "b"}), start(request_id="l", labels={"a": "c"})),
        (start(request_id="o"), start(request_id="o", options=run_pb2.RunOptions(temperature=0.5))),
        (importing(request_id="i"), importing(request_id="i", title="other")),
        (fork(made, request_id="f"), fork(made, request_id="f", number=1)),
        (update(made, request_id="u", title="a"), update(made, request_id="u", title="b")),
        (job(request_id="j"), job(request_id="j", arguments_json=b'{"n": 2}')),
        (undo_pb2.UndoRunRequest(request_id="v", run_id="run_0"), fork(made, request_id="v", number=2)),
        (agent_pb2.CancelRunRequest(request_id="c", run_id="run_1"), top_up(request_id="c")),
    ]
    for request, other in pairs:
        first, again = [await api(request) for _ in range(2)]
        name = type(request).__name__
        assert getattr(first, "run", first) == getattr(again, "run", again), name
        if not isinstance(request, undo_pb2.UndoRunRequest):
            assert await reason(api(other)) == "REQUEST_ID_REUSED", name
    assert [command.WhichOneof("kind") for command in ledger.commands] == ["cancel"]


async def test_unavailable_ledger_returns_unavailable(api: Api, ledger: PlayedLedger) -> None:
    ledger.down = True
    rows: list[Row] = [(request, "DEPENDENCY_UNAVAILABLE") for request in of_run("run_1")]
    # Streams wait for the ledger after they have started.
    await check_refusals(api, [row for row in rows if "Watch" not in type(row[0]).__name__])


@pytest.mark.parametrize("run_id", ["", "a b", "x" * 65, "*", "é"])
async def test_malformed_ids_are_rejected(api: Api, run_id: str) -> None:
    await check_refusals(api, [(request, "INVALID_ID") for request in of_run(run_id)])
    await check_refusals(api, [(request, "INVALID_ID") for request in of_operators(run_id)], OPERATOR)
