"""A message as the ledger has it. Names and meanings are those of pawl.event.v1."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pawl.chassis.ids import CallId, RunId


class Role(StrEnum):
    """The authors of messages."""

    USER = "USER"
    ASSISTANT = "ASSISTANT"
    SUMMARY = "SUMMARY"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a conversation. `message_id` and `number` are the ledger's, empty before."""

    role: Role
    run_id: RunId
    text: str = ""
    message_id: str = ""
    number: int = 0
    reasoning: str = ""
    provider_state_json: bytes = b""
    call_ids: tuple[CallId, ...] = ()
    interrupted: bool = False
    refusal: str = ""
    first_output_seq: int = 0
    last_output_seq: int = 0
    summarised_to_number: int = 0
