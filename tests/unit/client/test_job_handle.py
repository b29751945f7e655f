"""Jobs as the clients return them."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2, jobs_pb2
from pawl.client import AsyncClient, Client
from pawl.event.v1 import run_pb2

JOB = jobs_pb2.BackgroundJob(job_id="run_1", definition=run_pb2.Job(tool_name="scrape"))


class Service:
    """Answers every method about the job, and keeps the requests."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        async def answer(request: Any) -> Any:
            self.asked.append(request)
            if method == "GetRun":
                return agent_pb2.GetRunResponse(run=run_pb2.Run(state=run_pb2.RUN_STATE_COMPLETED, output_text="done"))
            made = getattr(jobs_pb2, f"{method}Response")
            return made(jobs=[JOB]) if method == "ListJobs" else made(job=JOB)

        return answer


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    for name in ("jobs", "agents"):
        monkeypatch.setattr(AsyncClient, name, service)
    return service


async def test_a_job_is_read_and_controlled_with_its_own_methods(service: Service) -> None:
    async with AsyncClient("127.0.0.1:1", environment={}) as pawl:
        jobs = [await pawl.start_job("scrape"), await pawl.get_job("run_1"), *[job async for job in pawl.list_jobs()]]
        service.asked.clear()
        for job in jobs:
            assert (job.job_id, job.definition.tool_name) == ("run_1", "scrape")
            assert [await job.pause(), await job.resume(), await job.stop("enough")] == [JOB] * 3
    assert [(request.job_id, getattr(request, "reason", "")) for request in service.asked] == [
        *[("run_1", ""), ("run_1", ""), ("run_1", "enough")] * 3
    ]


def test_methods_of_a_job_block_if_it_comes_from_the_blocking_client(service: Service) -> None:
    with Client("127.0.0.1:1", environment={}) as pawl:
        jobs = [pawl.start_job("scrape"), pawl.get_job("run_1"), *pawl.list_jobs()]
        assert [job.stop() for job in jobs] == [JOB] * 3
        assert jobs[0].result().output_text == "done"
