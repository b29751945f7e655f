"""Matches rules' patterns against arguments in bounded time, in every way that a tool may interpret a value.

`HTTP://Host.:80/a` and `http://host/a` are the same URL. Each interpretation of a value is called a reading. A DENY or
ASK rule applies if any reading matches. An ALLOW rule applies only if all readings match.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import posixpath
import re
import socket
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from pawl.chassis.strict_json import INTEGER_MAX, INTEGER_MIN, JsonValue, dumps_canonical
from pawl.server.egress.policy import EgressRefused, read_target
from pawl.tools.rules.pointers import resolve

# Maximum number of comparison steps for matching all rules of a store against a call. They take tens of milliseconds.
WORK_MAX: Final = 100_000

_CHARACTERS_A_STEP: Final = 100
_FORMATS: Final = {
    "uri": "url",
    "url": "url",
    "iri": "url",
    "uri-reference": "url",
    "path": "path",
    "email": "email",
    "idn-email": "email",
    "recipient": "email",
}
_ACTS_AS: Final = "x-pawl-acts-as"
# Keywords that can allow an object to have undeclared properties.
_OPEN: Final = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")
_BELOW: Final = "/*"
_LIKE_A_URL: Final = re.compile(r"[a-z][a-z0-9+.-]{0,30}:/*[^/]", re.IGNORECASE)
_ORIGIN: Final = re.compile(r"[^/?#]{1,40}://[^/?#]*")
_STARS: Final = re.compile(r"\*{2,}")
_ENCODED_WILDCARD: Final = re.compile("%(2a|3f)", re.IGNORECASE)
# URL parsers strip these characters (WHATWG URL, 4.4).
_NOT_IN_URLS: Final = re.compile("[\t\n\r]")
# Maximum number of combining marks per character. It is limited because sorting marks takes quadratic time.
_MARKS_MAX: Final = 100
# Characters that are not marks themselves but normalize to marks.
_HIDDEN_MARKS: Final = frozenset("\u0f73\u0f75\u0f81\uff9e\uff9f")
# Invisible characters: Unicode Cc and Cf, default-ignorable ones, and line and paragraph separators. Tab and line feed
# are kept.
_UNSEEN: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef"
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)


class ArgumentKind(StrEnum):
    """The kind of value that an argument holds, as declared by `format` in its schema."""

    TEXT = "text"
    URL = "url"
    PATH = "path"
    EMAIL = "email"


class TooMuchToMatch(Exception):
    """Raised when matching a store's rules against a call's arguments would take too many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Declares that an argument also acts as an argument of another tool.

    For example, moving a file also reads and deletes it.
    """

    argument: str
    tool_name: str
    tool_argument: str
    # True if everything below the path is also affected.
    is_below: bool


def argument_kinds(schema: Mapping[str, Any]) -> dict[str, ArgumentKind]:
    """Return the declared kinds of the top-level arguments. An array has the kind of its items."""
    kinds: dict[str, ArgumentKind] = {}
    for name, part in _properties(schema):
        for each in _alternatives(schema, part):
            declared = each.get("format")
            if isinstance(declared, str) and declared in _FORMATS:
                kinds[name] = ArgumentKind(_FORMATS[declared])
    return kinds


def takes_argument(schema: Mapping[str, Any], name: str) -> bool:
    declared = dict(_properties(schema))
    is_vague = not declared and schema.get("additionalProperties") is not False
    return name in declared or is_vague or any(map(schema.get, _OPEN))


def argument_acts(schema: Mapping[str, Any]) -> tuple[Act, ...]:
    """Return the acts that a schema declares with `x-pawl-acts-as`.

    `read_file.path/*` covers everything below the path.
    """
    found = []
    for name, part in _properties(schema):
        declared = part.get(_ACTS_AS) if isinstance(part, dict) else None
        for text in declared if isinstance(declared, list) else ():
            tool_name, _, argument = str(text).removesuffix(_BELOW).rpartition(".")
            is_below = str(text).endswith(_BELOW)
            found.append(Act(argument=name, tool_name=tool_name, tool_argument=argument, is_below=is_below))
    return tuple(found)


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    properties = schema.get("properties")
    yield from properties.items() if isinstance(properties, dict) else ()


def _alternatives(schema: Mapping[str, Any], part: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and its direct branches. After each, yield the schema of its items, if it has one."""
    part = resolve(schema, part)
    if not isinstance(part, dict):
        return
    branches = [each for word in ("anyOf", "oneOf", "allOf") for each in _list(part.get(word))]
    for branch in [part, *(resolve(schema, each) for each in branches)]:
        if isinstance(branch, dict):
            yield branch
            items = resolve(schema, branch.get("items"))
            if isinstance(items, dict):
                yield items


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def canonical_value(value: JsonValue) -> bytes:
    """Return a value's canonical JSON, for example 1 for 1.0."""
    return dumps_canonical(_whole(value))


