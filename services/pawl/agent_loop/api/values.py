"""The values between the use cases that serve clients and their ports.

`document` fields hold a thing as the contract words it. The use cases pass them
on and never look inside, so a client sees all that the ledger said, also what
this version knows nothing about.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from pawl.chassis.ids import (
    ClientId,
    SessionId,
)

T = TypeVar("T")


class ClientSession(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a client: it holds offers, and gives back only its own."""

    client_id: ClientId = ClientId("")
    session_id: SessionId = SessionId("")


NOBODY: Final = ClientSession()
"""In place of a session, where something comes without a stream."""


class PageAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The page of a list that is asked for: how much (0 leaves that to the ledger), and the token of the one before."""

    page_size: int
    page_token: str


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A page of a list; the token is empty after the last."""

    items: tuple[T, ...]
    next_page_token: str
