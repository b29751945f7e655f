"""Files of a store: which paths there are, and what can be done to them."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Final, Literal

PATH_CHARACTERS_MAX: Final = 512
NAME_BYTES_MAX: Final = 200
DEPTH_MAX: Final = 16

# Control, format (also those that turn the direction of text), surrogate, private, unassigned; line and paragraph ends.
_REFUSED_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def path_problem(path: str) -> str:
    """Return what is wrong with a path like `notes/plan.md`, or an empty text.

    A path that is accepted has one spelling: two different ones never name one
    file, so they can stand in resource keys as they are.
    """
    if not path or len(path) > PATH_CHARACTERS_MAX:
        return f"a path has 1 to {PATH_CHARACTERS_MAX} characters"
    if path.startswith("/"):
        return "a path is relative to the store's folder: it does not begin with a slash"
    if not unicodedata.is_normalized("NFC", path):
        return "a path is written in composed characters (Unicode NFC)"
    for character in path:
        category = unicodedata.category(character)
        if category in _REFUSED_CATEGORIES or (category == "Zs" and character != " ") or character == "\\":
            return f"a path has no {_shown(character)}"
    names = path.split("/")
    if len(names) > DEPTH_MAX:
        return f"a path has at most {DEPTH_MAX} parts"
    return next(filter(None, map(_name_problem, names)), "")


def _name_problem(name: str) -> str:
    if not name:
        return "a path has no empty part: no two slashes in a row, none at the end"
    if name in {".", ".."}:
        return f"a path has no part {name!r}"
    if name != name.strip(" "):
        return "a part of a path neither begins nor ends with a space"
    if len(name.encode()) > NAME_BYTES_MAX:
        return f"a part of a path has at most {NAME_BYTES_MAX} bytes"
    return ""


def _shown(character: str) -> str:
    return "backslash" if character == "\\" else f"character U+{ord(character):04X}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """The limits on what a store may keep."""

    file_bytes_max: int = 1024 * 1024
    store_bytes_max: int = 100 * 1024 * 1024
    entries_max: int = 10_000
    """Files and folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something in a folder."""

    name: str
    kind: Literal["file", "folder", "other"]
    """Other: a link, a device; it is not touched."""
    size_bytes: int
    modified: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """A change of one file or folder.

    `put` gives a file its `content`; it and the folders above it are made if need be. `move` gives a file or folder
    the `new_path`, at which nothing is. `remove` takes away a file or an empty folder. `make_folder` makes a folder,
    with the folders above it.
    """

    kind: Literal["put", "move", "remove", "make_folder"]
    path: str
    content: bytes = b""
    new_path: str = ""

    @property
    def target(self) -> str:
        """The path that is written to."""
        return self.new_path or self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A change, None if nothing has to be done, and what to say of it once it is done."""

    change: FileChange | None
    outcome: bytes