def _whole(value: JsonValue) -> JsonValue:
    match value:
        case float() if value.is_integer() and INTEGER_MIN <= value <= INTEGER_MAX:
            return int(value)
        case list():
            return [_whole(item) for item in value]
        case dict():
            return {key: _whole(item) for key, item in value.items()}
        case _:
            return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentPattern:
    """A pattern for a top-level argument, which must have the canonical value `equals` or match `glob`."""

    argument: str
    equals: bytes | None = None
    glob: str | None = None


@dataclass(slots=True)
class Work:
    """The number of comparison steps that are left."""

    left: int = WORK_MAX

    def spend(self, steps: int) -> None:
        """Subtract steps from those that are left.

        Raises:
            TooMuchToMatch: Too few steps are left.
        """
        self.left -= steps
        if self.left < 0:
            raise TooMuchToMatch


@dataclass(slots=True, kw_only=True)
class Matching:
    """Matches one call's arguments against the patterns of any number of rules.

    Raises:
        TooMuchToMatch: Matching would take more than WORK_MAX steps.
    """

    arguments: Mapping[str, JsonValue]
    kinds: Mapping[str, ArgumentKind] = field(default_factory=dict)
    # Arguments that also affect everything below their path.
    is_below: frozenset[str] = frozenset()
    work: Work = field(default_factory=Work)
    _readings: dict[tuple[str, ArgumentKind], tuple[str, ...]] = field(default_factory=dict)
    _globs: dict[tuple[str, ArgumentKind], tuple[str, ...]] = field(default_factory=dict)

    def meets(self, pattern: ArgumentPattern, *, strictly: bool) -> bool:
        """Return whether the argument exists and matches. For an array, one matching item is enough.

        With `strictly`, there must be at least one item, and every item must match in all its readings.
        """
        self.work.spend(1)
        if pattern.argument not in self.arguments:
            return False
        value = self.arguments[pattern.argument]
        kind = self.kinds.get(pattern.argument, ArgumentKind.TEXT)
        if pattern.equals is not None:
            return self._equals(value, _decoded(pattern.equals), kind, strictly=strictly)
        items = value if isinstance(value, list) else [value]
        glob = pattern.glob or ""
        is_below = pattern.argument in self.is_below
        every = all if strictly else any
        return bool(items) and every(
            isinstance(item, str) and self._is_like(item, glob, kind, strictly=strictly, is_below=is_below)
            for item in items
        )

    def _is_like(self, text: str, glob: str, kind: ArgumentKind, *, strictly: bool, is_below: bool) -> bool:
        globs = self._read_glob(glob, kind)
        every = all if strictly else any
        return every(
            any(glob_matches(reading, each, self.work) for each in globs)
            or (is_below and glob_reaches(f"{reading}/", globs[-1], self.work))
            for reading in self._read(text, kind)
        )

    def _equals(self, value: JsonValue, wanted: JsonValue, kind: ArgumentKind, *, strictly: bool) -> bool:
        self.work.spend(1)
        match value, wanted:
            case str(), str():
                if value == wanted or strictly:
                    return value == wanted
                return not set(self._read(value, kind)).isdisjoint(self._read(wanted, kind))
            case list(), list():
                pairs = zip(value, wanted, strict=False)
                return len(value) == len(wanted) and all(self._equals(*pair, kind, strictly=strictly) for pair in pairs)
            case dict(), dict():
                return value.keys() == wanted.keys() and all(
                    self._equals(value[key], wanted[key], kind, strictly=strictly) for key in wanted
                )
            case _:
                # 1 equals 1.0, but not true.
                return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted

    def _read(self, text: str, kind: ArgumentKind) -> tuple[str, ...]:
        key = (text, kind)
        if key not in self._readings:
            self.work.spend(1 + len(text) // 4)
            if piles_marks(text):
                raise TooMuchToMatch
            self._readings[key] = readings(text, kind)
        return self._readings[key]

    def _read_glob(self, glob: str, kind: ArgumentKind) -> tuple[str, ...]:
        key = (glob, kind)
        if key not in self._globs:
            self.work.spend(1 + len(glob) // 4)
            if piles_marks(glob):
                raise TooMuchToMatch
            self._globs[key] = tuple(dict.fromkeys((glob, _plain_glob(glob, kind))))
        return self._globs[key]


@functools.lru_cache(maxsize=1000)
def _decoded(equals: bytes) -> JsonValue:
    value: JsonValue = msgspec.json.decode(equals)
    return value


def readings(text: str, kind: ArgumentKind) -> tuple[str, ...]:
    """Return a string and its other readings: without invisible characters, and as a URL, path or e-mail address."""
    plain = _plain(text)
    found = [text, plain]
    if kind is ArgumentKind.URL or (kind is ArgumentKind.TEXT and _LIKE_A_URL.match(_NOT_IN_URLS.sub("", plain))):
        found.append(_url(plain))
    elif kind is ArgumentKind.PATH:
        found.append(_path(plain))
    elif kind is ArgumentKind.EMAIL:
        found.append(plain.lower().rstrip("."))
    return tuple(dict.fromkeys(found))


def piles_marks(text: str) -> bool:
    """Return whether a string has more consecutive combining marks than any language uses."""
    if text.isascii():
        return False
    runs = itertools.groupby(text, _is_mark)
    return any(sum(1 for _ in run) > _MARKS_MAX for is_mark, run in runs if is_mark)


def _is_mark(character: str) -> bool:
    return bool(unicodedata.combining(character)) or character in _HIDDEN_MARKS


def _plain(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text.strip()
    return _UNSEEN.sub("", unicodedata.normalize("NFKC", text)).strip()


def _url(plain: str) -> str:
    """Normalize a URL as an HTTP client does and resolve its path.

    For other schemes, lower-case the scheme and host.
    """
    slashed = _NOT_IN_URLS.sub("", plain).replace("\\", "/")
    scheme, colon, rest = slashed.partition(":")
    if colon and scheme.lower() in {"http", "https"}:
        # Browsers accept any number of slashes, and ignore the user info.
        authority = re.split("[/?#]", rest.lstrip("/"), maxsplit=1)[0]
        slashed = f"{scheme}://{_host(authority.rpartition('@')[2])}{rest.lstrip('/')[len(authority) :]}"
    try:
        target = read_target(slashed)
    except EgressRefused:
        origin = _ORIGIN.match(slashed)
        return slashed if origin is None else origin[0].lower() + slashed[origin.end() :]
    path, mark, query = target.target.partition("?")
    return target.origin + _path(unquote(path), root="/") + mark + unquote(query)


def _host(authority: str) -> str:
    """Normalize a host and port as browsers do, with percent-decoding and dotted addresses (WHATWG URL, 3.5)."""
    name, colon, port = unquote(authority).partition(":")
    with contextlib.suppress(OSError, ValueError):
        name = socket.inet_ntoa(socket.inet_aton(name.rstrip("."))) if name[:1].isdecimal() else name
    return f"{name}{colon}{port}"


def _path(plain: str, *, root: str = "") -> str:
    """Return a path without empty parts, `.` and `..`. The path is relative unless `root` is a slash."""
    slashed = plain.replace("\\", "/")
    end = "/" if slashed.endswith("/") and root else ""
    resolved = posixpath.normpath(f"/{slashed}").lstrip("/")
    return f"{root}{resolved}{end if resolved else ''}"


def _plain_glob(glob: str, kind: ArgumentKind) -> str:
    """Normalize a glob in the same way as the readings with which it is compared."""
    plain = _plain(glob)
    if kind is ArgumentKind.EMAIL:
        return plain.lower()
    if kind is ArgumentKind.PATH:
        return re.sub("/{2,}", "/", plain).removeprefix("./").removeprefix("/")
    origin = _ORIGIN.match(plain)
    if origin is None:
        return plain
    lowered, rest = origin[0].lower(), unquote(_ENCODED_WILDCARD.sub(r"%25\1", plain[origin.end() :]))
    if not set("*?") & set(lowered):
        with contextlib.suppress(EgressRefused):
            lowered, rest = read_target(lowered).origin, rest or "/"
    return lowered + rest


def glob_matches(text: str, glob: str, work: Work) -> bool:
    """Return whether the whole string matches the glob. `*` matches any text, and `?` matches one character.

    Raises:
        TooMuchToMatch: Matching takes more steps than are left.
    """
    first, *middle = glob.split("*")
    work.spend(1 + len(text) // _CHARACTERS_A_STEP)
    if not middle:
        return len(text) == len(first) and _is_at(text, 0, first.split("?"), work)
    last = middle.pop()
    place, end = len(first), len(text) - len(last)
    if end < place or not (_is_at(text, 0, first.split("?"), work) and _is_at(text, end, last.split("?"), work)):
        return False
    for piece in middle:
        # The leftmost match is always best: it leaves the most text for the rest of the glob.
        place = _find(text, piece, place, end, work) + len(piece)
        if place < len(piece):
            return False
    return True


def _find(text: str, piece: str, start: int, end: int, work: Work) -> int:
    """Return the first position of a piece in `text[start:end]`, or a negative number if it does not occur."""
    if "?" not in piece:
        found = text.find(piece, start, end)
        work.spend(1 + (end if found < 0 else found) // _CHARACTERS_A_STEP - start // _CHARACTERS_A_STEP)
        return found
    parts = piece.split("?")
    anchor = max(parts, key=len)
    offset = piece.find(anchor) if anchor else 0
    place = start
    while place + len(piece) <= end:
        found = text.find(anchor, place + offset, end)
        if found < 0:
            break
        work.spend(1 + (found - place - offset) // _CHARACTERS_A_STEP)
        place = found - offset
        if place + len(piece) <= end and _is_at(text, place, parts, work):
            return place
        place += 1
    work.spend(1 + (end - place) // _CHARACTERS_A_STEP if place < end else 1)
    return -len(piece) - 1


def _is_at(text: str, place: int, parts: list[str], work: Work) -> bool:
    """Return whether the parts match at a position. Between two parts, any single character is allowed."""
    for part in parts:
        work.spend(1)
        if not text.startswith(part, place):
            return False
        place += len(part) + 1
    return place - 1 <= len(text)


def glob_reaches(prefix: str, glob: str, work: Work) -> bool:
    """Return whether any string that starts with `prefix` can match the glob.

    Raises:
        TooMuchToMatch: Matching takes more steps than are left.
    """
    glob = _STARS.sub("*", glob)
    places = {0}
    for character in prefix:
        work.spend(1 + len(places))
        places = _after_stars(places, glob)
        places = {
            place if glob[place] == "*" else place + 1
            for place in places
            if place < len(glob) and glob[place] in ("*", "?", character)
        }
    return bool(places)


def _after_stars(places: set[int], glob: str) -> set[int]:
    found = set(places)
    for place in places:
        after = place
        while after < len(glob) and glob[after] == "*":
            after += 1
            found.add(after)
    return found
