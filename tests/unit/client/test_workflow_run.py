"""Runs of workflows as the client returns them."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import agent_pb2, workflow_pb2
from pawl.client import AsyncClient
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import run_pb2


class Service:
    """Fails every first attempt, and ends the run at the third read."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self._fails = False
        self._reads = 0

    def __getattr__(self, method: str) -> Any:
        async def answer(request: Any, timeout: float = 0) -> Any:
            assert timeout > getattr(request, "wait_seconds", -1)
            self._fails = not self._fails
            if self._fails:
                raise DependencyUnavailable
            self.asked.append((method, getattr(request, "after_seq", 0)))
            self._reads += 1
            end_time = Timestamp(seconds=9) if self._reads == 3 else None
            run = run_pb2.Run(run_id=request.run_id, last_seq=self._reads, end_time=end_time)
            return (agent_pb2.GetRunResponse if method == "GetRun" else workflow_pb2.GetExecutionResponse)(run=run)

        return answer


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    for name in ("workflows", "agents"):
        monkeypatch.setattr(AsyncClient, name, service)
    return service


async def test_result_waits_for_the_run_to_change_without_reading_its_nodes(service: Service) -> None:
    async with AsyncClient("127.0.0.1:1", environment={}) as pawl:
        assert (await pawl.workflow_run("run_1").result()).last_seq == 3
    assert service.asked == [("GetRun", 0), ("GetRun", 1), ("GetRun", 2)]


async def test_following_continues_after_a_lost_connection(service: Service) -> None:
    async with AsyncClient("127.0.0.1:1", environment={}) as pawl:
        seen = [execution.run.last_seq async for execution in pawl.workflow_run("run_1").follow()]
    assert seen == [1, 3]
    assert service.asked == [("GetExecution", 0), ("GetRun", 1), ("GetExecution", 0)]
