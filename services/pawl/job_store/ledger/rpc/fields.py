"""Validates the fields of requests to the ledger. Invalid fields raise InvalidField."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Final, TypeVar

from google.protobuf.message import Message as ProtoMessage

from pawl.chassis.ids import UserId, check_id
from pawl.errors import InvalidField
from pawl.event.v1 import run_pb2
from pawl.values import TOKENS_MAX

E = TypeVar("E", bound=IntEnum)

_PEOPLE_MAX: Final = 8


def user_ids(named: Sequence[str]) -> tuple[UserId, ...]:
    if len(named) > _PEOPLE_MAX:
        raise InvalidField(f"people must have at most {_PEOPLE_MAX} entries, got {len(named)}", field="people")
    return tuple(sorted(UserId(check_id(user_id, "people")) for user_id in named))


def fingerprint(message: ProtoMessage, *, without: Sequence[str] = ()) -> bytes:
    if without:
        message, whole = type(message)(), message
        message.CopyFrom(whole)
        for field in without:
            message.ClearField(field)
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


def wait_kinds(waits: Sequence[int]) -> tuple[int, ...]:
    """Return the distinct wait kinds, sorted. Raise InvalidField if one is unknown."""
    if any(wait not in run_pb2.WaitKind.values() or wait == 0 for wait in waits):
        raise InvalidField("waits has an unknown value", field="waits")
    return tuple(sorted(set(waits)))


def _below(end: int, value: int, field: str) -> int:
    if value >= end:
        raise InvalidField(f"{field} must be less than {end}, got {value}", field=field)
    return value


int32: Final = partial(_below, 2**31)
tokens: Final = partial(_below, TOKENS_MAX + 1)


def enum_member(kind: type[E], value: int, field: str) -> E:
    """Return an enum member. Raise InvalidField if the number is unknown."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidField(f"{field} has the unknown value {value}", field=field) from None
