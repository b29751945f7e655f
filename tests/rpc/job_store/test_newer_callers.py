"""A job-store that is older than its callers refuses what it does not know by name, and never with INTERNAL (OPS-4)."""

from __future__ import annotations

import grpc
import pytest

from pawl.job.v1 import ledger_pb2
from tests.fakes.unknown_values import BROKEN, calls_by_method, code_of
from tests.rpc.job_store.user import User

CALLS = calls_by_method(ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"])


@pytest.mark.parametrize("method", sorted(CALLS))
async def test_a_value_that_is_unknown_is_refused_or_carried(user: User, method: str) -> None:
    """In each field that has one, in a request about a run that is held; then it is read, and what was submitted."""
    ended = dict[str, list[grpc.StatusCode]]()
    for number, (field, request) in enumerate(CALLS[method]):
        owner = await user.start()
        known = {"store_id": user.store_id, "user_id": user.user_id, "run_id": owner.run_id, "epoch": 1}
        for name, value in (known | {"request_id": f"r{number}", "conversation_id": "", "lease_seconds": 30.0}).items():
            if name in request.DESCRIPTOR.fields_by_name:
                setattr(request, name, value)
        ended[field] = [await code_of(getattr(user.stub, method)(request))]
        for run_id in (owner.run_id, *(run.run_id for run in await user.claim("w2", runs_max=10))):
            about = {"store_id": user.store_id, "run_id": run_id}
            ended[field] += [
                await code_of(user.stub.LoadRun(ledger_pb2.LoadRunRequest(**about, epoch=1))),
                await code_of(user.stub.GetRun(ledger_pb2.GetRunRequest(**about, user_id=user.user_id))),
            ]
    assert {field: codes for field, codes in ended.items() if BROKEN & {*codes}} == {}


def test_there_are_such_fields() -> None:
    assert CALLS.keys() >= {"SubmitMessage", "CommitRun", "SendCommand", "ListRuns", "ListPendingCalls"}
