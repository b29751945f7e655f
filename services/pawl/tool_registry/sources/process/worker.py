"""Runs one call's tool in the call's process, within its limits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import resource
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from pawl.chassis.strict_json import dumps_canonical, storable
from pawl.errors import InvalidJson
from pawl.tool_registry.rules.execution import inverse_call
from pawl.tool_registry.sources.process.messages import (
    ERRORS,
    Answer,
    Answered,
    Call,
    Cancel,
    GetSecret,
    Raised,
    ReportProgress,
    Returned,
    SaveCheckpoint,
    ToRegistry,
    frame,
    receive,
)
from pawl.tool_registry.sources.python.modules import folder_package
from pawl.tools.sdk.context import (
    OutcomeUnknown,
    ToolContext,
    ToolError,
)
from pawl.tools.sdk.inverse import Reversible
from pawl.tools.sdk.tool import Tool
from pawl.tools.sdk.values import plain

_PROGRESS_INTERVAL_SECONDS: Final = 0.05
_MESSAGE_CHARACTERS_MAX: Final = 4000
_TEXT_CHARACTERS_MAX: Final = 8000
_FRAMES_MAX: Final = 8
_FRAME_CHARACTERS_MAX: Final = 300
# Memory beyond the limit that the worker can use to report that the limit was reached.
_REPORT_BYTES: Final = 32 * 1024 * 1024
# Address space beyond the limit, for library code and for memory that threads reserve but do not use.
_MAPPED_BYTES: Final = 512 * 1024 * 1024
_STATM: Final = Path("/proc/self/statm")


def run_worker(channel: socket.socket) -> None:
    """Run the only call that arrives over `channel`, send its answer and exit."""
    messages = channel.makefile("rb")
    call = receive(messages)
    if isinstance(call, Call):
        line = _RegistryLine(channel, messages)
        line.start()
        _limit(call)
        line.answer(_answer(call, line))
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    os._exit(0)


class _RegistryLine:
    """The connection to the registry that the tool's threads use."""

    def __init__(self, channel: socket.socket, messages: BinaryIO) -> None:
        self._channel = channel
        self._messages = messages
        self._sending = threading.Lock()
        self._asked: deque[Future[Any]] = deque()
        self._newest: ReportProgress | None = None
        self._has_news = threading.Event()
        self.cancelled = threading.Event()
        self.on_cancel: Callable[[], object] = lambda: None

    def start(self) -> None:
        for target in (self._listen, self._report):
            threading.Thread(target=target, daemon=True).start()

    def progress(self, fraction: float | None, message: str) -> None:
        """Schedule the progress to be sent. Only the newest report counts."""
        self._newest = ReportProgress(fraction=fraction, message=storable(message[:_MESSAGE_CHARACTERS_MAX]))
        self._has_news.set()

    def secret(self, name: str) -> str:
        value: str = self._ask(GetSecret(name=name)).result()
        return value

    def save(self, content: bytes) -> Future[None]:
        """Save a checkpoint. The future completes once the registry has stored the checkpoint."""
        return self._ask(SaveCheckpoint(content=content))

    def _ask(self, request: GetSecret | SaveCheckpoint) -> Future[Any]:
        asked: Future[Any] = Future()
        with self._sending:
            self._asked.append(asked)
            self._channel.sendall(frame(request))
        return asked

    def answer(self, answer: Answer) -> None:
        """Send the end of the call, after any pending progress."""
        self._send_newest()
        self._send(answer)

    def _send(self, message: ToRegistry) -> None:
        with self._sending:
            self._channel.sendall(frame(message))

    def _send_newest(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            self._send(newest)

    def _report(self) -> None:
        while True:
            self._has_news.wait()
            self._has_news.clear()
            self._send_newest()
            time.sleep(_PROGRESS_INTERVAL_SECONDS)

    def _listen(self) -> None:
        while True:
            match receive(self._messages):
                case None:
                    os._exit(1)
                case Answered() as answer:
                    _settle(self._asked.popleft(), answer)
                case Cancel():
                    self.cancelled.set()
                    self.on_cancel()


def _settle(asked: Future[Any], answer: Answered) -> None:
    if not asked.set_running_or_notify_cancel():
        return  # The tool is no longer waiting.
    if answer.error:
        asked.set_exception(ERRORS[answer.error](answer.text))
    else:
        asked.set_result(answer.value)


def _limit(call: Call) -> None:
    """Set this process's kernel limits. The memory limit applies immediately, before any tool code is loaded."""
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_CPU, call.cpu_seconds, 1)
    if _STATM.exists():
        pages = [int(number) for number in _STATM.read_text(encoding="ascii").split()]
        size, data = pages[0] * resource.getpagesize(), pages[5] * resource.getpagesize()
        _set_limit(resource.RLIMIT_DATA, data + call.memory_bytes, _REPORT_BYTES)
        _set_limit(resource.RLIMIT_AS, size + call.memory_bytes + _MAPPED_BYTES, _REPORT_BYTES)


