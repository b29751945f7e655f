"""Keeps the parsed content of a file up to date."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Final, Generic, TypeVar

import msgspec

from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.start import StartError

_POLL_SECONDS: Final = 1.0
_GONE_SECONDS: Final = 60.0
_REPORT_SECONDS: Final = 60.0

T = TypeVar("T")

_log = logs.get_logger(__name__)


class WatchedFile(Generic[T]):
    """The parsed content of a file, reloaded within a second of a change.

    If new content is invalid, the old content stays in effect. Changes to the files in `beside` also cause a reload,
    but `parse` must read these files itself. If the file is deleted, its content stays in effect or, if `without` is
    set, is replaced with that value after a minute.

    Raises:
        StartError: The content is invalid when it is first read.
    """

    def __init__(
        self,
        path: Path,
        variable: str,
        parse: Callable[[bytes], T],
        clock: Clock,
        *,
        beside: Sequence[Path] = (),
        without: bytes | None = None,
    ) -> None:
        self._path = path
        self._beside = beside
        self._variable = variable
        self._parse = parse
        self._clock = clock
        self._without = None if without is None else parse(without)
        self._checked_at = self._seen_at = clock.monotonic()
        self._reported_at = float("-inf")
        try:
            self._seen = self._state()
            self._content = parse(path.read_bytes())
        except OSError as error:
            raise StartError(f"{variable}: cannot read {error.filename or path}: {error.strerror}") from None
        except (ValueError, msgspec.MsgspecError) as error:
            raise StartError(f"{variable}: {path}: {error}") from None

    def __call__(self) -> T:
        if self._clock.monotonic() - self._checked_at >= _POLL_SECONDS:
            self._check()
        return self._content if self._without is None or self._is_still_valid else self._without

    @property
    def _is_still_valid(self) -> bool:
        return self._checked_at - self._seen_at < _GONE_SECONDS

    def _check(self) -> None:
        self._checked_at = self._clock.monotonic()
        try:
            state = self._state()
            content = self._path.read_bytes() if state != self._seen else None
            self._seen_at = self._checked_at
            if content is not None:
                self._content, self._seen = self._parse(content), state
                _log.info("file.reloaded", variable=self._variable, path=str(self._path))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._report(str(error))
        else:
            self._reported_at = float("-inf")

    def _report(self, reason: str) -> None:
        if self._checked_at - self._reported_at >= _REPORT_SECONDS:
            self._reported_at = self._checked_at
            is_valid = self._without is None or self._is_still_valid
            about = {"variable": self._variable, "path": str(self._path), "old_content_used": is_valid}
            _log.error("file.not_reloaded", **about, reason=reason)

    def _state(self) -> list[tuple[int, ...]]:
        paths = (self._path, *self._beside)
        stats = [path.stat() for path in paths]
        for path, mode in zip(paths, (stat.st_mode for stat in stats), strict=True):
            if not (S_ISREG(mode) or S_ISDIR(mode)):  # reading a pipe could block the whole process
                raise OSError(errno.EINVAL, "it is a pipe or device, not a file", str(path))
        # Programs may set mtime, and lost read permission changes only ctime.
        return [(stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino) for stat in stats]
