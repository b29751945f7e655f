"""Validates values that clients send (LOOP-15)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from pawl.agent_loop.loop.rules.assembly import ARGUMENTS_BYTES_MAX
from pawl.chassis import strict_json
from pawl.errors import InvalidField, InvalidJson, TooLarge

MESSAGE_BYTES_MAX: Final = 256 * 1024
RESULT_BYTES_MAX: Final = 1024 * 1024
ANSWER_BYTES_MAX: Final = 64 * 1024
REASON_BYTES_MAX: Final = 4 * 1024
PROGRESS_BYTES_MAX: Final = 1024
KEY_BYTES_MAX: Final = 200
PAGE_SIZE_MAX: Final = 200
OWN_TOOLS_MAX: Final = 64
OWN_TOOLS_BYTES_MAX: Final = 64 * 1024
WAIT_SECONDS_MAX: Final = 60.0
SEQ_MAX: Final = 2**63 - 1

# Control characters other than tab, line feed and carriage return.
CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def text(value: str, field: str, *, bytes_max: int, may_be_empty: bool = False) -> str:
    """Return `value` if it is valid text.

    Raises:
        TooLarge: The text is longer than `bytes_max` bytes.
        InvalidField: The text has control characters, or is empty although `may_be_empty` is false.
    """
    if not value and not may_be_empty:
        raise InvalidField(f"{field} is empty", field=field)
    if len(value.encode()) > bytes_max:
        raise TooLarge(f"{field} must be at most {bytes_max} bytes, got {len(value.encode())}", field=field)
    if (found := CONTROL.search(value)) is not None:
        raise InvalidField(f"{field} contains the control character U+{ord(found.group()):04X}", field=field)
    return value


def conversation_key(value: str) -> str:
    """Return `value` if it is a valid conversation key. It may be empty.

    Raises:
        TooLarge: The key has more than 200 bytes.
    """
    if len(value.encode()) > KEY_BYTES_MAX:
        raise TooLarge(f"conversation_key must be at most {KEY_BYTES_MAX} bytes", field="conversation_key")
    return value


def own_tools(definitions: Sequence[bytes], field: str) -> Sequence[bytes]:
    """Return the serialized tools that a client supplies with a run, if they are within the limits.

    Raises:
        InvalidField: There are more than 64 tools.
        TooLarge: The tools are larger than 64 KiB in total.
    """
    if len(definitions) > OWN_TOOLS_MAX:
        raise InvalidField(f"{field} must have at most {OWN_TOOLS_MAX} tools", field=field)
    if sum(map(len, definitions)) > OWN_TOOLS_BYTES_MAX:
        raise TooLarge(f"{field} must be at most {OWN_TOOLS_BYTES_MAX} bytes in total", field=field)
    return definitions


def result_json(content: bytes) -> bytes:
    """Return `content` if it is strict JSON of at most 1 MiB.

    Raises:
        TooLarge, InvalidJson
    """
    strict_json.loads(content, bytes_max=RESULT_BYTES_MAX)
    return content


def arguments_json(content: bytes) -> bytes:
    """Return `content` if it is a strict JSON object of at most 256 KiB.

    Raises:
        TooLarge, InvalidJson
    """
    if not isinstance(strict_json.loads(content, bytes_max=ARGUMENTS_BYTES_MAX), dict):
        raise InvalidJson("arguments must be a JSON object")
    return content


def fraction(value: float | None) -> float | None:
    """Return `value` if it is None or between 0 and 1.

    Raises:
        InvalidField
    """
    if value is not None and not 0 <= value <= 1:
        raise InvalidField("fraction must be between 0 and 1", field="fraction")
    return value


def page_size(value: int) -> int:
    """Return `value` if it is a valid page size. 0 means the ledger's default.

    Raises:
        InvalidField: The size is over PAGE_SIZE_MAX.
    """
    if value > PAGE_SIZE_MAX:
        raise InvalidField(f"page_size must be at most {PAGE_SIZE_MAX}", field="page_size")
    return value


def wait_seconds(value: float) -> float:
    """Return `value` if it is a wait time between 0 and 60 seconds.

    Raises:
        InvalidField
    """
    if not math.isfinite(value) or not 0 <= value <= WAIT_SECONDS_MAX:
        raise InvalidField("wait_seconds must be between 0 and 60", field="wait_seconds")
    return value


def seq(value: int, field: str) -> int:
    """Return `value` if it is a seq of at most 63 bits.

    Raises:
        InvalidField
    """
    if value > SEQ_MAX:
        raise InvalidField(f"{field} must be at most {SEQ_MAX}", field=field)
    return value
