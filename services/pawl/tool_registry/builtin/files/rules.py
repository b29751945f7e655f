"""Files of a store: which paths there are, and what can be done to them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

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
class PutFile:
    """A file gets this content; it and the folders above it are made if need be."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A file or folder gets another path, at which nothing is."""

    path: str
    new_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """A file, or an empty folder, goes away."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeFolder:
    """A folder is made, with the folders above it."""

    path: str


FileChange: TypeAlias = PutFile | Move | Remove | MakeFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A change, None if nothing has to be done, and what to say of it once it is done."""

    change: FileChange | None
    outcome: bytes


class FileView(Protocol):
    """The files of a store while nobody else changes them."""

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None if nothing is there.

        Raises:
            ToolError: something else is there, or it cannot be read.
        """

    def entry(self, path: str) -> Entry | None:
        """Return what is at a path; None if nothing is."""


Plan: TypeAlias = Callable[[FileView], Planned]
"""Decides on a change, looking at the files as they are; may raise a ToolError, and then nothing is changed."""
