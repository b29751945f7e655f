"""Checks and runs a single tool call as the registry would, but without a registry."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.visible import visible
from pawl.tool_registry import outcome
from pawl.tool_registry.policy.call import DEFAULT_TIMEOUT_SECONDS
from pawl.tool_registry.policy.rules.gate import approval_cause, items_of
from pawl.tool_registry.rules.check import Refused, check_arguments
from pawl.tool_registry.rules.execution import ExecutionResult
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.sources.process.runner import ProcessRunner
from pawl.tool_registry.sources.python.runner import PythonRunner
from pawl.tools.rules.schema import compile_schema
from pawl.tools.sdk.context import SecretNotFound, ToolContext, ToolError
from pawl.tools.sdk.tool import Tool
from pawl.values import ExecutionContext, Question

Say = Callable[[str], None]

_UNWIND_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    store_id: StoreId
    user_id: UserId
    secrets: FileSecrets


async def call(tool: Tool[..., Any], raw: bytes, caller: Caller, say: Say) -> bool:
    """Check a call, run it in this process and print the outcome. Return whether it succeeded.

    No approval is required, because the developer requested the call by running the command.
    """
    definition = tool.definition
    if definition.context is not ExecutionContext.BACKEND:
        say(f"{tool.name} does not run in the registry")
        return False
    checked = check_arguments(definition, compile_schema(definition.arguments_schema, recursion=True), raw)
    if isinstance(checked, Refused):
        say(f"refused: {checked.reason}: {checked.message}")
        return False
    say(f"arguments: {checked.canonical.decode()}")
    if checked.note:
        say(f"note: {checked.note}")
    try:
        async with PythonRunner(threads_max=1) as threads:
            count, shown = tool.bulk_count(checked.arguments), tool.preview(checked.arguments)
            items = await threads.answer(tool.name, count) if count else None
            preview = await threads.answer(tool.name, shown) if shown else ""
    except Exception:  # noqa: BLE001  # author code
        say(f"error: the preview or bulk_count of {tool.name} failed\n{traceback.format_exc()}")
        return False
    cause = approval_cause(definition, items_of(definition, checked.arguments) if items is None else items)
    say(f"approval: {f'needed ({cause}); skipped here' if cause else 'not needed'}")
    if preview:
        say(f"preview: {visible(preview)}")
    result = await _run(tool, checked.arguments, caller, say)
    say(f"{'failed' if result.is_error else 'result'}: {result.content.decode()}")
    if result.inverse is not None:
        inverse = result.inverse
        say(f"inverse: {inverse.tool_name} {inverse.arguments.decode()} ({inverse.summary})")
    say(f"duration: {result.duration_seconds * 1000:.1f} ms, {len(result.content)} bytes")
    return not result.is_error


async def _run(tool: Tool[..., Any], arguments: Any, caller: Caller, say: Say) -> ExecutionResult:
    async with ProcessRunner(PythonRunner(threads_max=1), processes_max=1, shows_output=True) as runner:
        return await _within_time(tool, arguments, caller, say, runner)


async def _within_time(
    tool: Tool[..., Any], arguments: Any, caller: Caller, say: Say, runner: ProcessRunner
) -> ExecutionResult:
    definition = tool.definition
    limit = definition.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
    given: set[str] = set()
    cancelled = threading.Event()

    def find_secret(name: str) -> str:
        value = caller.secrets.find(caller.store_id, name)
        if value is None:
            raise SecretNotFound(f"no secret named {name!r} is configured")
        given.add(value)
        return value

    def report(fraction: float | None, message: str) -> None:
        say(f"progress: {'' if fraction is None else f'{fraction:.0%} '}{message}")

    context = ToolContext(
        store_id=caller.store_id,
        user_id=caller.user_id,
        deadline=datetime.now(UTC) + timedelta(seconds=limit),
        _cancelled=cancelled,
        _report=report,
        _find_secret=find_secret,
        _ask=_cannot_ask,
    )
    started = time.monotonic()
    try:
        work = runner.start(tool, arguments, context)
        async with asyncio.timeout(limit):
            value = await work.result()
    except TimeoutError as error:
        seconds = time.monotonic() - started
        if seconds < limit:
            return _failure(tool, error, given, seconds)
        cancelled.set()
        await asyncio.wait({work.task}, timeout=_UNWIND_SECONDS)
        end = outcome.ToolEnd.STOPPED if work.task.done() else outcome.ToolEnd.STILL_RUNNING
        return outcome.of_timeout(definition, limit, seconds, end, hindrance=work.hindrance)
    except Exception as error:  # noqa: BLE001  # author code
        return _failure(tool, error, given, time.monotonic() - started)
    if work.hindrance:
        say(f"warning: {work.hindrance}")
    return outcome.of_value(definition, value, secrets=given, seconds=time.monotonic() - started)


async def _cannot_ask(question: Question) -> str:
    raise ToolError(f"`pawl tools check` cannot answer questions; the tool asks: {question.question}")


def _failure(tool: Tool[..., Any], error: Exception, secrets: set[str], seconds: float) -> ExecutionResult:
    if not isinstance(error, ToolError):
        traceback.print_exception(error)
    return outcome.of_error(tool.definition, error, secrets=secrets, seconds=seconds)
