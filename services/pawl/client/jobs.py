"""The verbs of a client for what goes on in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1 import jobs_pb2 as pb
from pawl.client.target import Target
from pawl.event.v1 import run_pb2

_OPEN: Final = (
    run_pb2.RUN_STATE_QUEUED,
    run_pb2.RUN_STATE_RUNNING,
    run_pb2.RUN_STATE_WAITING,
    run_pb2.RUN_STATE_CANCELLING,
    run_pb2.RUN_STATE_NEEDS_ATTENTION,
)
_LOOK_SECONDS: Final = 1.0
# A run may become visible after one that was created later.
_LATE_MICROSECONDS: Final = 10_000_000


class JobVerbs(Target):
    """A suite with calls that go on in the background, as its users see it."""

    async def list_jobs(
        self, conversation_id: str = "", *, open_only: bool = False
    ) -> AsyncGenerator[pb.BackgroundJob, None]:
        """Yield your jobs, the newest first: those that report to a conversation, if it is named."""
        request = pb.ListJobsRequest(conversation_id=conversation_id, open_only=open_only)
        async for page in self.pages(self.jobs.ListJobs, request):
            for job in page.jobs:
                yield job

    async def get_job(self, job_id: str) -> pb.BackgroundJob:
        """Return a job, with the calls that wait for somebody."""
        return (await self.again(self.jobs.GetJob, pb.GetJobRequest(job_id=job_id))).job

    async def stop_job(self, job_id: str, reason: str = "", *, request_id: str = "") -> pb.BackgroundJob:
        """Stop a job; returns it as it is now. One that has ended stays as it is."""
        request = pb.StopJobRequest(job_id=job_id, reason=reason, request_id=request_id)
        return (await self.once(self.jobs.StopJob, request)).job

    async def pause_job(self, job_id: str, *, request_id: str = "") -> pb.BackgroundJob:
        """Let no iteration of a job begin any more; returns it. One that has begun ends as usual."""
        return (await self.once(self.jobs.PauseJob, pb.PauseJobRequest(job_id=job_id, request_id=request_id))).job

    async def resume_job(self, job_id: str, *, request_id: str = "") -> pb.BackgroundJob:
        """Let a paused job go on, on its beat; returns it. What it missed is skipped."""
        return (await self.once(self.jobs.ResumeJob, pb.ResumeJobRequest(job_id=job_id, request_id=request_id))).job

    async def stop_jobs(
        self, conversation_id: str, reason: str = "", *, request_id: str = ""
    ) -> Sequence[pb.BackgroundJob]:
        """Stop all open jobs of a conversation; returns those that it stopped, the newest first."""
        request = pb.StopJobsRequest(conversation_id=conversation_id, reason=reason, request_id=request_id)
        return (await self.once(self.jobs.StopJobs, request)).jobs

    async def follow(self, conversation_id: str, from_run_id: str = "") -> AsyncGenerator[run_pb2.Run, None]:
        """Yield your open runs of a conversation, then those that begin in it, each once, within seconds; never ends.

        With `from_run_id` also those that have ended, from that run on: so none is missed that began meanwhile. Those
        that nobody asked for are among them: turns of the model, which begin with what jobs have to tell.
        """
        if from_run_id:
            first = (await self.again(self.agents.GetRun, agent_pb2.GetRunRequest(run_id=from_run_id))).run
            before = last = first.create_time.ToMicroseconds() - 1
        else:
            newest = agent_pb2.ListRunsRequest(conversation_id=conversation_id, page_size=1)
            found = (await self.again(self.agents.ListRuns, newest)).runs
            before = last = found[0].create_time.ToMicroseconds() if found else 0
        request = agent_pb2.ListRunsRequest(conversation_id=conversation_id, order=agent_pb2.RUN_ORDER_OLDEST_FIRST)
        if from_run_id:
            request.create_time_from.FromMicroseconds(max(0, before))
        else:
            request.states.extend(_OPEN)
        seen = set[str]()
        while True:
            listed = set[str]()
            async for page in self.pages(self.agents.ListRuns, request):
                for run in page.runs:
                    listed.add(run.run_id)
                    created = run.create_time.ToMicroseconds()
                    last = max(last, created)
                    if run.run_id not in seen and (created > before or run.state in _OPEN):
                        yield run
            if not request.states:
                await asyncio.sleep(_LOOK_SECONDS)
            seen = listed
            del request.states[:]
            request.create_time_from.FromMicroseconds(max(0, last - _LATE_MICROSECONDS))
