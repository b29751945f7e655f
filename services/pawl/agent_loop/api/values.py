"""The clients to which calls are offered."""

from __future__ import annotations

from typing import Final

import msgspec

from pawl.chassis.ids import (
    ClientId,
    SessionId,
)


class ClientSession(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a client: it holds offers, and gives back only its own."""

    client_id: ClientId = ClientId("")
    session_id: SessionId = SessionId("")


NOBODY: Final = ClientSession()
"""In place of a session, where something comes without a stream."""
