"""A file that is written in pieces before it is moved into a store's folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Final

from pawl.tool_registry.builtin.files.handles import OverLimit

# The store's quota is measured again after this many bytes.
_STEP_BYTES: Final = 32 * 1024 * 1024


class StagedFile:
    """An open file whose size is limited by `room`. Its methods block and raise OSError if the disk fails.

    Set `is_kept` if a later execution will continue writing the file.
    """

    def __init__(self, handle: int, name: str, room: Callable[[], int]) -> None:
        self._handle = handle
        self._room = room
        self._checked_bytes = 0
        self.name = name
        self.size = os.fstat(handle).st_size
        self.is_kept = False

    def write(self, data: bytes) -> None:
        """Append data to the file.

        Raises:
            OverLimit: The file or the store would be too large.
        """
        if self.size + len(data) > self._checked_bytes:
            room = self._room()
            if self.size + len(data) > room:
                raise OverLimit(
                    f"the file may have at most {room} bytes here; use a smaller file, or delete other files"
                )
            self._checked_bytes = min(room, self.size + len(data) + _STEP_BYTES)
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._handle, rest, self.size)
            self.size += count
            rest = rest[count:]

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._handle, length, offset)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._handle, size)
        self.size = size

    def sync(self) -> None:
        os.fsync(self._handle)

    def sha256(self) -> str:
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
