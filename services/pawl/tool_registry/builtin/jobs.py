"""The jobs of a conversation: their list, and their stop."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from pawl.chassis.ids import CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.chassis.process.clock import Clock
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.rules.jobs import Job
from pawl.tool_registry.sdk.context import ToolContext, ToolError
from pawl.tool_registry.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

RESULT_CHARACTERS_MAX: Final = 500
"""Most characters of a result in the list."""
ENDED_MAX: Final = 10
"""Most jobs in the list that have ended, the last ones."""
JobId = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$"), "the job_id"]


def job_tools(jobs: LedgerReads, clock: Clock) -> list[Tool[..., Any]]:
    """Return list_jobs and stop_job."""

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, background=False)
    async def list_jobs(context: ToolContext) -> list[dict[str, Any]]:
        """List the jobs of this conversation: calls in the background. Ends are told unasked."""
        store_id, user_id, conversation_id = _where(context)
        found = await jobs.jobs(store_id, user_id, conversation_id, ended_max=ENDED_MAX)
        return [_shown(job, clock.now()) for job in found]

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, background=False)
    async def stop_job(context: ToolContext, job_id: JobId) -> dict[str, Any]:
        """Stop a job of this conversation."""
        store_id, user_id, conversation_id = _where(context)
        command_id = CommandId(context.idempotency_key)
        stopped = await jobs.stop_job(RunKey(store_id, RunId(job_id)), user_id, conversation_id, command_id)
        if stopped is None:
            raise ToolError(f"this conversation has no job {job_id!r}; list_jobs has those that it has")
        job, was_open = stopped
        if not was_open:
            return {**_shown(job, clock.now()), "note": "It was over already: nothing was stopped."}
        note = "It is over, and nothing more of it runs."
        if not job.is_over:
            note = "It is being stopped. A call under way may still have its effect; list_jobs says how it ended."
        return {"job_id": job.job_id, "tool": job.tool, "state": job.state, "note": note}

    return [list_jobs, stop_job]


def _where(context: ToolContext) -> tuple[StoreId, UserId, ConversationId]:
    return StoreId(context.store_id), UserId(context.user_id), ConversationId(context.conversation_id)


def _shown(job: Job, now: float) -> dict[str, Any]:
    """Return what the model is given of a job."""
    shown: dict[str, Any] = {"job_id": job.job_id, "tool": job.tool, "state": job.state, "begun": _time(job.begin_time)}
    if job.interval_seconds:
        shown |= {"iterations": job.iterations, "interval_seconds": job.interval_seconds}
    due = job.next_time(now)
    if due is not None:
        shown["next"] = _time(due)
    if job.result:
        cut = job.result[:RESULT_CHARACTERS_MAX]
        shown["result"] = cut if cut == job.result else f"{cut}..."
    if job.error:
        shown["error"] = job.error
    return shown


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
