"""Processes that an earlier launcher left behind. They are recorded in files while they run, and stopped here.

On Linux, the kernel signals them when their launcher dies, but they may still be stopping or may hang. On other
systems, the records are the only way to find them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

from pawl.launcher.folder import write_private

GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05


def note(directory: Path, name: str, pid: int) -> None:
    write_private(directory / f"{name}.json", json.dumps({"pid": pid, "started": started(pid)}))


def forget(directory: Path, name: str) -> None:
    (directory / f"{name}.json").unlink(missing_ok=True)


async def stop_all(directory: Path) -> list[str]:
    """Stop all recorded processes that are still running, and remove the records. Return the names of the processes.

    Call this only while holding the data folder's lock, so that no other launcher owns the processes. If a start time
    shows that a process id now belongs to another process, that process is left alone.
    """
    stopped: list[str] = []
    for record in sorted(directory.glob("*.json")):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            noted = json.loads(record.read_text(encoding="utf-8"))
            pid, since = int(noted["pid"]), noted["started"]
            if since is not None and started(pid) == since:
                await end(pid, since)
                stopped.append(record.stem)
        record.unlink(missing_ok=True)
    return stopped


async def end(pid: int, since: str, *, first: signal.Signals = signal.SIGTERM) -> None:
    """Ask a process that is not our child to end. If it does not end in time, kill it."""
    for number in (first, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        for _ in range(int(GRACE_SECONDS / _POLL_SECONDS)):
            if started(pid) != since:
                return
            await asyncio.sleep(_POLL_SECONDS)


def started(pid: int) -> str | None:
    """Return the start time of a process in a system-specific form, or None if the process has ended."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    return _ps(pid, "lstart") or None


def works_in(pid: int, folder: Path) -> bool:
    """Return whether `folder` is the working directory of a process. Requires /proc."""
    try:
        return Path(f"/proc/{pid}/cwd").resolve(strict=True) == folder.resolve()
    except OSError:
        return False


def command_line(pid: int) -> str:
    """Return the command line of a process, or an empty value if the process has ended."""
    return _ps(pid, "command")


def _ps(pid: int, field: str) -> str:
    found = subprocess.run(
        ["/bin/ps", "-ww", "-o", f"{field}=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()
