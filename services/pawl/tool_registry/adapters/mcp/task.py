"""Calls that an MCP server does as tasks: begun once, and asked for until they have ended, also after a crash.

The server's id of a task is the checkpoint of its call. With that an execution that begins the call again asks for the
task in place of beginning another one. See "Tasks" in the protocol of 2025-11-25.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, Final

import mcp.types

from pawl.chassis.clock import Clock
from pawl.errors import DependencyUnavailable, InvalidField, PawlError, PermissionDenied, SourceUnreachable
from pawl.tool_registry.adapters.mcp.attempts import (
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    Fault,
    Garbled,
    Gone,
    Looks,
    Lost,
    Refused,
    checkpoint_of,
)
from pawl.tool_registry.sdk.context import OutcomeUnknown, ToolError

if TYPE_CHECKING:
    from pawl.tool_registry.adapters.mcp.call import Call, Flight
    from pawl.tool_registry.adapters.mcp.session import Session

_RELATED: Final = "io.modelcontextprotocol/related-task"
# It has to fit into a checkpoint, and back into a request, as it is.
_TASK_ID: Final = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")
_POLL_SECONDS_MIN: Final = 0.1
_CANCEL_SECONDS: Final = 2.0
_KEPT_SECONDS: Final = 3600.0
"""The time after its deadline for which the result of a task should still be there."""


Place = Callable[..., AbstractAsyncContextManager[tuple["Session", "Flight"]]]
"""Gives a place on an open connection with the server; with `is_alone=True` on one that no other call uses."""


def metadata(seconds: float) -> mcp.types.TaskMetadata:
    """Return what a server is told of a call that it is to do as a task, and that may take so long."""
    return mcp.types.TaskMetadata(ttl=round((seconds + _KEPT_SECONDS) * 1000))


async def ended(
    place: Place,
    task_id: str,
    call: Call,
    clock: Clock,
    *,
    held: tuple[Session, Flight] | None = None,
) -> mcp.types.CallToolResult:
    """Ask for a task until it has ended, and return its result.

    Its call keeps one place meanwhile: there the task goes on, perhaps there alone, and may ask. `held` is the place
    where it was begun just now. If the connection breaks it is asked for on another one, and a server that is away is
    waited for. Cancelling it ends the task, unless the call is begun again elsewhere.

    Raises:
        Gone: the server does not know the task, or has cancelled it, or cannot say how it is.
        OutcomeUnknown: the server may not be used any more, or was removed.
        Refused, TooLarge, Garbled: the task came to an error of the protocol, or to what cannot be read.
    """
    looks, session = Looks(task_id), None
    try:
        if held is not None:
            if not _TASK_ID.fullmatch(task_id):
                raise Garbled
            session = held[0]
            await call.context.checkpoint(checkpoint_of(task_id))
        while True:
            here = nullcontext(held) if held is not None else place(is_alone=looks.is_alone)
            try:
                async with here as (session, flight):
                    return await _followed(session, flight, call, clock, looks)
            except (InvalidField, PermissionDenied):
                raise OutcomeUnknown from None
            except Lost as lost:
                looks.lost(lost)
            except (SourceUnreachable, DependencyUnavailable):
                pass
            held = None
            await clock.sleep(looks.pause_seconds())
    except asyncio.CancelledError:
        if not call.context.begins_again:
            await _cancel(place, session, task_id)
        raise


async def _followed(
    session: Session, flight: Flight, call: Call, clock: Clock, looks: Looks
) -> mcp.types.CallToolResult:
    """Ask for a task on one connection. A server that wants something of the user is given the way to ask it."""
    while True:
        looks.begin()
        try:
            task = await _look(session, flight, call, looks.task_id)
            looks.saw(task.status)
            if task.status_message:
                call.context.progress(None, call.clean(task.status_message))
            if task.status == "cancelled":
                said = f"its server cancelled it: {call.clean(task.status_message or 'no reason given')}"
                raise Gone("it has cancelled the task", ToolError(said), was_cancelled=True)
            if task.status != "working":
                result = await _result(session, flight, call, looks.task_id)
                call.is_in_doubt = flight.is_in_doubt
                return result
            pause = _pause_seconds(task)
        except Refused as refused:
            looks.refused(refused)
            pause = looks.pause_seconds()
        await clock.sleep(pause)


async def _look(session: Session, flight: Flight, call: Call, task_id: str) -> mcp.types.Task:
    request = mcp.types.GetTaskRequest(params=mcp.types.GetTaskRequestParams(task_id=task_id))
    task = await session.sending(
        flight, call, lambda client: client.session.send_request(request, mcp.types.GetTaskResult)
    )
    if task.task_id != task_id:
        raise Garbled
    return task


async def _result(session: Session, flight: Flight, call: Call, task_id: str) -> mcp.types.CallToolResult:
    """Wait for the result; meanwhile the server may ask."""
    request = mcp.types.GetTaskPayloadRequest(params=mcp.types.GetTaskPayloadRequestParams(task_id=task_id))
    result = await session.sending(
        flight, call, lambda client: client.session.send_request(request, mcp.types.CallToolResult)
    )
    if (result.meta or {}).get(_RELATED, {"taskId": task_id}) != {"taskId": task_id}:
        raise Garbled
    return result


async def _cancel(place: Place, session: Session | None, task_id: str) -> None:
    """Ask the server to end a task, where it goes on; it may not hear of that, or not do it."""
    request = mcp.types.CancelTaskRequest(params=mcp.types.CancelTaskRequestParams(task_id=task_id))
    try:
        async with asyncio.timeout(_CANCEL_SECONDS), AsyncExitStack() as stack:
            is_open = session is not None and session.is_open
            there = session if session and is_open else (await stack.enter_async_context(place()))[0]
            await there.answer(lambda client: client.session.send_request(request, mcp.types.CancelTaskResult))
    except (TimeoutError, Fault, OutcomeUnknown, PawlError):
        return


def _pause_seconds(task: mcp.types.Task) -> float:
    """Return how long to wait before the next look: as its server wants it, within limits."""
    # Numbers of JSON have any size, and not all are floats.
    wanted = min(task.poll_interval or 0, round(PAUSE_SECONDS_MAX * 1000)) / 1000
    return PAUSE_SECONDS if task.poll_interval is None else max(wanted, _POLL_SECONDS_MIN)
