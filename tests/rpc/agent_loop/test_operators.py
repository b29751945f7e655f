"""OperatorService: what operators see and do in a store, and each way in which a request is rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pawl.agent.v1 import operator_pb2
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId, UserId
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2
from tests.rpc.agent_loop.conftest import BOSS
from tests.rpc.agent_loop.errors import reason
from tests.rpc.agent_loop.ledger import YOU, PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.operator_pb2_grpc import OperatorServiceAsyncStub

QUARANTINED = run_pb2.ATTENTION_REASON_QUARANTINED
UNKNOWN_OUTCOME = run_pb2.ATTENTION_REASON_UNKNOWN_OUTCOME


def redrive(run_id: str = "run_1", request_id: str = "", reason: str = "") -> operator_pb2.RedriveRunRequest:
    return operator_pb2.RedriveRunRequest(request_id=request_id, run_id=run_id, reason=reason)


async def test_operator_sees_runs_that_need_attention_without_their_content(
    operators: OperatorServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await ledger.add_run("run_1")
    await ledger.add_run("run_2", YOU)
    await ledger.add_run("run_3")
    await ledger.add_run("run_4", Principal(store_id=StoreId("elsewhere"), user_id=UserId("me")))
    ledger.put_run("run_2", output=run_pb2.Run(output_text="a secret").SerializeToString(), crashes=3)
    await ledger.need_attention(QUARANTINED, "run_2")
    await ledger.need_attention(UNKNOWN_OUTCOME, "run_3")
    await ledger.need_attention(QUARANTINED, "run_4")
    page = await operators.ListAttention(operator_pb2.ListAttentionRequest(), metadata=BOSS)
    assert [(run.run_id, run.user_id, run.attention.reason, run.crash_count) for run in page.runs] == [
        ("run_2", "you", QUARANTINED, 3),
        ("run_3", "me", UNKNOWN_OUTCOME, 0),
    ]
    assert b"a secret" not in page.SerializeToString()
    only = operator_pb2.ListAttentionRequest(run_id="run_3")
    assert [run.run_id for run in (await operators.ListAttention(only, metadata=BOSS)).runs] == ["run_3"]
    calm = operator_pb2.ListAttentionRequest(run_id="run_1")
    assert not (await operators.ListAttention(calm, metadata=BOSS)).runs
    for absent in ("run_absent", "run_4"):  # The last is of another store
        request = operator_pb2.ListAttentionRequest(run_id=absent)
        assert await reason(operators.ListAttention(request, metadata=BOSS)) == "RUN_NOT_FOUND"


async def test_quarantined_run_is_redriven_once(operators: OperatorServiceAsyncStub, ledger: PlayedLedger) -> None:
    """I2: a repeated request has no further effect."""
    await ledger.add_run()
    await ledger.need_attention(QUARANTINED)
    request = redrive(request_id="r1", reason="mended")
    for _ in range(2):
        answer = await operators.RedriveRun(request, metadata=BOSS)
        assert answer.state == run_pb2.RUN_STATE_QUEUED
    assert ledger.commands == [ledger_pb2.Command(redrive=ledger_pb2.RedriveCommand(reason="mended"))]
    assert await reason(operators.RedriveRun(redrive(request_id="r2"), metadata=BOSS)) == "ATTENTION_NOT_NEEDED"
