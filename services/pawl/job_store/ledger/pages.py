"""Page tokens, which encode a position in a list. A token is bound to the list's method and filter."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from pawl.errors import InvalidField, InvalidPageToken
from pawl.job_store.ledger.reading import Page

R = TypeVar("R")
T = TypeVar("T")

PAGE_DEFAULT: Final = 50
PAGE_MAX: Final = 200
_SEAL_BYTES: Final = 8

# Types of positions. The seal is not a secret, so a position is validated before it reaches the database.
Id: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Small: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Large: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def page_size(requested: int) -> int:
    """Return the number of rows per page. 0 means 50.

    Raises:
        InvalidField: The size is over 200.
    """
    if requested > PAGE_MAX:
        raise InvalidField(f"page_size must be at most {PAGE_MAX}, got {requested}", field="page_size")
    return requested or PAGE_DEFAULT


def make_token(method: str, selection: tuple[object, ...], position: object) -> str:
    where = msgspec.msgpack.encode(position)
    return base64.urlsafe_b64encode(_seal(method, selection, where) + where).decode().rstrip("=")


def next_token(method: str, selection: tuple[object, ...], page: Page[R], position_of: Callable[[R], object]) -> str:
    """Return the token of the next page, or an empty token after the last page."""
    return make_token(method, selection, position_of(page.rows[-1])) if page.has_more else ""


def read_token(token: str, method: str, selection: tuple[object, ...], position: type[T]) -> T | None:
    """Return the position in the token, or None for an empty token.

    Raises:
        InvalidPageToken: The token was made for another method or filter, or is malformed.
    """
    if not token:
        return None
    try:
        data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        where = data[_SEAL_BYTES:]
        if data[:_SEAL_BYTES] != _seal(method, selection, where):
            raise InvalidPageToken
        return msgspec.msgpack.decode(where, type=position)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise InvalidPageToken from None


def _seal(method: str, selection: tuple[object, ...], where: bytes) -> bytes:
    """Return a checksum that detects damaged tokens and tokens from other lists. It is not a secret."""
    return hashlib.sha256(msgspec.msgpack.encode([method, selection, where])).digest()[:_SEAL_BYTES]