def _set_limit(kind: int, soft: int, reserve: int = 0) -> None:
    """Set a soft limit, and a hard limit that is higher by `reserve`. Existing limits are never raised."""
    _, before = resource.getrlimit(kind)
    if before != resource.RLIM_INFINITY:
        soft, reserve = min(soft, before), max(0, min(reserve, before - soft))
    resource.setrlimit(kind, (soft, soft + reserve))


def _use_reserve() -> None:
    """Raise the soft limits to the hard limits, so that the worker can still report that it reached a limit."""
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (hard, hard))


def _answer(call: Call, line: _RegistryLine) -> Answer:
    try:
        tool = _find(call)
    except BaseException as error:  # noqa: BLE001  # the author's code
        return _crash(error, "BROKEN")
    if tool is None:
        return Raised(
            kind="TOLD", text=f"{call.tool_name} must be a top-level name of its module to run in its own process"
        )
    try:
        bound = tool.bind(call.arguments, _context(call, line))
        value = asyncio.run(_awaited(bound, line)) if tool.is_async else bound()
        return _returned(value, call.content_bytes_max)
    except OutcomeUnknown:
        return Raised(kind="UNKNOWN")
    except ToolError as error:
        return Raised(kind="TOLD", text=storable((str(error) or type(error).__name__)[:_TEXT_CHARACTERS_MAX]))
    except BaseException as error:  # noqa: BLE001  # the author's code, SystemExit included
        return _crash(error, "CRASHED")


def _find(call: Call) -> Tool[..., Any] | None:
    if call.folder:
        folder_package(Path(call.folder))
    module = importlib.import_module(call.import_name)
    tools = (value for value in vars(module).values() if isinstance(value, Tool))
    return next((tool for tool in tools if tool.name == call.tool_name), None)


async def _awaited(bound: Callable[[], Any], line: _RegistryLine) -> Any:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(bound())
    line.on_cancel = lambda: loop.call_soon_threadsafe(task.cancel)
    return await task


def _returned(value: Any, bytes_max: int) -> Answer:
    inverse, given = (value.inverse, value.value) if isinstance(value, Reversible) else (None, value)
    try:
        content = dumps_canonical(plain(given))
        arguments = b"" if inverse is None else dumps_canonical(plain(inverse.arguments))
        back = None if inverse is None else inverse_call(inverse.tool_name, arguments, inverse.summary)
    except (TypeError, ValueError, RecursionError, InvalidJson) as error:
        reason = error.message if isinstance(error, InvalidJson) else f"{type(given).__name__} is not JSON"
        return Raised(kind="NOT_JSON", text=reason)
    if len(content) > bytes_max:
        return Raised(kind="TOO_LARGE", text=str(len(content)))
    return Returned(content=content, inverse=back)


def _crash(error: BaseException, kind: Literal["CRASHED", "BROKEN"]) -> Raised:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        _use_reserve()
        return Raised(kind="MEMORY")
    traceback.print_exception(error)  # Visible if the output is shown.
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_MAX:]
    named = (f"{each.filename}:{each.lineno} {each.name}"[-_FRAME_CHARACTERS_MAX:] for each in frames)
    return Raised(kind=kind, text=type(error).__name__, frames=tuple(named))


def _context(call: Call, line: _RegistryLine) -> ToolContext:
    return ToolContext(
        **call.context,
        _cancelled=line.cancelled,
        _report=line.progress,
        _find_secret=line.secret,
        _save=line.save,
    )
