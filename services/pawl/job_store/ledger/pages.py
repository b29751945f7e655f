"""Page tokens: where to go on, bound to the method and the filter they were made for."""

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

# What a position may be made of: the seal is no secret, and what no row has must
# not reach the database.
Id: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Small: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Large: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def page_size(asked: int) -> int:
    """Return the rows of a page: 0 means 50.

    Raises:
        InvalidField: over 200.
    """
    if asked > PAGE_MAX:
        raise InvalidField(f"page_size is at most {PAGE_MAX}", field="page_size")
    return asked or PAGE_DEFAULT


def make_token(method: str, selection: tuple[object, ...], position: object) -> str:
    """Return a token for the page after `position` of what `method` lists for `selection`."""
    where = msgspec.msgpack.encode(position)
    return base64.urlsafe_b64encode(_seal(method, selection, where) + where).decode().rstrip("=")


def next_token(method: str, selection: tuple[object, ...], page: Page[R], position_of: Callable[[R], object]) -> str:
    """Return the token of the page after this one; an empty one if it is the last."""
    return make_token(method, selection, position_of(page.rows[-1])) if page.has_more else ""


def read_token(token: str, method: str, selection: tuple[object, ...], position: type[T]) -> T | None:
    """Return the position in a token; None for an empty one.

    Raises:
        InvalidPageToken: it was not made for this method and selection.
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
    """Return what finds tokens that are mixed up or damaged; it is no secret."""
    return hashlib.sha256(msgspec.msgpack.encode([method, selection, where])).digest()[:_SEAL_BYTES]
