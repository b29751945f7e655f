"""The position of a watcher in a conversation, and its opaque form for clients."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Annotated, Final, Self, TypeAlias

import msgspec

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ConversationId, RunId, is_id
from pawl.errors import InvalidField

_SEAL_BYTES: Final = 8
_CHARACTERS_MAX: Final = 512
# Both PostgreSQL and protobuf support these times, up to the year 9999.
_MICROSECONDS_MAX: Final = 253_402_300_799_000_000

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """The messages, changed runs and run events that a watcher has received so far.

    The watcher has received messages up to `number`, runs that changed up to `microseconds`, and the events of `run_id`
    up to `seq`. `run_id` is empty if no events were sent.
    """

    number: _Number = 0
    microseconds: Annotated[int, msgspec.Meta(ge=0, le=_MICROSECONDS_MAX)] = 0
    run_id: RunId = RunId("")
    seq: _Number = 0

    def encode(self, caller: Principal, conversation_id: ConversationId) -> str:
        return base64.urlsafe_b64encode(_seal(caller, conversation_id) + msgspec.msgpack.encode(self)).decode()

    @classmethod
    def decode(cls, after: str, caller: Principal, conversation_id: ConversationId) -> Self:
        """Return the position. An empty cursor means the start. The position is not authenticated.

        Raises:
            InvalidField: The cursor is malformed, or was made for another user or conversation.
        """
        if not after:
            return cls()
        try:
            if len(after) > _CHARACTERS_MAX:
                raise ValueError
            data = base64.urlsafe_b64decode(after)
            cursor = msgspec.msgpack.decode(data[_SEAL_BYTES:], type=cls)
            if data[:_SEAL_BYTES] != _seal(caller, conversation_id) or not (is_id(cursor.run_id) or not cursor.run_id):
                raise ValueError
        except (binascii.Error, ValueError, msgspec.DecodeError):
            message = f"after must be the cursor that the stream of the conversation {conversation_id} returned"
            raise InvalidField(message, field="after") from None
        return cursor


def _seal(caller: Principal, conversation_id: ConversationId) -> bytes:
    """Return a checksum that detects cursors from other conversations or users. It is not a secret."""
    named = msgspec.msgpack.encode([caller.store_id, caller.user_id, conversation_id])
    return hashlib.sha256(named).digest()[:_SEAL_BYTES]
