"""Defines front-end tools and executes their calls."""

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
from pawl.tools import ExecutionContext, Tool, ToolContext, ToolDefinitionError, ToolError
from pawl.tools.sdk.values import plain
from pawl.tools.wire import DEFINITION

_RESULT_BYTES_MAX: Final = 1024 * 1024
# More than is shown to a model. A longer error could exceed the limit for results, and the model would then only see
# its size.
_ERROR_CHARACTERS_MAX: Final = 64 * 1024

Progress = Callable[[float | None, str], None]


def definition_of(tool: Tool[..., Any]) -> tool_pb2.ToolDefinition:
    """Return the front-end tool definition of a function that was decorated with `pawl.tools.tool`.

    Raises:
        ToolDefinitionError: `tool` is not such a function, or it uses options that only the registry supports.
    """
    if not isinstance(tool, Tool):
        raise ToolDefinitionError(f"{tool!r} is not a tool: decorate the function with `@tool` from pawl.tools")
    if tool.process is not None or tool.reconcile is not None or tool.heartbeat_seconds:
        raise ToolDefinitionError(
            f"{tool.name}: process, reconcile and heartbeat_seconds require a tool that the registry runs"
        )
    return DEFINITION.write(dataclasses.replace(tool.definition, context=ExecutionContext.FRONTEND))


def context_of(call: call_pb2.Call, cancelled: threading.Event, report: Progress) -> ToolContext:
    """Return the context for a call's function. It does not support secrets, checkpoints or questions to users."""
    names = ("store_id", "user_id", "conversation_id", "run_id", "call_id")
    known: dict[str, Any] = {name: getattr(call, name) for name in names}
    if call.HasField("deadline_time"):
        known["deadline"] = call.deadline_time.ToDatetime(tzinfo=UTC)
    attempt = max(1, call.attempt)
    return ToolContext(**known, attempt=attempt, _cancelled=cancelled, _report=report, _save=_no_checkpoint)


async def perform(
    tool: Tool[..., Any] | None, call: call_pb2.Call, context: ToolContext, threads: Executor
) -> tuple[bytes, bool]:
    """Run a call. Return the content of its result, and whether it is an error for the model.

    Any exception becomes an error for the model, unless this task is being cancelled. Functions that are not async run
    in `threads`.
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
        return _error(f"the result of {tool.name} is {len(content)} bytes, over the limit of {_RESULT_BYTES_MAX}")
    return content, False


def _no_checkpoint(_content: bytes) -> Future[None]:
    raise ToolError("front ends do not store checkpoints: a call that is offered again starts over")


def _error(text: str) -> tuple[bytes, bool]:
    return strict_json.dumps_canonical(strict_json.storable(text[:_ERROR_CHARACTERS_MAX])), True
