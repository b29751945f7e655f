"""A message as the ledger has it. Names and meanings are those of pawl.event.v1."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pawl.agent_loop.loop.rules.parts import Part
from pawl.chassis.ids import CallId, RunId, UserId


class Role(StrEnum):
    """The authors of messages."""

    USER = "USER"
    ASSISTANT = "ASSISTANT"
    SUMMARY = "SUMMARY"
    NOTICE = "NOTICE"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a conversation. `number` is the ledger's, 0 before."""

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
    imported: bool = False
    """True if it was written elsewhere."""
    parts: tuple[Part, ...] = ()
    """All of a message of the user that has more than a text; `text` is the texts of it."""
    misfit: str = ""
    """The faults of an answer that does not fit the response format of its run; empty for none."""
    model: str = ""
    """The model that was asked for it; empty if it is of nobody, or not known."""
    notices_json: bytes = b""
    """Notices of jobs as the model is given them, a JSON array; empty but for NOTICE."""
    user_id: UserId = UserId("")
    """The user whose it is."""
