"""The files of all stores. Each store has its own folder: `<folder>/<store>/...`.

A lock on `<folder>/<store>.state/lock` serializes changes to a store across all processes that share the folder. Each
change is recorded both before it is made (`pending`) and afterwards (`done/<key>`). After a crash, the next change can
therefore determine whether the last one was made, and no key takes effect twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from pawl.chassis.ids import StoreId, check_id
from pawl.tool_registry.builtin.files import handles
from pawl.tool_registry.builtin.files.handles import FileMissing, OverLimit
from pawl.tool_registry.builtin.files.rules import (
    DEPTH_MAX,
    Entry,
    FileChange,
    FileLimits,
    Planned,
    path_problem,
)
from pawl.tool_registry.builtin.files.staging import StagedFile
from pawl.tools.rules.schema import did_you_mean
from pawl.tools.sdk.context import ToolCancelled, ToolError

# How long a repeated change returns the first outcome.
RECORD_SECONDS: Final = 30 * 86400.0
_LOCK_POLL_SECONDS: Final = 0.01
_PRUNE_EVERY: Final = 100
_RECORD_BYTES_MAX: Final = 1024 * 1024
_STATE: Final = ".state"
_LOCK, _NEXT, _PENDING, _PART, _DONE = "lock", "next", "pending", "part", "done"
_STAGED: Final = "staged-"
# Staged files of calls interrupted this long ago are deleted. Those of uploads are deleted immediately.
_RESUMABLE_SECONDS: Final = 86400.0


class _Pending(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    kind: str
    path: str
    # Inode of the file or folder to move; 0 for other changes.
    inode: int
    outcome: bytes


class FileFolders:
    """The files of all stores. Methods block. They are thread-safe, and safe to use from several processes."""

    def __init__(self, folder: Path, limits: FileLimits, now: Callable[[], float]) -> None:
        self._folder = folder
        self._limits = limits
        self._now = now

    def read(self, store_id: StoreId, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            ToolError: The file does not exist or cannot be read.
        """
        with self._root(store_id) as root:
            content = FileView(root, self._limits).read(path)
            if content is None:
                raise FileMissing(f"the file {path!r} does not exist{_near(root, path)}")
            return content

    @contextmanager
    def opened(self, store_id: StoreId, path: str) -> Iterator[int]:
        """Open a file of any size for reading. The handle continues to read this version even if the file is replaced.

        Raises:
            ToolError: The file does not exist or cannot be opened.
        """
        with self._root(store_id) as root, ExitStack() as stack:
            with _folder_above(root, path) as (folder, name):
                handle = stack.enter_context(handles.opened_file(folder, name))
            yield handle

    def exists(self, store_id: StoreId, path: str) -> bool:
        with self._root(store_id) as root:
            return FileView(root, self._limits).entry(path) is not None

    def entries(self, store_id: StoreId, path: str) -> list[Entry]:
        """Return a folder's entries, sorted by name. An empty `path` means the store's folder.

        Raises:
            ToolError: The folder does not exist.
        """
        names = _parts(path) if path else []
        with (
            self._root(store_id) as root,
            handles.as_tool_errors(path or "/"),
            handles.opened_folder(root, names) as folder,
        ):
            found = ((name, handles.stat_of(folder, name)) for name in handles.names_in(folder))
            return [handles.entry_of(name, stat) for name, stat in found if stat is not None]

    def change(self, store_id: StoreId, key: str, plan: Plan, wait_cancelled: Callable[[float], bool]) -> bytes:
        """Make the change that `plan` returns while the store's lock is held. Return the change's outcome.

        The change is atomic and durable, and is made once per key. For 30 days, later calls with the same key return
        the first outcome.

        Raises:
            ToolError: `plan` refused the change, a limit was reached, or the disk failed.
            ToolCancelled: The call was cancelled while waiting for the lock.
        """
        check_id(key, "key")
        with self._root(store_id) as root, self._state(store_id, wait_cancelled) as (state, done):
            _recover(root, state, done)
            earlier = _record(done, key)
            if earlier is not None:
                return earlier
            planned = plan(FileView(root, self._limits))
            if planned.change is not None:
                self._check_limits(root, planned.change)
                _make(root, state, planned.change, key, planned.outcome)
            _finish(state, done, key, planned.outcome)
            self._prune(done, key)
            return planned.outcome

    def outcome(self, store_id: StoreId, key: str, wait_cancelled: Callable[[float], bool]) -> bytes | None:
        """Return the outcome of the change with this key, or None if no such change was made."""
        with self._root(store_id) as root, self._state(store_id, wait_cancelled) as (state, done):
            _recover(root, state, done)
            return _record(done, check_id(key, "key"))

    @contextmanager
    def staged(
        self, store_id: StoreId, key: str, path: str, wait_cancelled: Callable[[float], bool], *, resumes: bool = False
    ) -> Iterator[StagedFile]:
        """Open a temporary file outside the store's folder. `change` can move it to `path`.

        On exit, a file that was not moved is deleted, unless its `is_kept` is set. With `resumes`, the file that an
        interrupted call with the same key left behind is reopened. If another process has the file open, this waits.

        Raises:
            ToolCancelled: The call was cancelled while waiting.
        """
        _parts(path)
        name = f"{_STAGED}{'run' if resumes else 'put'}-{check_id(key, 'key')}"
        handle: int | None = None
        while handle is None:
            with self._state(store_id, wait_cancelled) as (state, _):
                self._delete_interrupted(state)
                handle = handles.open_locked(state, name)
            if handle is None and wait_cancelled(_LOCK_POLL_SECONDS):
                raise ToolCancelled
        file = StagedFile(handle, name, partial(self._room, store_id, name, path))
        try:
            with handles.as_tool_errors(path):
                yield file
        finally:
            with self._state_folder(store_id) as state, suppress(FileNotFoundError):
                if not file.is_kept:
                    os.unlink(name, dir_fd=state)
            os.close(handle)

    def delete_interrupted(self) -> None:
        """Delete the files of uploads that were interrupted when a process ended."""
        for folder in self._folder.glob(f"*{_STATE}"):
            with self._state(StoreId(folder.name.removesuffix(_STATE)), threading.Event().wait) as (state, _):
                self._delete_interrupted(state)

    def _delete_interrupted(self, state: int) -> None:
        for name in handles.names_in(state):
            found = handles.stat_of(state, name) if name.startswith(_STAGED) else None
            is_upload = name.startswith(f"{_STAGED}put-")
            if found is None or not (is_upload or found.st_mtime < self._now() - _RESUMABLE_SECONDS):
                continue
            # If it is locked, a process is still using it.
            handle = handles.open_locked(state, name)
            if handle is not None:
                os.unlink(name, dir_fd=state)
                os.close(handle)

    def _room(self, store_id: StoreId, name: str, path: str) -> int:
        """Return the maximum size of a staged file that will replace the file at `path`."""
        with self._root(store_id) as root, self._state_folder(store_id) as state:
            size, _, _ = handles.measure(root)
            old = FileView(root, self._limits).entry(path)
            sizes = {each: handles.stat_of(state, each) for each in handles.names_in(state) if each.startswith(_STAGED)}
        others = sum(found.st_size for each, found in sizes.items() if found is not None and each != name)
        room = self._limits.store_bytes_max - size - others + (old.size_bytes if old else 0)
        return max(0, min(room, self._limits.large_bytes_max))

    def forget(self, store_id: StoreId, keys: Collection[str]) -> None:
        """Delete the records of changes, so that their keys can be reused. The files themselves remain."""
        if not (self._folder / f"{store_id}{_STATE}").is_dir():
            return
        with self._state(store_id, threading.Event().wait) as (_, done):
            for key in keys:
                with suppress(FileNotFoundError):
                    os.unlink(check_id(key, "key"), dir_fd=done)
            os.fsync(done)

    @contextmanager
    def _root(self, store_id: StoreId) -> Iterator[int]:
        check_id(store_id, "store_id")
        with (
            handles.as_tool_errors("the store's folder"),
            handles.opened_root(self._folder) as all_stores,
            handles.opened_folder(all_stores, [store_id], make=True) as root,
        ):
            yield root

    @contextmanager
    def _state(self, store_id: StoreId, wait_cancelled: Callable[[float], bool]) -> Iterator[tuple[int, int]]:
        """Hold the store's lock. It is released even if the process dies."""
        with (
            self._state_folder(store_id) as state,
            handles.opened_folder(state, [_DONE], make=True) as done,
        ):
            lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=state)
            try:
                while not _try_lock(lock):
                    if wait_cancelled(_LOCK_POLL_SECONDS):
                        raise ToolCancelled
                yield state, done
            finally:
                os.close(lock)

    @contextmanager
    def _state_folder(self, store_id: StoreId) -> Iterator[int]:
        with (
            handles.opened_root(self._folder) as all_stores,
            handles.opened_folder(all_stores, [store_id + _STATE], make=True) as state,
        ):
            yield state

    def _check_limits(self, root: int, change: FileChange) -> None:
        limits = self._limits
        if change.kind == "remove":
            return
        size, count, _ = handles.measure(root)
        if change.kind == "move":
            _check_depth(root, change)
        elif change.kind == "put":
            most = limits.large_bytes_max if change.staged else limits.file_bytes_max
            if change.size_bytes > most:
                raise OverLimit(f"the file would be {change.size_bytes} bytes, over the limit of {most}")
            old = FileView(root, limits).entry(change.path)
            size += change.size_bytes - (old.size_bytes if old else 0)
            if size > limits.store_bytes_max:
                raise OverLimit(f"the store's files would be {size} bytes, over the limit of {limits.store_bytes_max}")
        if count + _missing(root, change.target) > limits.entries_max:
            raise OverLimit(f"a store can have at most {limits.entries_max} files and folders; delete some first")

    def _prune(self, done: int, key: str) -> None:
        """Delete old records. This runs for only about one change in a hundred, chosen by a hash of the key."""
        if zlib.crc32(key.encode()) % _PRUNE_EVERY:
            return
        oldest = self._now() - RECORD_SECONDS
        for name in handles.names_in(done):
            found = handles.stat_of(done, name)
            if found is not None and found.st_mtime < oldest:
                os.unlink(name, dir_fd=done)


