"""The thread of the client without asyncio: what is interrupted ends, and nobody waits for himself."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
import time
from types import FrameType

import pytest

from pawl.client import AsyncClient, AsyncSession, Client, SyncSession
from pawl.client.blocking import LoopThread


async def nothing() -> None: ...


def waits_in_run(ident: int) -> bool:
    """Whether a thread has come to where it waits for a call."""
    frame: FrameType | None = sys._current_frames()[ident]
    names = []
    while frame is not None:
        names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names[:3] == ["Condition.wait", "Future.result", "LoopThread.run"]


def test_an_interrupted_call_is_cancelled() -> None:
    """Ctrl-C."""
    thread, cancelled = LoopThread(), threading.Event()
    main = threading.main_thread().ident
    assert main == threading.get_ident()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def interrupt() -> None:
        while not waits_in_run(main):
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    # A shell that starts something in its own background has it ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(endless)
    finally:
        signal.signal(signal.SIGINT, before)
    assert cancelled.wait(60)
    interrupting.join()
    thread.close(nothing)


def test_the_thread_does_not_wait_for_itself() -> None:
    """An async tool that called the client it is served by would stop everything."""
    thread = LoopThread()

    async def wait_for_itself() -> None:
        thread.run(nothing)

    with pytest.raises(RuntimeError, match="must not wait for its own thread"):
        thread.run(wait_for_itself)
    thread.close(nothing)


@pytest.mark.parametrize(("blocking", "original"), [(Client, AsyncClient), (SyncSession, AsyncSession)])
def test_the_client_without_asyncio_has_every_method(blocking: type, original: type) -> None:
    own = {name for name, value in vars(original).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert {name for name in own if not hasattr(blocking, name)} == set()
    undocumented = {name for name in own if not getattr(blocking, name).__doc__}
    assert undocumented == set()
