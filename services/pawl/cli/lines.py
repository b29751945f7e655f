"""Lines from the keyboard, read beside everything else."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from typing import TextIO

from pawl.chassis.tasks import shield


class LineReader:
    """Reads a line only when asked, so that an editor can have the keyboard in between.

    Its thread ends with the process: a read of a terminal cannot be cancelled.
    """

    def __init__(self, source: TextIO | None = None) -> None:
        self._source = source or sys.stdin
        self._wanted: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[str | None]]] = (
            queue.SimpleQueue()
        )
        self._pending: asyncio.Future[str | None] | None = None
        threading.Thread(target=self._read, name="keyboard", daemon=True).start()

    async def line(self) -> str | None:
        """Return the next line without its end; None at the end of the input.

        Safe to cancel: the line that was asked for is given to the next caller.
        """
        if self._pending is None:
            loop = asyncio.get_running_loop()
            self._pending = loop.create_future()
            self._wanted.put((loop, self._pending))
        line = await shield(self._pending)
        self._pending = None
        return line

    def _read(self) -> None:
        while True:
            loop, future = self._wanted.get()
            try:
                text = self._source.readline()
            except (OSError, ValueError):
                text = ""
            line = text.rstrip("\r\n") if text else None
            try:
                loop.call_soon_threadsafe(_resolve, future, line)
            except RuntimeError:
                return  # The program is over.


def _resolve(future: asyncio.Future[str | None], line: str | None) -> None:
    if not future.done():
        future.set_result(line)
