"""TopUpRun: tokens are added once, and each way in which they are not (LOOP-12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.agent_loop.domain.command import TopUp
from pawl.agent_loop.domain.limits import TOKENS_MAX
from tests.rpc.agent_loop.conftest import BOSS, ME, STRANGERS
from tests.rpc.agent_loop.errors import failure, reason
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub


def top_up(tokens: int = 500, request_id: str = "", run_id: str = "run_1") -> agent_pb2.TopUpRunRequest:
    return agent_pb2.TopUpRunRequest(request_id=request_id, run_id=run_id, tokens=tokens)


async def add_run(ledger: PlayedLedger, *, budget: int = 1000, ceiling: int = 0) -> None:
    await ledger.add_run()
    ledger.put_run("run_1", token_budget=budget, token_ceiling=ceiling)


async def test_a_top_up_counts_once(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    """I2"""
    await add_run(ledger)
    first = await stub.TopUpRun(top_up(request_id="r1"), metadata=ME)
    assert (first.receipt.status, first.run.token_budget) == (types_pb2.RECEIPT_STATUS_ACCEPTED, 1500)
    again = await stub.TopUpRun(top_up(request_id="r1"), metadata=ME)
    assert (again.receipt.status, again.run.token_budget) == (types_pb2.RECEIPT_STATUS_DUPLICATE, 1500)
    assert ledger.commands == [TopUp(tokens=500)]
    error = await failure(stub.TopUpRun(top_up(501, request_id="r1"), metadata=ME))
    assert (error.reason, error.kind.value) == ("REQUEST_ID_REUSED", "ALREADY_EXISTS")


async def test_one_that_counted_is_told_so_after_the_end_too(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await add_run(ledger)
    await stub.TopUpRun(top_up(request_id="r1"), metadata=ME)
    await ledger.finish()
    again = await stub.TopUpRun(top_up(request_id="r1"), metadata=ME)
    assert again.receipt.status == types_pb2.RECEIPT_STATUS_DUPLICATE
    error = await failure(stub.TopUpRun(top_up(request_id="r2"), metadata=ME))
    assert (error.reason, error.kind.value) == ("RUN_ENDED", "FAILED_PRECONDITION")


async def test_a_run_without_a_budget_needs_none(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await add_run(ledger, budget=0)
    error = await failure(stub.TopUpRun(top_up(), metadata=ME))
    assert (error.reason, error.kind.value) == ("NO_TOKEN_BUDGET", "FAILED_PRECONDITION")


async def test_no_budget_passes_its_ceiling(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await add_run(ledger, ceiling=1600)
    assert (await stub.TopUpRun(top_up(600), metadata=ME)).run.token_budget == 1600
    error = await failure(stub.TopUpRun(top_up(1, request_id="r1"), metadata=ME))
    assert (error.reason, error.kind.value) == ("TOKEN_CEILING", "RESOURCE_EXHAUSTED")
    assert await reason(stub.TopUpRun(top_up(1, request_id="r1"), metadata=ME)) == "TOKEN_CEILING"
    assert ledger.runs["run_1"].run.token_budget == 1600


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (top_up(0), "INVALID_FIELD"),
        (top_up(TOKENS_MAX + 1), "INVALID_FIELD"),
        (top_up(2**64 - 1), "INVALID_FIELD"),
        (top_up(run_id=""), "INVALID_ID"),
        (top_up(request_id="no spaces"), "INVALID_ID"),
        (top_up(run_id="run_absent"), "RUN_NOT_FOUND"),
    ],
)
async def test_bad_top_ups_are_refused(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, request_: agent_pb2.TopUpRunRequest, expected: str
) -> None:
    await add_run(ledger)
    assert await reason(stub.TopUpRun(request_, metadata=ME)) == expected
    assert ledger.runs["run_1"].run.token_budget == 1000


@pytest.mark.parametrize("metadata", [BOSS, *STRANGERS])
async def test_nobody_tops_up_the_run_of_another(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, metadata: Any
) -> None:
    """I13: not found, as if it did not exist; operators have no part in budgets."""
    await add_run(ledger)
    foreign = await failure(stub.TopUpRun(top_up(), metadata=metadata))
    absent = await failure(stub.TopUpRun(top_up(run_id="run_absent"), metadata=metadata))
    assert (foreign.reason, foreign.message) == (absent.reason, absent.message) == ("RUN_NOT_FOUND", absent.message)
