"""Labels: key-value pairs that help users find conversations and runs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Final

from pawl.errors import InvalidField

LABELS_MAX: Final = 16
VALUE_BYTES_MAX: Final = 256
# Prefix of label keys that users may not set.
RESERVED: Final = "pawl."
# Labels of a run that was started by an e-mail: the e-mail's id, and the id of the first message in its thread.
MAIL_ID: Final = f"{RESERVED}mail_id"
MAIL_THREAD: Final = f"{RESERVED}mail_thread"
OF_MAIL: Final = frozenset({MAIL_ID, MAIL_THREAD})

_KEY: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}", re.ASCII)
_SHOWN: Final = 80
# Control characters, and line and paragraph separators.
_REFUSED: Final = frozenset({"Cc", "Zl", "Zp"})


def check_labels(labels: Mapping[str, str], field: str = "labels", *, reserved: Collection[str] = ()) -> dict[str, str]:
    """Validate labels and return a copy of them. `reserved` contains keys that only services may set.

    Raises:
        InvalidField: A label is invalid, or there are too many. The message describes the problem and names the invalid
            label. The metadata names the `field`.
    """
    count = len(labels.keys() - reserved)
    if count > LABELS_MAX:
        raise InvalidField(f"{field} must have at most {LABELS_MAX} labels, got {count}", field=field)
    for key, value in labels.items():
        problem = _problem(key, value, reserved)
        if problem:
            raise InvalidField(f"{field}: the label {key[:_SHOWN]!r} {problem}", field=field)
    return dict(labels)


def has_all(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return wanted.items() <= labels.items()


def _problem(key: str, value: str, reserved: Collection[str]) -> str:
    if _KEY.fullmatch(key) is None:
        return "must be 1 to 63 characters from a-z, 0-9, `_`, `.` and `-`, and start with a letter or a digit"
    if key.startswith(RESERVED) and key not in reserved:
        return f"starts with the reserved prefix {RESERVED}"
    if len(value.encode()) > VALUE_BYTES_MAX:
        return f"has a value of more than {VALUE_BYTES_MAX} bytes"
    if any(unicodedata.category(each) in _REFUSED for each in value):
        return "has a control character or a line break in its value"
    return ""
