"""Secrets of one data folder: made once, kept in files that only their owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_private(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file of mode 0600 whole or not at all; with `durable`, so that a power cut leaves it."""
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
    """A folder with one secret per file: mode 0700 and 0600, whatever it was when found."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)

    def path(self, name: str) -> Path:
        """Return the file of a secret."""
        return self._directory / name

    def get(self, name: str) -> str:
        """Returns a secret; makes it the first time it is asked for."""
        path = self.path(name)
        if not path.exists():
            self.put(name, secrets.token_urlsafe(32))
        path.chmod(0o600)
        return path.read_text(encoding="utf-8").strip()

    def remove(self, name: str) -> None:
        """Forgets a secret."""
        self.path(name).unlink(missing_ok=True)

    def put(self, name: str, value: str) -> None:
        """Write a secret whole or not at all."""
        write_private(self.path(name), f"{value}\n", durable=True)
