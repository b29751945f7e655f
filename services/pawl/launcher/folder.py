"""The data folder: its layout, version and lock."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Final

import msgspec

from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.replicas import FILE_NAME, Endpoints


def write_private(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file with mode 0600 atomically. With `durable`, its content is synced to disk first."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)


class SecretFiles:
    """A folder with one secret per file. The folder has mode 0700, and each file has mode 0600."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)

    def path(self, name: str) -> Path:
        return self._directory / name

    def get(self, name: str) -> str:
        """Return a secret, creating it on first use."""
        path = self.path(name)
        if not path.exists():
            self.put(name, secrets.token_urlsafe(32))
        path.chmod(0o600)
        return path.read_text(encoding="utf-8").strip()

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def put(self, name: str, value: str) -> None:
        """Write a secret atomically."""
        write_private(self.path(name), f"{value}\n", durable=True)


# The version of the layout below. PostgreSQL clusters and schemas have their own versions.
VERSION = "1"

_VERSION_FILE = "VERSION"
_LOCK_FILE = "lock"


_FREE_BYTES_MIN: Final = 32 * 1024 * 1024


def problem_of(folder: Path) -> str:
    """Return one sentence about a problem with a data folder, or an empty string if there is none."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"The data folder {folder} is no longer usable ({error.strerror}): Pawl stops."
    if free < _FREE_BYTES_MIN:
        return f"The disk with the data folder {folder} is full ({free >> 20} MiB free): make room, or Pawl will stop."
    return ""


class DataFolder:
    """A data folder, which this process locks from `open` to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path / "run"
        self.logs = path / "logs"
        self.postgres = path / "postgres"
        self.nats = path / "nats"
        self.outbox = path / "outbox"
        self.files = path / "files"
        self._lock: int | None = None

    def open(self) -> SecretFiles:
        """Create the folder if necessary, lock it and return its secrets. Raise StartError if that fails."""
        try:
            self._make()
            self._acquire()
            self._check_version()
            for folder in (self.run, self.logs, self.outbox, self.files):
                folder.mkdir(mode=0o700, exist_ok=True)
            return SecretFiles(self.path / "secrets")
        except OSError as error:
            self.close()
            raise StartError(
                f"The data folder {self.path} cannot be used: {error.strerror} ({error.filename})."
            ) from None
        except StartError:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock. Idempotent. The kernel also releases it when the process ends."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> None:
        descriptor = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StartError(
                f"Pawl is already running in {self.path} (process {holder}). Stop it, or choose another folder with"
                " --data."
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock = descriptor

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if {entry.name for entry in self.path.iterdir()} - {_LOCK_FILE} and not (self.path / _VERSION_FILE).exists():
            raise StartError(f"{self.path} is not empty and is not a Pawl data folder. Choose another one with --data.")
        # PostgreSQL does not run as root, so another account must be able to traverse this folder.
        self.path.chmod(0o711 if os.geteuid() == 0 else 0o700)

    def _check_version(self) -> None:
        path = self.path / _VERSION_FILE
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(f"{VERSION}\n", encoding="utf-8")
        found = path.read_text(encoding="utf-8").strip()
        if found != VERSION:
            raise StartError(
                f"{self.path} has data version {found or 'unknown'}, but this version of Pawl reads version "
                f"{VERSION}: use the Pawl that wrote it, or choose another folder with --data."
            )


def write_endpoints(endpoints: Endpoints) -> None:
    """Write the endpoints file atomically."""
    write_private(Path(endpoints.data) / FILE_NAME, json.dumps(msgspec.to_builtins(endpoints), indent=2) + "\n")


def remove_endpoints(data: Path) -> None:
    (data / FILE_NAME).unlink(missing_ok=True)
