"""OperatorService: what operators see of a store and do about its runs, and each way in which they are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import agent_pb2, operator_pb2
from pawl.agent_loop.app.public_values import RedriveCommand
from pawl.agent_loop.domain.command import Cancel
from pawl.agent_loop.domain.run import RunState, StopCause
from pawl.chassis.auth import Principal
from pawl.chassis.ids import StoreId, UserId
from pawl.event.v1 import call_pb2, run_pb2
from tests.rpc.agent_loop.conftest import ADMIN, BOSS, FOREIGN_BOSS, ME, STRANGERS
from tests.rpc.agent_loop.errors import failure, reason
from tests.rpc.agent_loop.ledger import YOU, PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.operator_pb2_grpc import OperatorServiceAsyncStub

QUARANTINED = run_pb2.ATTENTION_REASON_QUARANTINED
UNKNOWN_OUTCOME = run_pb2.ATTENTION_REASON_UNKNOWN_OUTCOME


def redrive(run_id: str = "run_1", request_id: str = "", reason: str = "") -> operator_pb2.RedriveRunRequest:
    return operator_pb2.RedriveRunRequest(request_id=request_id, run_id=run_id, reason=reason)


def end(run_id: str = "run_1", request_id: str = "", reason: str = "") -> operator_pb2.EndRunRequest:
    return operator_pb2.EndRunRequest(request_id=request_id, run_id=run_id, reason=reason)


def on(operators: OperatorServiceAsyncStub, run_id: str = "run_1", **fields: str) -> list[tuple[Any, Any]]:
    """Every method that changes a run, with an otherwise good request."""
    return [
        (operators.RedriveRun, redrive(run_id, **fields)),
        (operators.EndRun, end(run_id, **fields)),
    ]


@pytest.mark.parametrize("metadata", [BOSS, ADMIN])
async def test_an_operator_sees_the_runs_of_all_users_that_need_attention_and_nothing_of_what_they_say(
    operators: OperatorServiceAsyncStub, ledger: PlayedLedger, metadata: Any
) -> None:
    await ledger.add_run("run_1")
    await ledger.add_run("run_2", YOU)
    await ledger.add_run("run_3")
    await ledger.add_run("run_4", Principal(store_id=StoreId("elsewhere"), user_id=UserId("me")))
    ledger.put_run("run_2", output=run_pb2.Run(output_text="a secret").SerializeToString(), crashes=3)
    await ledger.need_attention(QUARANTINED, "run_2")
    await ledger.need_attention(UNKNOWN_OUTCOME, "run_3")
    await ledger.need_attention(QUARANTINED, "run_4")
    page = await operators.ListAttention(operator_pb2.ListAttentionRequest(), metadata=metadata)
    assert [(run.run_id, run.user_id, run.attention.reason, run.crash_count) for run in page.runs] == [
        ("run_2", "you", QUARANTINED, 3),
        ("run_3", "me", UNKNOWN_OUTCOME, 0),
    ]
    assert b"a secret" not in page.SerializeToString()
    only = operator_pb2.ListAttentionRequest(run_id="run_3")
    assert [run.run_id for run in (await operators.ListAttention(only, metadata=metadata)).runs] == ["run_3"]
    calm = operator_pb2.ListAttentionRequest(run_id="run_1")
    assert not (await operators.ListAttention(calm, metadata=metadata)).runs
    for absent in ("run_absent", "run_4"):  # The last is another store's.
        request = operator_pb2.ListAttentionRequest(run_id=absent)
        assert await reason(operators.ListAttention(request, metadata=metadata)) == "RUN_NOT_FOUND"


async def test_a_quarantined_run_goes_on_once(operators: OperatorServiceAsyncStub, ledger: PlayedLedger) -> None:
    """I2"""
    await ledger.add_run()
    await ledger.need_attention(QUARANTINED)
    request = redrive(request_id="r1", reason="mended")
    for _ in range(2):
        answer = await operators.RedriveRun(request, metadata=BOSS)
        assert answer.state == run_pb2.RUN_STATE_QUEUED
    assert ledger.commands == [RedriveCommand(reason="mended")]
    assert await reason(operators.RedriveRun(redrive(request_id="r2"), metadata=BOSS)) == "ATTENTION_NOT_NEEDED"


@pytest.mark.parametrize("why", [QUARANTINED, UNKNOWN_OUTCOME])
async def test_a_run_that_needs_attention_is_ended_once(
    operators: OperatorServiceAsyncStub, ledger: PlayedLedger, why: run_pb2.AttentionReason.ValueType
) -> None:
    """I2, I12"""
    await ledger.add_run()
    await ledger.need_attention(why)
    for _ in range(2):
        answer = await operators.EndRun(end(request_id="r1", reason="enough"), metadata=BOSS)
        assert answer.state == run_pb2.RUN_STATE_CANCELLING
    assert ledger.commands == [Cancel(cause=StopCause.OPERATOR, reason="enough")]
    await ledger.change("run_1", RunState.CANCELLED)
    answer = await operators.EndRun(end(), metadata=BOSS)
    assert answer.state == run_pb2.RUN_STATE_CANCELLED


async def test_what_is_not_needed_is_refused_and_changes_nothing(
    operators: OperatorServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await ledger.add_run()
    error = await failure(operators.RedriveRun(redrive(), metadata=BOSS))
    assert (error.reason, error.kind.value) == ("ATTENTION_NOT_NEEDED", "FAILED_PRECONDITION")
    await ledger.need_attention(UNKNOWN_OUTCOME)
    assert await reason(operators.RedriveRun(redrive(), metadata=BOSS)) == "ATTENTION_NOT_NEEDED"
    await ledger.finish()
    assert await reason(operators.RedriveRun(redrive(), metadata=BOSS)) == "RUN_ENDED"


async def test_a_request_id_with_another_payload_is_refused(
    operators: OperatorServiceAsyncStub, stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """I2: by whichever method it comes."""
    await ledger.add_run()
    await ledger.need_attention(QUARANTINED)
    await operators.RedriveRun(redrive(request_id="r1"), metadata=BOSS)
    resolve = agent_pb2.ResolveCallRequest(
        request_id="r1", run_id="run_1", call_id="call_1", resolution=agent_pb2.RESOLUTION_TELL_MODEL
    )
    cancel = agent_pb2.CancelRunRequest(request_id="r1", run_id="run_1")
    top_up = agent_pb2.TopUpRunRequest(request_id="r1", run_id="run_1", tokens=1)
    others: list[Any] = [
        operators.RedriveRun(redrive(request_id="r1", reason="another"), metadata=BOSS),
        operators.EndRun(end(request_id="r1"), metadata=BOSS),
        stub.ResolveCall(resolve, metadata=BOSS),
        stub.CancelRun(cancel, metadata=ME),
        stub.TopUpRun(top_up, metadata=ME),
    ]
    for other in others:
        error = await failure(other)
        assert (error.reason, error.kind.value) == ("REQUEST_ID_REUSED", "ALREADY_EXISTS")


@pytest.mark.parametrize("metadata", [ME, *STRANGERS])
async def test_who_is_no_operator_is_told_so_whether_or_not_the_run_exists(
    operators: OperatorServiceAsyncStub, ledger: PlayedLedger, metadata: Any
) -> None:
    """I13"""
    await ledger.add_run()
    await ledger.need_attention(QUARANTINED)
    calls = [*on(operators), *on(operators, "run_absent")]
    for method, request in [*calls, (operators.ListAttention, operator_pb2.ListAttentionRequest())]:
        assert await reason(method(request, metadata=metadata)) == "PERMISSION_DENIED"
    assert not ledger.commands


async def test_an_operator_of_another_store_finds_nothing(
    operators: OperatorServiceAsyncStub, stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """I13: exactly as if the run did not exist."""
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_RUNNING)
    await ledger.need_attention(UNKNOWN_OUTCOME)
    listed = await operators.ListAttention(operator_pb2.ListAttentionRequest(), metadata=FOREIGN_BOSS)
    assert not listed.runs
    answers: list[list[tuple[str, str]]] = []
    for run_id in ("run_1", "run_absent"):
        resolve = agent_pb2.ResolveCallRequest(
            run_id=run_id, call_id="call_1", resolution=agent_pb2.RESOLUTION_TELL_MODEL
        )
        errors = [
            await failure(method(request, metadata=FOREIGN_BOSS))
            for method, request in [*on(operators, run_id), (stub.ResolveCall, resolve)]
        ]
        answers.append([(error.reason, error.message) for error in errors])
    assert answers[0] == answers[1]
    assert {error[0] for error in answers[0]} == {"RUN_NOT_FOUND"}
    assert not ledger.commands


async def test_an_operator_of_the_store_is_no_user_of_its_runs(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """Settled point 7: others' runs are seen through OperatorService alone."""
    await ledger.add_run()
    assert await reason(stub.GetRun(agent_pb2.GetRunRequest(run_id="run_1"), metadata=BOSS)) == "RUN_NOT_FOUND"
    assert await reason(stub.CancelRun(agent_pb2.CancelRunRequest(run_id="run_1"), metadata=BOSS)) == "RUN_NOT_FOUND"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"run_id": ""}, "INVALID_ID"),
        ({"run_id": "a b"}, "INVALID_ID"),
        ({"request_id": "no spaces"}, "INVALID_ID"),
        ({"reason": "x" * (4 * 1024 + 1)}, "TOO_LARGE"),
        ({"reason": "nul\0"}, "INVALID_FIELD"),
    ],
)
async def test_bad_requests_are_refused(
    operators: OperatorServiceAsyncStub, ledger: PlayedLedger, fields: dict[str, str], expected: str
) -> None:
    await ledger.add_run()
    await ledger.need_attention(QUARANTINED)
    for method, request in on(operators, **{"run_id": "run_1", **fields}):
        assert await reason(method(request, metadata=BOSS)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"page_size": 201}, "INVALID_FIELD"),
        ({"page_token": "made up"}, "INVALID_PAGE_TOKEN"),
        ({"run_id": "a b"}, "INVALID_ID"),
    ],
)
async def test_bad_pages_are_refused(
    operators: OperatorServiceAsyncStub, fields: dict[str, Any], expected: str
) -> None:
    request = operator_pb2.ListAttentionRequest(**fields)
    assert await reason(operators.ListAttention(request, metadata=BOSS)) == expected


async def test_without_the_ledger_it_is_unavailable(operators: OperatorServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    ledger.down = True
    for method, request in [*on(operators), (operators.ListAttention, operator_pb2.ListAttentionRequest())]:
        assert await reason(method(request, metadata=BOSS)) == "DEPENDENCY_UNAVAILABLE"
