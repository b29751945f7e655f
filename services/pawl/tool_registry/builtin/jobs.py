"""Tools that list and stop a conversation's jobs."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from pawl.chassis.ids import CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.translate import seconds
from pawl.event.v1 import run_pb2
from pawl.tool_registry.ledger import ENDED, LedgerReads
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

# Maximum size of each listed result.
RESULT_CHARACTERS_MAX: Final = 500
# Maximum number of ended jobs that are listed, the most recent first.
ENDED_MAX: Final = 10
JobId = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$"), "the job_id"]


def job_tools(jobs: LedgerReads, clock: Clock) -> list[Tool[..., Any]]:
    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, background=False)
    async def list_jobs(context: ToolContext) -> list[dict[str, Any]]:
        """List your jobs: calls that run in the background. You are notified when a job ends."""
        store_id, user_id, conversation_id = _ids(context)
        found = await jobs.jobs(store_id, user_id, conversation_id, RunId(context.run_id), ended_max=ENDED_MAX)
        return [_shown(run, clock.now()) for run in found]

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, background=False)
    async def stop_job(context: ToolContext, job_id: JobId) -> dict[str, Any]:
        """Stop one of your jobs."""
        store_id, user_id, conversation_id = _ids(context)
        command_id, caller = CommandId(context.idempotency_key), RunId(context.run_id)
        stopped = await jobs.stop_job(RunKey(store_id, RunId(job_id)), user_id, conversation_id, caller, command_id)
        if stopped is None:
            raise ToolError(f"you have no job {job_id!r}; list_jobs returns your jobs")
        run, was_open = stopped
        if not was_open:
            return {**_shown(run, clock.now()), "note": "It had already ended; nothing was stopped."}
        note = "It has ended, and none of it still runs."
        if run.state not in ENDED:
            note = "It is being stopped. A running call may still take effect; list_jobs shows how it ended."
        return {"job_id": run.run_id, "tool": run.job.tool_name, "state": state_of(run), "note": note}

    return [list_jobs, stop_job]


def _ids(context: ToolContext) -> tuple[StoreId, UserId, ConversationId]:
    return StoreId(context.store_id), UserId(context.user_id), ConversationId(context.conversation_id)


def _shown(run: run_pb2.Run, now: float) -> dict[str, Any]:
    job = run.job
    shown: dict[str, Any] = {"job_id": run.run_id, "tool": job.tool_name, "state": state_of(run)}
    shown["started"] = _time(seconds(job.begin_time))
    if job.interval_seconds:
        shown |= {"iterations": run.round, "interval_seconds": job.interval_seconds}
    due = _next_time(run, now)
    if due is not None:
        shown["next"] = _time(due)
    if run.HasField("job_progress"):
        progress = run.job_progress
        percent = {"percent": math.floor(progress.fraction * 100)} if progress.HasField("fraction") else {}
        shown["progress"] = percent | ({"message": progress.message} if progress.message else {})
    if run.output_text:
        cut = run.output_text[:RESULT_CHARACTERS_MAX]
        shown["result"] = cut if cut == run.output_text else f"{cut}..."
    if run.failure.message:
        shown["error"] = run.failure.message
    return shown


def state_of(run: run_pb2.Run) -> str:
    """Return the name of a run's state.

    If the run is waiting for an approval or is paused, return the name of that condition instead.
    """
    if run_pb2.WAIT_KIND_APPROVAL in run.waits:
        return "AWAITING_APPROVAL"
    if run_pb2.WAIT_KIND_PAUSED in run.waits:
        return "PAUSED"
    if run.state not in run_pb2.RunState.values():
        return "RUNNING"
    return run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_")


def _next_time(run: run_pb2.Run, now: float) -> float | None:
    """Return when a job's next iteration is due, or None if there is none or the job is waiting for something else."""
    job, begin_time = run.job, seconds(run.job.begin_time)
    if list(run.waits) != [run_pb2.WAIT_KIND_TIME] or not job.interval_seconds:
        return None
    beats = math.floor((now - begin_time) / job.interval_seconds) + 1
    due = begin_time + job.interval_seconds * max(0, beats)
    return None if job.HasField("end_time") and due > seconds(job.end_time) else due


def _time(since_epoch: float) -> str:
    return datetime.fromtimestamp(since_epoch, UTC).isoformat(timespec="seconds")
