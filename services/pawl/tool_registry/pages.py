from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from pawl.errors import InvalidField, InvalidPageToken

T = TypeVar("T")
P = TypeVar("P", bound=tuple[Any, ...])


def page_size(asked: int, *, default: int = 50, most: int = 200) -> int:
    """Return the page size for a request. 0 means the default.

    Raises:
        InvalidField: The requested size is over the maximum.
    """
    if asked > most:
        raise InvalidField(f"page_size must be between 0 and {most}, got {asked}", field="page_size")
    return asked or default


def cut(found: Sequence[T], size: int, token_of: Callable[[T], str]) -> tuple[Sequence[T], str]:
    """Return one page of results, and the token for the next page, which is empty if this is the last page."""
    return found[:size], token_of(found[size - 1]) if len(found) > size else ""


def page_token(kind: str, *place: object) -> str:
    return base64.urlsafe_b64encode(f"{kind}:".encode() + msgspec.json.encode(place)).decode()


def position_of(kind: str, token: str, form: type[P]) -> P | None:
    """Return the position encoded in a page token, or None for the first page.

    Raises:
        InvalidPageToken: The token is malformed or belongs to another kind of list.
    """
    if not token:
        return None
    try:
        found, _, text = base64.b64decode(token.encode(), altchars=b"-_", validate=True).partition(b":")
        place: P = msgspec.json.decode(text, type=form)
    except (binascii.Error, UnicodeError, msgspec.DecodeError):
        raise InvalidPageToken from None
    if found != kind.encode() or any(isinstance(part, str) and "\0" in part for part in place):
        raise InvalidPageToken
    return place
