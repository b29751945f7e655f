"""Id types, their format, and a generator for ids.

Each kind of id has its own type, so that mypy rejects mix-ups. At run time, all ids are strings.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Final, Literal, NewType, overload

import msgspec

from pawl.chassis.process.clock import Clock
from pawl.errors import InvalidId

StoreId = NewType("StoreId", str)
UserId = NewType("UserId", str)
ConversationId = NewType("ConversationId", str)
RunId = NewType("RunId", str)
CallId = NewType("CallId", str)
CommandId = NewType("CommandId", str)
RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
ClientId = NewType("ClientId", str)
SessionId = NewType("SessionId", str)
CredentialId = NewType("CredentialId", str)
KeyId = NewType("KeyId", str)

# The agent for runs that do not specify one.
DEFAULT_AGENT: Final = "default"

_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)

# Prefix for the names of a user's drafts. No store agent has such a name.
DRAFT: Final = "draft/"

# Crockford's base 32 in lower case: its text sorts like the number.
_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS: Final = 80
_LENGTH: Final = 26


class RunKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """Identifies a run across all stores, because a run id is unique only within its store."""

    store_id: StoreId
    run_id: RunId


class CallKey(msgspec.Struct, frozen=True, order=True, gc=False):
    store_id: StoreId
    call_id: CallId


def is_id(value: str) -> bool:
    """Return whether `value` is safe in a subject, path or key: ^[A-Za-z0-9_-]{1,64}$."""
    return _ID.fullmatch(value) is not None


@overload
def check_id(value: str, field: Literal["store_id", "pawl-store"], *, optional: bool = ...) -> StoreId: ...
@overload
def check_id(
    value: str, field: Literal["user_id", "delegate_user_id", "pawl-user"], *, optional: bool = ...
) -> UserId: ...
@overload
def check_id(value: str, field: Literal["conversation_id"], *, optional: bool = ...) -> ConversationId: ...
@overload
def check_id(value: str, field: Literal["run_id"], *, optional: bool = ...) -> RunId: ...
@overload
def check_id(value: str, field: Literal["call_id"], *, optional: bool = ...) -> CallId: ...
@overload
def check_id(value: str, field: Literal["command_id"], *, optional: bool = ...) -> CommandId: ...
@overload
def check_id(value: str, field: Literal["request_id"], *, optional: bool = ...) -> RequestId: ...
@overload
def check_id(value: str, field: Literal["worker_id"], *, optional: bool = ...) -> WorkerId: ...
@overload
def check_id(value: str, field: Literal["client_id"], *, optional: bool = ...) -> ClientId: ...
@overload
def check_id(value: str, field: Literal["session_id"], *, optional: bool = ...) -> SessionId: ...
@overload
def check_id(value: str, field: Literal["credential_id"], *, optional: bool = ...) -> CredentialId: ...
@overload
def check_id(value: str, field: str, *, optional: bool = ...) -> str: ...
def check_id(value: str, field: str, *, optional: bool = False) -> str:
    """Return `value` if it is an id, or if it is empty and `optional` is set. The field's name determines the type.

    Raises:
        InvalidId: The value is not an id. The metadata names the field.
    """
    if not value and not optional:
        raise InvalidId(f"{field} is required", field=field)
    if value and not is_id(value):
        raise InvalidId(f"{field} must have 1 to 64 letters, digits, _ and -, got {value[:80]!r}", field=field)
    return value


def check_agent_name(value: str, field: str, *, optional: bool = False) -> str:
    """Return `value` if it is the name of an agent or of a draft (`draft/NAME`).

    Raises:
        InvalidId: The value is neither. The metadata names the field.
    """
    own = value.removeprefix(DRAFT)
    check_id(own, field, optional=optional and own == value)
    return value


class IdSource:
    """Generates ids like `run_01j5k6m7n8p9q0r1s2t3v4w5x6`: a prefix and 26 digits.

    The digits are a ULID, which has 48 bits of milliseconds and 80 bits of randomness. The ids of one source sort in
    the order in which they were made, even within a millisecond, and even if the clock steps back. Not thread-safe.
    """

    def __init__(self, clock: Clock, random_bits: Callable[[int], int] = secrets.randbits) -> None:
        self._clock = clock
        self._random_bits = random_bits
        self._last = 0

    def new(self, prefix: str) -> str:
        milliseconds = int(self._clock.now() * 1000)
        if milliseconds > self._last >> _RANDOM_BITS:
            # The top random bit starts at zero, so that later increments do not change the time.
            self._last = milliseconds << _RANDOM_BITS | self._random_bits(_RANDOM_BITS - 1)
        else:
            self._last += 1 + self._random_bits(32)
        return f"{prefix}_{_base32(self._last)}"


# Ids are created on hot paths, so encode two digits at a time.
_PAIRS: Final = tuple(high + low for high in _DIGITS for low in _DIGITS)


def _base32(number: int) -> str:
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(5 * (_LENGTH - 2), -1, -10)])
