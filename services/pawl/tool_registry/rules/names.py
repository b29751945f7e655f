"""Near matches: what somebody may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Final

_TOKEN: Final = re.compile(r"<\|[^|]*\|>")
_BEFORE: Final = ("/", ".", ":", "__")
_NEAR: Final = 0.6
_CHARACTERS_MAX: Final = 64
_KNOWN_MAX: Final = 2000
_COMPARED_MAX: Final = 8


def near_matches(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """Return the known names most like `name`, best first; none for a long one.

    Of the first two thousand names only those with nearly the same letters are compared, because comparing takes long.
    """
    if len(name) > _CHARACTERS_MAX:
        return []
    by_folded = {other[:_CHARACTERS_MAX].casefold(): other for other in itertools.islice(known, _KNOWN_MAX)}
    visible = "".join(sign for sign in _TOKEN.sub("", name) if unicodedata.category(sign) != "Cf")
    folded = visible.casefold()
    # A model may put in front what it takes for a folder or a server. It is shown the dot of a source as underscores.
    ends = [other for other in by_folded if folded.endswith(tuple(sign + other.replace(".", "__") for sign in _BEFORE))]
    letters = Counter(folded)
    shared = {other: (letters & Counter(other)).total() / (len(folded) + len(other) or 1) for other in by_folded}
    likely = sorted((other for other in shared if shared[other] >= _NEAR / 2), key=lambda other: -shared[other])
    found = ends or difflib.get_close_matches(folded, likely[:_COMPARED_MAX], n=most, cutoff=_NEAR)
    return [by_folded[folded] for folded in found[:most]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'a' or 'b'?`, or an empty text where nothing is near."""
    near = near_matches(name, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
