"""One launcher per data folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from pawl.chassis.start import StartError


class DataLock:
    """Holds a data folder for this process. The kernel lets go of it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Takes the lock and notes this process in the file. Raises StartError if another process holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StartError(
                f"Pawl already runs on {self._path.parent} (process {holder}). Stop it, or choose another folder with "
                "--data."
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets go of the folder. Does nothing if the lock is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
