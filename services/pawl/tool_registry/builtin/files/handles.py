"""Opens files below a folder without ever following links.

Every part of a path is opened relative to its parent, with O_NOFOLLOW. If a folder has been replaced with a link,
opening the folder fails. If a folder is replaced while it is open, its handle is not affected.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pawl.tool_registry.builtin.files.rules import Entry
from pawl.tools.sdk.context import ToolError

_CLOSED: Final = os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | _CLOSED
# O_NONBLOCK, because opening a pipe without a writer would block.
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | _CLOSED
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _CLOSED
_FOLDER_MODE: Final = 0o700
_FILE_MODE: Final = 0o600


class FileMissing(ToolError):
    """Raised when a file or folder does not exist."""


class OverLimit(ToolError):
    """Raised when a file is too large, or its store is full."""


@contextmanager
def as_tool_errors(path: str) -> Iterator[None]:
    """Convert OSErrors about a path to ToolErrors. The messages do not reveal any paths on this machine."""
    try:
        yield
    except FileNotFoundError:
        raise FileMissing(f"{path!r} does not exist") from None
    except NotADirectoryError:
        raise ToolError(f"a part of {path!r} is a file or a link, not a folder") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ToolError(f"{path!r} is a link; links are not followed") from None
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise OverLimit("the disk is full; delete files first") from None
        raise ToolError(f"{path!r}: {os.strerror(error.errno or 0)}") from None


@contextmanager
def opened_root(path: Path) -> Iterator[int]:
    """Open one of the deployment's folders, creating it if necessary."""
    path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def opened_folder(root: int, names: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Open the folder at `names` below the open folder `root`. With `make`, create any missing folders."""
    handle = os.dup(root)
    try:
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, _FOLDER_MODE, dir_fd=handle)
            below = os.open(name, _FOLDER, dir_fd=handle)
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


@contextmanager
def opened_file(folder: int, name: str) -> Iterator[int]:
    """Open a regular file for reading. It stays readable even if it is replaced or deleted.

    Raises:
        ToolError: The path is not a regular file.
        OSError: The file cannot be opened.
    """
    handle = os.open(name, _READ, dir_fd=folder)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ToolError(f"{name!r} is {'a folder' if stat.S_ISDIR(found.st_mode) else 'not a regular file'}")
        yield handle
    finally:
        os.close(handle)


def read_file(folder: int, name: str, *, bytes_max: int) -> bytes:
    """Return a regular file's content.

    Raises:
        ToolError: The path is not a regular file, or the file is too large.
        OSError: The file cannot be opened.
    """
    with opened_file(folder, name) as handle:
        size = os.fstat(handle).st_size
        if size > bytes_max:
            raise OverLimit(f"{name!r} is {size} bytes, over the limit of {bytes_max}; process_file reads larger files")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(bytes_max)


def open_locked(folder: int, name: str) -> int | None:
    """Open a file for writing, creating it if necessary. Return None if another handle has locked it."""
    handle = os.open(name, os.O_RDWR | os.O_CREAT | _CLOSED, _FILE_MODE, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def write_file(folder: int, name: str, content: bytes) -> None:
    """Write a file and sync its content to disk. Nothing else may write to its folder at the same time."""
    handle = os.open(name, _WRITE, _FILE_MODE, dir_fd=folder)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(handle)


def stat_of(folder: int, name: str) -> os.stat_result | None:
    """Return the status of the file with this name, or None if there is no such file. Links are not followed."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def entry_of(name: str, found: os.stat_result) -> Entry:
    is_file, is_folder = stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode)
    return Entry(
        name=name,
        kind="file" if is_file else "folder" if is_folder else "other",
        size_bytes=found.st_size if is_file else 0,
        modified=found.st_mtime,
    )


def names_in(folder: int) -> list[str]:
    with os.scandir(folder) as found:
        return sorted(entry.name for entry in found)


def measure(folder: int) -> tuple[int, int, int]:
    """Return the total bytes, the number of entries and the depth of an open folder."""
    size, count, depth = 0, 0, 0
    for name in names_in(folder):
        found = stat_of(folder, name)
        if found is None:
            continue
        count += 1
        depth = max(depth, 1)
        if stat.S_ISREG(found.st_mode):
            size += found.st_size
        elif stat.S_ISDIR(found.st_mode):
            with opened_folder(folder, [name]) as below:
                more = measure(below)
            size, count, depth = size + more[0], count + more[1], max(depth, 1 + more[2])
    return size, count, depth
