"""Near matches: what somebody may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_NEAR: Final = 0.6
_CHARACTERS_MAX: Final = 100


def near_matches(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """Return the known names most like `name`, best first; none for a long one, which would take long."""
    if len(name) > _CHARACTERS_MAX:
        return []
    by_folded = {other.casefold(): other for other in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=most, cutoff=_NEAR)
    return [by_folded[folded] for folded in found]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'a' or 'b'?`, or an empty text where nothing is near."""
    near = near_matches(name, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
