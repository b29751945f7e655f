"""Records the times at which a client receives the output of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bench.subjects import START, Pawl
from pawl.agent.v1 import agent_pb2
from pawl.event.v1 import run_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Times at which the client received a run's output events, by round, in monotonic seconds."""

    output: dict[int, list[float]] = field(default_factory=dict)


async def watch(pawl: Pawl, start: agent_pb2.StartRunRequest = START) -> Seen:
    """Do one run, and record the times at which its output arrives.

    Raises:
        RuntimeError: the run did not complete.
    """
    return await follow(pawl, (await pawl.agents.StartRun(start)).run.run_id)


async def follow(pawl: Pawl, run_id: str) -> Seen:
    """Watch a run to its end, and record the times at which its output arrives.

    Raises:
        RuntimeError: the run did not complete.
    """
    seen, state = Seen(), run_pb2.RUN_STATE_UNSPECIFIED
    async for answer in pawl.agents.WatchRun(agent_pb2.WatchRunRequest(run_id=run_id)):
        now = time.monotonic()
        for event in answer.events:
            if event.HasField("output_delta"):
                seen.output.setdefault(event.output_delta.round, []).append(now)
            elif event.HasField("run_changed"):
                state = event.run_changed.run.state
    if state != run_pb2.RUN_STATE_COMPLETED:
        raise RuntimeError(f"{run_id} ended as {run_pb2.RunState.Name(state)}")
    return seen
