"""A runner for tools with process isolation. Each call gets a fresh process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, Self

from pawl.chassis.process import logs
from pawl.chassis.process.tasks import shield, uncancelled
from pawl.chassis.strict_json import loads
from pawl.errors import InvalidJson, TooLarge
from pawl.tool_registry import outcome
from pawl.tool_registry.sources.process.call import CallProcess
from pawl.tool_registry.sources.process.messages import Answer, Call, GarbledMessage, Raised, Returned
from pawl.tool_registry.sources.python.modules import folder_of
from pawl.tool_registry.sources.python.runner import PythonRunner, PythonWork
from pawl.tools.rules.definition import RESULT_BYTES_MAX, ToolDefinition
from pawl.tools.sdk.context import OutcomeUnknown, ResultTooLarge, ToolContext, ToolError
from pawl.tools.sdk.inverse import Inverse, Reversible
from pawl.tools.sdk.process import ProcessLimits
from pawl.tools.sdk.tool import Tool

_SPARES: Final = 1
# Results are read up to this size even if they are too large, because removing secrets may change the size.
_CONTENT_BYTES_MAX: Final = 2 * RESULT_BYTES_MAX
_MIB: Final = 1024 * 1024
_CONTEXT_FIELDS: Final = tuple(each.name for each in fields(ToolContext) if not each.name.startswith("_"))

_log = logs.get_logger(__name__)


class ProcessRunner:
    """Runs tools' functions, in a fresh process if a tool requires it, and otherwise with `others`.

    At most `processes_max` calls run in processes at the same time. After the first call, one idle process is always
    ready for the next call. When a call ends, its process and all descendants are killed. Like any program that runs as
    the same user, a tool can still affect other processes.
    """

    def __init__(self, others: PythonRunner, *, processes_max: int, shows_output: bool = False) -> None:
        self._others = others
        self.answer = others.answer
        self._shows_output = shows_output
        self._free = asyncio.Semaphore(processes_max)
        self._ready: deque[asyncio.Task[CallProcess]] = deque()
        self._keeps_spares = False
        self.processes_busy = 0

    async def __aenter__(self) -> Self:
        self._keeps_spares = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeps_spares = False
        while self._ready:
            with contextlib.suppress(OSError):
                await (await self._ready.popleft()).end()

    def start(self, tool: Tool[..., Any], arguments: Mapping[str, Any], context: ToolContext) -> PythonWork:
        """Start a tool's function. The function may first have to wait for a free thread or process."""
        if tool.process is None:
            return self._others.start(tool, arguments, context)
        return PythonWork(self._run(tool, tool.process, arguments, context))

    async def _run(
        self, tool: Tool[..., Any], limits: ProcessLimits, arguments: Mapping[str, Any], context: ToolContext
    ) -> Any:
        call = _call(tool, limits, arguments, context)
        async with self._free:
            starting = self._take()
            try:
                process = await shield(starting)
            except asyncio.CancelledError:
                # Nothing has run in this process yet, so the next call can use it.
                self._ready.append(starting)
                raise
            self.processes_busy += 1
            try:
                context.mark_started()
                answer = await process.converse(call, context)
            except GarbledMessage:
                raise ToolError(
                    f"{tool.name} wrote to its process's channel to the registry{outcome.doubt(tool.definition)}"
                ) from None
            finally:
                if self._keeps_spares and len(self._ready) < _SPARES:
                    self._ready.append(self._spawn())
                status = await uncancelled(asyncio.ensure_future(process.end()))
                self.processes_busy -= 1
        if answer is None:
            raise ToolError(f"{tool.name} {_describe_exit(status, limits)}{outcome.doubt(tool.definition)}")
        return _value(tool.definition, limits, answer)

    def _take(self) -> asyncio.Task[CallProcess]:
        while self._ready:
            process = self._ready.popleft()
            if not process.done() or (process.exception() is None and process.result().is_alive):
                return process
        return self._spawn()

    def _spawn(self) -> asyncio.Task[CallProcess]:
        return asyncio.ensure_future(CallProcess.start(shows_output=self._shows_output))


def _call(tool: Tool[..., Any], limits: ProcessLimits, arguments: Mapping[str, Any], context: ToolContext) -> Call:
    module = tool.function.__module__
    folder = folder_of(module)
    return Call(
        import_name=module,
        folder="" if folder is None else str(folder),
        tool_name=tool.name,
        arguments=dict(arguments),
        memory_bytes=limits.memory_bytes,
        cpu_seconds=limits.cpu_seconds,
        content_bytes_max=_CONTENT_BYTES_MAX,
        context={name: getattr(context, name) for name in _CONTEXT_FIELDS},
    )


def _value(definition: ToolDefinition, limits: ProcessLimits, answer: Answer) -> Any:
    if isinstance(answer, Returned):
        try:
            value = loads(answer.content, bytes_max=_CONTENT_BYTES_MAX)
            if answer.inverse is None:
                return value
            arguments = loads(answer.inverse.arguments, bytes_max=_CONTENT_BYTES_MAX)
        except (InvalidJson, TooLarge) as error:
            raise ToolError(outcome.unusable_text(definition, error.message)) from None
        if not isinstance(arguments, dict):
            raise ToolError(outcome.unusable_text(definition, "an inverse's arguments must be an object"))
        inverse = Inverse(tool_name=answer.inverse.tool_name, arguments=arguments, summary=answer.inverse.summary)
        return Reversible(value=value, inverse=inverse)
    raise _error(definition, limits, answer)


def _error(definition: ToolDefinition, limits: ProcessLimits, raised: Raised) -> Exception:
    match raised.kind:
        case "TOLD":
            return ToolError(raised.text)
        case "UNKNOWN":
            return OutcomeUnknown()
        case "NOT_JSON":
            return ToolError(outcome.unusable_text(definition, raised.text))
        case "TOO_LARGE":
            return ResultTooLarge(outcome.too_large_text(definition, int(raised.text)))
        case "MEMORY":
            memory = f"used more than {limits.memory_bytes / _MIB:g} MiB of memory"
            return ToolError(f"{definition.name} {memory}{outcome.doubt(definition)}")
        case "CRASHED" | "BROKEN":
            event = "tool.failed" if raised.kind == "CRASHED" else "tool.module_broken_in_its_process"
            _log.warning(event, tool=definition.name, error=raised.text, frames=list(raised.frames))
            return ToolError(outcome.unexpected_text(definition, raised.text))


def _describe_exit(status: int | None, limits: ProcessLimits) -> str:
    if status is None:
        return "lost its process before it returned"
    if not status & 0x7F:
        return f"ended its process with exit code {status >> 8} before it returned"
    number = status & 0x7F
    if number == signal.SIGXCPU:
        return f"used more than {limits.cpu_seconds} s of CPU time"
    name = ""
    with contextlib.suppress(ValueError):
        name = f" ({signal.Signals(number).name})"
    return f"was killed by signal {number}{name}"
