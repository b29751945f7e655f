"""Labels: pairs of texts by which users find their things again."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Final

from pawl.errors import InvalidField

LABELS_MAX: Final = 16
VALUE_BYTES_MAX: Final = 256
RESERVED: Final = "pawl."
"""Keys that begin so are not for users."""

_KEY: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}", re.ASCII)
_SHOWN: Final = 80
# Control characters, and what ends a line or a paragraph.
_REFUSED: Final = frozenset({"Cc", "Zl", "Zp"})


def check_labels(labels: Mapping[str, str], field: str = "labels") -> dict[str, str]:
    """Return labels that a thing may have, or that may be looked for.

    Raises:
        InvalidField: it may not: `field` says where, the message which label and why.
    """
    if len(labels) > LABELS_MAX:
        raise InvalidField(f"{field}: at most {LABELS_MAX} labels, and there are {len(labels)}", field=field)
    for key, value in labels.items():
        problem = _problem(key, value)
        if problem:
            raise InvalidField(f"{field}: the label {key[:_SHOWN]!r} {problem}", field=field)
    return dict(labels)


def has_all(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether all wanted pairs are among the labels."""
    return wanted.items() <= labels.items()


def _problem(key: str, value: str) -> str:
    if _KEY.fullmatch(key) is None:
        return "has another key than 1 to 63 of a-z, 0-9, `_`, `.` and `-`, of which the first is a letter or a digit"
    if key.startswith(RESERVED):
        return f"begins with {RESERVED}, which is Pawl's own"
    if len(value.encode()) > VALUE_BYTES_MAX:
        return f"has a value of more than {VALUE_BYTES_MAX} bytes"
    if any(unicodedata.category(each) in _REFUSED for each in value):
        return "has a control character or a line break in its value"
    return ""
