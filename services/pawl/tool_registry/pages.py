"""Pages of lists: their size, and the tokens that say where the next one begins."""

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
    """Return the size of a page for one of which so much is asked, 0 for the default.

    Raises:
        InvalidField: it is more than `most`.
    """
    if asked > most:
        raise InvalidField(f"page_size: at most {most}", field="page_size")
    return asked or default


def cut(found: Sequence[T], size: int, token_of: Callable[[T], str]) -> tuple[Sequence[T], str]:
    """Return a page of what was found, and the token of its last item; no token if nothing comes after it."""
    return found[:size], token_of(found[size - 1]) if len(found) > size else ""


def page_token(kind: str, *place: object) -> str:
    """Return the token of a place in a list of that kind."""
    return base64.urlsafe_b64encode(f"{kind}:".encode() + msgspec.json.encode(place)).decode()


def place_of(kind: str, token: str, form: type[P]) -> P | None:
    """Return the place that a token names; None for the first page.

    Raises:
        InvalidPageToken: it is not of such a list.
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