class FileView:
    """A store's files while the store's lock is held. Methods raise ToolError if a path cannot be read."""

    def __init__(self, root: int, limits: FileLimits) -> None:
        self._root = root
        self._limits = limits

    def read(self, path: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        with suppress(FileMissing), _folder_above(self._root, path) as (folder, name):
            return handles.read_file(folder, name, bytes_max=self._limits.file_bytes_max)
        return None

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file of any size, in hex, or an empty string if it does not exist."""
        with (
            suppress(FileMissing),
            _folder_above(self._root, path) as (folder, name),
            handles.opened_file(folder, name) as handle,
            os.fdopen(handle, "rb", closefd=False) as file,
        ):
            return hashlib.file_digest(file, "sha256").hexdigest()
        return ""

    def entry(self, path: str) -> Entry | None:
        """Return the entry at a path, or None if it does not exist."""
        with suppress(FileMissing), _folder_above(self._root, path) as (folder, name):
            found = handles.stat_of(folder, name)
            return None if found is None else handles.entry_of(name, found)
        return None


# Decides what to change. Can raise a ToolError to refuse.
Plan: TypeAlias = Callable[[FileView], Planned]


def _parts(path: str) -> list[str]:
    problem = path_problem(path)
    if problem:
        raise ToolError(problem)
    return path.split("/")


@contextmanager
def _folder_above(root: int, path: str) -> Iterator[tuple[int, str]]:
    """Open the folder that contains the file or folder at `path`. Yield it with the last part of the path."""
    *above, name = _parts(path)
    with handles.as_tool_errors(path), handles.opened_folder(root, above) as folder:
        yield folder, name


def _near(root: int, path: str) -> str:
    *above, name = path.split("/")
    with suppress(OSError), handles.opened_folder(root, above) as folder:
        return did_you_mean(name, handles.names_in(folder))
    return ""


def _missing(root: int, path: str) -> int:
    """Return how many parts of a path do not exist."""
    names = path.split("/")
    for length in range(len(names), 0, -1):
        with suppress(FileNotFoundError), handles.opened_folder(root, names[: length - 1]) as folder:
            if handles.stat_of(folder, names[length - 1]) is not None:
                return len(names) - length
    return len(names)


def _check_depth(root: int, move: FileChange) -> None:
    with suppress(NotADirectoryError), handles.opened_folder(root, move.path.split("/")) as folder:
        if len(move.new_path.split("/")) + handles.measure(folder)[2] > DEPTH_MAX:
            raise ToolError(f"paths would have more than {DEPTH_MAX} parts")


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _record(folder: int, name: str) -> bytes | None:
    with suppress(FileNotFoundError):
        return handles.read_file(folder, name, bytes_max=_RECORD_BYTES_MAX)
    return None


def _make(root: int, state: int, change: FileChange, key: str, outcome: bytes) -> None:
    """Record a change as pending, then make it."""
    *above, name = change.target.split("/")
    with (
        handles.as_tool_errors(change.path),
        handles.opened_folder(root, above, make=change.kind != "remove") as folder,
    ):
        inode = 0
        if change.staged:
            os.rename(change.staged, _NEXT, src_dir_fd=state, dst_dir_fd=state)
        elif change.kind == "put":
            handles.write_file(state, _NEXT, change.content)
        elif change.kind == "move":
            inode = _inode(root, change.path)
        pending = _Pending(key=key, kind=change.kind, path=change.path, inode=inode, outcome=outcome)
        handles.write_file(state, _PART, msgspec.msgpack.encode(pending))
        os.rename(_PART, _PENDING, src_dir_fd=state, dst_dir_fd=state)
        os.fsync(state)
        try:
            _apply(root, state, folder, name, change)
        except OSError:
            os.unlink(_PENDING, dir_fd=state)
            raise
        os.fsync(folder)


def _apply(root: int, state: int, folder: int, name: str, change: FileChange) -> None:
    match change.kind:
        case "put":
            os.rename(_NEXT, name, src_dir_fd=state, dst_dir_fd=folder)
        case "move":
            *above, old_name = change.path.split("/")
            with handles.opened_folder(root, above) as old_folder:
                os.rename(old_name, name, src_dir_fd=old_folder, dst_dir_fd=folder)
        case "remove":
            found = handles.stat_of(folder, name)
            if found is not None and handles.entry_of(name, found).kind == "folder":
                os.rmdir(name, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)
        case "make_folder":
            os.mkdir(name, 0o700, dir_fd=folder)


def _finish(state: int, done: int, key: str, outcome: bytes) -> None:
    handles.write_file(state, _PART, outcome)
    os.rename(_PART, key, src_dir_fd=state, dst_dir_fd=done)
    os.fsync(done)
    with suppress(FileNotFoundError):
        os.unlink(_PENDING, dir_fd=state)


def _recover(root: int, state: int, done: int) -> None:
    """Finish or discard a change that a process left unfinished. No file may have changed since then."""
    raw = _record(state, _PENDING)
    if raw is not None:
        pending = msgspec.msgpack.decode(raw, type=_Pending)
        if _record(done, pending.key) is None and _was_made(root, state, pending):
            _finish(state, done, pending.key, pending.outcome)
        else:
            os.unlink(_PENDING, dir_fd=state)
    with suppress(FileNotFoundError):
        os.unlink(_NEXT, dir_fd=state)


def _was_made(root: int, state: int, pending: _Pending) -> bool:
    inode = _inode(root, pending.path)
    if pending.kind == "put":
        return handles.stat_of(state, _NEXT) is None
    if pending.kind == "move":
        return inode != pending.inode
    return (inode == 0) is (pending.kind == "remove")


def _inode(root: int, path: str) -> int:
    *above, name = path.split("/")
    with suppress(FileNotFoundError, NotADirectoryError), handles.opened_folder(root, above) as folder:
        found = handles.stat_of(folder, name)
        return 0 if found is None else found.st_ino
    return 0
