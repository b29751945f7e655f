"""Several job stores on one database give consistent responses."""

from __future__ import annotations

import pytest

from pawl.errors import RequestIdReused
from pawl.event.v1 import run_pb2
from tests.rpc.job_store.user import User


async def test_request_identity_does_not_depend_on_deployment_defaults(user: User) -> None:
    """I2: a request that is repeated after a deploy with other defaults is the same request."""
    asked = run_pb2.RunOptions(limits=run_pb2.RunLimits(rounds_max=3))
    old, new = run_pb2.RunOptions(model="old"), run_pb2.RunOptions(model="new")
    first = await user.submit(request_id="r1", options=old, asked_options=asked)
    again = await user.submit(request_id="r1", options=new, asked_options=asked)
    assert (again.run.run_id, again.run.options.model) == (first.run.run_id, "old")
    with pytest.raises(RequestIdReused):
        await user.submit(request_id="r1", options=old, asked_options=run_pb2.RunOptions())
