"""Rules for a store's files: valid paths, limits and changes."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Final, Literal

PATH_CHARACTERS_MAX: Final = 512
NAME_BYTES_MAX: Final = 200
DEPTH_MAX: Final = 16

# Control, format (including text direction), surrogate, private, unassigned, line and paragraph separators.
_REFUSED_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def path_problem(path: str) -> str:
    """Return why a file path is invalid, or an empty string if it is valid.

    Two different valid paths never refer to the same file. Paths can therefore be used unchanged in resource keys.
    """
    if not path or len(path) > PATH_CHARACTERS_MAX:
        return f"a path must be between 1 and {PATH_CHARACTERS_MAX} characters long"
    if path.startswith("/"):
        return "a path is relative to the store's folder and must not start with a slash"
    if not unicodedata.is_normalized("NFC", path):
        return "a path must use composed characters (Unicode NFC)"
    for character in path:
        category = unicodedata.category(character)
        if category in _REFUSED_CATEGORIES or (category == "Zs" and character != " ") or character == "\\":
            return f"a path must not contain {_shown(character)}"
    names = path.split("/")
    if len(names) > DEPTH_MAX:
        return f"a path may have at most {DEPTH_MAX} parts"
    return next(filter(None, map(_name_problem, names)), "")


def _name_problem(name: str) -> str:
    if not name:
        return "a path must not have two slashes in a row, or end with a slash"
    if name in {".", ".."}:
        return f"a path must not contain {name!r}"
    if name != name.strip(" "):
        return "a part of a path must not start or end with a space"
    if len(name.encode()) > NAME_BYTES_MAX:
        return f"a part of a path must be at most {NAME_BYTES_MAX} bytes"
    return ""


def _shown(character: str) -> str:
    return "a backslash" if character == "\\" else f"the character U+{ord(character):04X}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """Limits per store."""

    # Files that tools read or write in one piece.
    file_bytes_max: int = 1024 * 1024
    # Files that are uploaded or processed.
    large_bytes_max: int = 1024**3
    store_bytes_max: int = 4 * 1024**3
    # Files and folders.
    entries_max: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    name: str
    # `other` is a link or a device; it is never changed.
    kind: Literal["file", "folder", "other"]
    size_bytes: int
    # Seconds since 1970.
    modified: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """A change to one file or folder.

    `put` writes a file with `content`, or moves the staged file with the name `staged` into place. The file and its
    parent folders are created if necessary. `move` moves a file or folder to `new_path`, which must not exist. `remove`
    deletes a file or an empty folder. `make_folder` creates a folder and its parents.
    """

    kind: Literal["put", "move", "remove", "make_folder"]
    path: str
    content: bytes = b""
    new_path: str = ""
    staged: str = ""
    staged_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.staged_bytes if self.staged else len(self.content)

    @property
    def target(self) -> str:
        return self.new_path or self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The change to make, or None if nothing needs to change, and the outcome to report."""

    change: FileChange | None
    outcome: bytes
