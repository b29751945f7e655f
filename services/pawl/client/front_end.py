"""Functions as tools of a front end: what a run is told of them, and how a call of one is answered."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from datetime import UTC
from typing import Any, Final

from pawl.chassis import strict_json
from pawl.chassis.process.tasks import delivered
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import tool_pb2
from pawl.tool_registry.convert import DEFINITION
from pawl.tool_registry.sdk.values import plain
from pawl.tools import ExecutionContext, Tool, ToolContext, ToolDefinitionError, ToolError

_RESULT_BYTES_MAX: Final = 1024 * 1024
_ERROR_CHARACTERS_MAX: Final = 64 * 1024
"""More than a model is shown. Of all of a long one, over what is taken, it would be told its size alone."""

Progress = Callable[[float | None, str], None]


def definition_of(tool: Tool[..., Any]) -> tool_pb2.ToolDefinition:
    """Return the definition of a function of `pawl.tools.tool` as a tool of a front end.

    Raises:
        ToolDefinitionError: it is no such function, or has what only the registry can do.
    """
    if not isinstance(tool, Tool):
        raise ToolDefinitionError(f"{tool!r} is no tool: put `@tool` of pawl.tools above the function")
    if tool.process is not None or tool.reconcile is not None or tool.heartbeat_seconds:
        of_registry = "process, reconcile and heartbeat_seconds"
        raise ToolDefinitionError(f"{tool.name}: {of_registry} go with tools that the registry runs")
    return DEFINITION.write(dataclasses.replace(tool.definition, context=ExecutionContext.FRONTEND))


def context_of(call: call_pb2.Call, cancelled: threading.Event, report: Progress) -> ToolContext:
    """Return what the function of a call is told about it. It has no secrets and asks nobody."""
    names = ("store_id", "user_id", "conversation_id", "run_id", "call_id")
    known: dict[str, Any] = {name: getattr(call, name) for name in names}
    if call.HasField("deadline_time"):
        known["deadline"] = call.deadline_time.ToDatetime(tzinfo=UTC)
    attempt = max(1, call.attempt)
    return ToolContext(**known, attempt=attempt, _cancelled=cancelled, _report=report, _save=_no_checkpoint)


async def perform(
    tool: Tool[..., Any] | None, call: call_pb2.Call, context: ToolContext, threads: Executor
) -> tuple[bytes, bool]:
    """Return the content of the result of a call, and whether it is an error for the model, which whatever fails is.

    Functions that are not async run in `threads`.
    """
    if tool is None:
        return _error(f"there is no tool {call.tool_name} here")
    try:
        made = tool.bind(json.loads(call.arguments_json), context)
        pending = made() if tool.is_async else asyncio.get_running_loop().run_in_executor(threads, delivered, made)
        content = strict_json.dumps_canonical(plain(await pending))
    except ToolError as error:
        return _error(str(error))
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _error(f"{tool.name} failed unexpectedly: {type(error).__name__}")
    if len(content) > _RESULT_BYTES_MAX:
        return _error(f"the result of {tool.name} has {len(content)} bytes, more than {_RESULT_BYTES_MAX}")
    return content, False


def _no_checkpoint(_content: bytes) -> Future[None]:
    raise ToolError("front ends keep no checkpoints: a call that is given back begins anew")


def _error(text: str) -> tuple[bytes, bool]:
    return strict_json.dumps_canonical(strict_json.storable(text[:_ERROR_CHARACTERS_MAX])), True
