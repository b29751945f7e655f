"""Tools that run in their own process, and break that process in various ways."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pawl.tools import (
    Category,
    EffectClass,
    Inverse,
    ProcessLimits,
    Reversible,
    ToolContext,
    ToolError,
    tool,
)
from tests.poll import put

MIB = 1024 * 1024
LIMITS = ProcessLimits(memory_bytes=64 * MIB, cpu_seconds=1)


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, process=LIMITS)
def look_round(number: int, context: ToolContext) -> dict[str, Any]:
    """Return the state of this process."""
    context.progress(0.5, "looking")
    os.write(1, b"\xff\xfe\x00")
    os.write(2, b"\xff\xfe\x00")
    return {
        "number": number,
        "pid": os.getpid(),
        "leads_its_session": os.getsid(0) == os.getpid(),
        "settings": [name for name in os.environ if name.startswith(("PAWL_", "OPENAI_"))],
        "sockets": len(_sockets()),
        "cores": resource.getrlimit(resource.RLIMIT_CORE),
        "key": context.idempotency_key,
        "user": context.user_id,
        "traceparent": context.traceparent,
        "deadline_is_ahead": context.deadline.timestamp() > time.time(),
    }


@tool(category=Category.SAFE, process=LIMITS)
def say_half_a_character(context: ToolContext, *, fails: bool) -> str:
    """Use text that cannot be encoded."""
    context.progress(0.5, "\ud800")
    if fails:
        raise ToolError("it was \ud800")
    return "said"


@tool(category=Category.SAFE, timeout_seconds=60, async_timeout_seconds=7200, process=LIMITS)
def seconds_left(context: ToolContext) -> float:
    """Return the remaining time."""
    return context.deadline.timestamp() - time.time()


@tool(
    category=Category.SAFE,
    effect=EffectClass.IDEMPOTENT,
    timeout_seconds=60,
    heartbeat_seconds=0.3,
    process=ProcessLimits(),
)
def get_stuck() -> None:
    """Hang without output."""
    time.sleep(3600)


def _sockets() -> list[int]:
    """Return the descriptors of this process that are sockets."""
    found: list[int] = []
    for entry in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                found.append(int(entry.name))
    return found


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, process=LIMITS)
async def tell_secret(name: str, context: ToolContext) -> str:
    """Return a secret."""
    return f"it is {context.secret(name)}"


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, process=LIMITS, timeout_seconds=60)
def misbehave(way: str) -> Any:
    """Crash the process or return an unserializable value."""
    return WAYS[way]()


def _eat() -> int:
    return len(bytearray(100 * MIB))


def _share() -> int:
    import mmap  # noqa: PLC0415

    with mmap.mmap(-1, 1024 * MIB) as shared:
        return len(shared)


def _burn() -> None:
    while True:
        pass


def _burn_and_ignore() -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    _burn()


def _start_threads() -> None:
    for _ in range(100_000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def _raise() -> None:
    raise ValueError("a password")


def _kill_guard() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def _tell() -> None:
    raise ToolError("ask again tomorrow")


def _garble() -> None:
    for number in _sockets():
        os.write(number, b"\xff" * 4096)
    time.sleep(60)


WAYS: dict[str, Any] = {
    "eat": _eat,
    "share": _share,
    "burn": _burn,
    "burn and ignore": _burn_and_ignore,
    "threads": _start_threads,
    "segfault": lambda: ctypes.string_at(0),
    "leave": lambda: os._exit(3),
    "exit": sys.exit,
    "raise": _raise,
    "tell": _tell,
    "kill guard": _kill_guard,
    "garble": _garble,
    "object": object,
    "nan": lambda: float("nan"),
    "larger": lambda: "x" * 20 * MIB,
}


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, process=LIMITS)
def undo() -> Reversible:
    """Do something reversible."""
    return Reversible(value="done", inverse=Inverse(tool_name="redo", arguments={"n": 1}, summary="redo it"))


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, process=LIMITS, timeout_seconds=60)
def linger(path: str) -> None:
    """Write the ids of this process and of two that try to outlive it, then hold the interpreter for a minute."""
    hidden = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    orphan = subprocess.run(["/bin/sh", "-c", 'sleep 300 >/dev/null & echo "$!"'], stdout=subprocess.PIPE, check=True)
    put(Path(path), f"{os.getpid()} {hidden.pid} {int(orphan.stdout)}")
    ctypes.PyDLL(None).sleep(60)


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, process=LIMITS, timeout_seconds=60)
async def tidy_up(path: str) -> None:
    """Wait, and write a word when cancelled."""
    put(Path(path), str(os.getpid()))
    try:
        await asyncio.sleep(60)
    finally:
        put(Path(path + ".end"), "tidied")


@tool(category=Category.SAFE, process=LIMITS, timeout_seconds=60)
def pay_and_crash() -> None:
    """Have an effect and never return."""
    os._exit(1)
