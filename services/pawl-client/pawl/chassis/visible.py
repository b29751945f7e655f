"""Escapes for untrusted text, so that terminals, AG-UI, webhooks and e-mails show it safely and identically.

web/console/src/visible.ts does the same. tests/golden/visible.json contains test cases for both.
"""

from __future__ import annotations

import re
import unicodedata
from datetime import datetime
from typing import Final

# Control and format characters, blank letters, variation selectors and tags can hide text or control a terminal.
# Joiners are kept in emoji and in scripts that need them for spelling.
_PICTURE: Final = r"\u2190-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff"
_JOINED: Final = r"[\u0620-\u08ff\u0900-\u109f]"
# Invisible characters. Matches of the first group are legitimate and are kept.
HIDDEN: Final = re.compile(
    rf"((?<=[{_PICTURE}\ufe0f])\u200d(?=[{_PICTURE}])|(?<=[{_PICTURE}\u00a9\u00ae\u2122])\ufe0f|"
    rf"(?<={_JOINED})[\u200c\u200d](?={_JOINED}))|"
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2"
    r"\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    r"\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# The host of a URL or an e-mail address.
HOST: Final = re.compile(r"""(?:(?<=//)|(?<=@))[^\s/?#@:"'<>()\[\]{},;\\]+""")
_UNFINISHED_MARK: Final = re.compile(r"<[^<>\s]{0,300}$")


def visible(text: str) -> str:
    """Return `text` with each hidden character shown like <U+202E>, and with the ASCII form after each non-ASCII host.

    Tabs and line breaks are kept. Idempotent.
    """
    shown = HIDDEN.sub(lambda found: found[1] or f"<U+{ord(found[0]):04X}>", text.replace("\r\n", "\n"))
    return shown if shown.isascii() else HOST.sub(_with_ascii_name, shown)


def shortened(text: str, bytes_max: int) -> str:
    """Return at most `bytes_max` bytes of `text`, shortened with "...".

    Characters and marks like <U+202E> are never split.
    """
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return text
    return _UNFINISHED_MARK.sub("", data[: bytes_max - 3].decode(errors="ignore")) + "..."


def undecided(until: datetime | None = None, *, is_extended: bool = False) -> str:
    """Return a sentence about what happens to a call if no decision is made.

    The deadline of an approval can be extended once.
    """
    by = "in time" if until is None else f"by {until:%Y-%m-%d %H:%M} UTC"
    extension = "" if is_extended else ", or the deadline is extended once"
    return f"If no one decides {by}, the call does not run{extension}."


def _with_ascii_name(found: re.Match[str]) -> str:
    host = found[0]
    if host.isascii() or "." not in host or found.string.startswith("<xn--", found.end()):
        return host
    labels = unicodedata.normalize("NFKC", host).lower().split(".")
    plain = (label if label.isascii() else f"xn--{label.encode('punycode').decode()}" for label in labels)
    return f"{host}<{'.'.join(plain)}>"
