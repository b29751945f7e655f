"""Calls that an MCP server does as tasks: started once, and asked for until they end, also after a crash.

The server's id of a task is the checkpoint of its call, so an execution that starts the call again asks for that task
instead of starting another one. See "Tasks" in the protocol of 2025-11-25.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

import mcp.types

from pawl.chassis.clock import Clock
from pawl.errors import PawlError
from pawl.tool_registry.adapters.mcp.attempts import (
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    Attempts,
    Cancelled,
    Fault,
    Garbled,
    checkpoint_of,
)
from pawl.tool_registry.adapters.mcp.call import Call
from pawl.tool_registry.adapters.mcp.session import Session

_RELATED: Final = "io.modelcontextprotocol/related-task"
# It must fit into a checkpoint, and back into a request, unchanged.
_TASK_ID: Final = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")
_POLL_SECONDS_MIN: Final = 0.1
_CANCEL_SECONDS: Final = 2.0
# How long after its deadline the result of a task should still exist.
_KEPT_SECONDS: Final = 3600.0


def metadata(seconds: float) -> mcp.types.TaskMetadata:
    """Return what a server must know of a call that it does as a task, and that may take so long."""
    return mcp.types.TaskMetadata(ttl=round((seconds + _KEPT_SECONDS) * 1000))


async def started(call: Call, attempts: Attempts, task_id: str) -> None:
    """Keep the id of a task that a server has just started for a call."""
    if not _TASK_ID.fullmatch(task_id):
        raise Garbled
    attempts.task_id = task_id
    await call.context.checkpoint(checkpoint_of(task_id))


async def ended(session: Session, call: Call, attempts: Attempts, clock: Clock) -> mcp.types.CallToolResult:
    """Ask for the task of a call until it has ended, and return its result.

    Raises:
        Cancelled: the server has cancelled it.
        Lost, Refused, TooLarge, Garbled: as of `Session.call`.
    """
    while True:
        attempts.asks()
        task = await _status(session, call, attempts.task_id)
        attempts.saw(task.status)
        reason = call.clean(task.status_message or "")
        if reason:
            call.context.progress(None, reason)
        if task.status == "cancelled":
            raise Cancelled(f"its server cancelled it: {reason or 'no reason given'}")
        if task.status != "working":
            return await _result(session, call, attempts.task_id)
        # Numbers of JSON have any size, and not all are floats.
        wanted = min(task.poll_interval or 0, round(PAUSE_SECONDS_MAX * 1000)) / 1000
        await clock.sleep(PAUSE_SECONDS if task.poll_interval is None else max(wanted, _POLL_SECONDS_MIN))


async def cancel(session: Session, call: Call, task_id: str) -> None:
    """Ask the server to cancel a task; it may not receive that, or not do it."""
    request = mcp.types.CancelTaskRequest(params=mcp.types.CancelTaskRequestParams(task_id=task_id))
    try:
        async with asyncio.timeout(_CANCEL_SECONDS):
            await session.send(call, lambda client: client.session.send_request(request, mcp.types.CancelTaskResult))
    except (TimeoutError, Fault, PawlError):
        return


async def _status(session: Session, call: Call, task_id: str) -> mcp.types.Task:
    request = mcp.types.GetTaskRequest(params=mcp.types.GetTaskRequestParams(task_id=task_id))
    task = await session.send(call, lambda client: client.session.send_request(request, mcp.types.GetTaskResult))
    if task.task_id != task_id:
        raise Garbled
    return task


async def _result(session: Session, call: Call, task_id: str) -> mcp.types.CallToolResult:
    """Wait for the result; meanwhile the server may ask the user something."""
    request = mcp.types.GetTaskPayloadRequest(params=mcp.types.GetTaskPayloadRequestParams(task_id=task_id))
    result = await session.send(call, lambda client: client.session.send_request(request, mcp.types.CallToolResult))
    if (result.meta or {}).get(_RELATED, {"taskId": task_id}) != {"taskId": task_id}:
        raise Garbled
    return result
