"""Messages in the ledger. Names and meanings follow pawl.event.v1."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pawl.agent_loop.loop.rules.parts import Part
from pawl.chassis.ids import CallId, RunId, UserId


class Role(StrEnum):
    USER = "USER"
    ASSISTANT = "ASSISTANT"
    SUMMARY = "SUMMARY"
    NOTICE = "NOTICE"


class Message(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """One entry in a conversation. The ledger assigns `number`, which is 0 until then."""

    role: Role
    run_id: RunId
    text: str = ""
    number: int = 0
    reasoning: str = ""
    provider_state_json: bytes = b""
    call_ids: tuple[CallId, ...] = ()
    interrupted: bool = False
    refusal: str = ""
    first_output_seq: int = 0
    last_output_seq: int = 0
    summarised_to_number: int = 0
    # True if it was written elsewhere and imported.
    imported: bool = False
    # All parts of a user's message, if it contains more than text; `text` has its text parts.
    parts: tuple[Part, ...] = ()
    # The faults in an answer that does not match the response format; empty if there are none.
    misfit: str = ""
    # The model that wrote it; empty if the author is not a model or the model is unknown.
    model: str = ""
    # Job notices for the model, as a JSON array; empty unless the message is a NOTICE.
    notices_json: bytes = b""
    user_id: UserId = UserId("")
