from __future__ import annotations

from typing import Final

import msgspec

from pawl.chassis.ids import (
    ClientId,
    SessionId,
)


class ClientSession(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a client. A session releases only its own leases."""

    client_id: ClientId = ClientId("")
    session_id: SessionId = SessionId("")


# The session of requests that do not come from a stream.
NO_CLIENT: Final = ClientSession()
