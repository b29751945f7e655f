"""The parts of a conversation's permanent erasure, and the rules for what cannot be erased."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec

from pawl.chassis.identity.roles import NOTIFIER, TOOL_REGISTRY
from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.errors import PermissionDenied
from pawl.values import CallState

_BACKEND: Final = 1
_FRONT_END: Final = 2


class Part(StrEnum):
    """Parts of an erasure. LOG can start immediately.

    Of the others, RUNS is first, LEDGER second, and the rest follow in any order.
    """

    # End the conversation's runs.
    RUNS = "runs"
    # Remove the conversation from the ledger, keeping the ids of its runs and calls for the other parts.
    LEDGER = "ledger"
    TOOL_REGISTRY = "tool-registry"
    NOTIFIER = "notifier"
    # Remove the life-cycle events of its runs from JetStream.
    STREAM = "stream"
    # Add the conversation to the list that is applied again to a restored database.
    LOG = "log"


# The part that each calling service performs.
OF_SERVICES: Final[Mapping[str, Part]] = MappingProxyType({TOOL_REGISTRY: Part.TOOL_REGISTRY, NOTIFIER: Part.NOTIFIER})
# Other parts (except LOG) wait until these are complete.
FIRST: Final = (Part.RUNS, Part.LEDGER)
# Parts that the job store performs itself.
OWN: Final = tuple(part for part in Part if part not in OF_SERVICES.values())


def part_of(credential_id: str) -> Part:
    """Return the part of an erasure that the calling service performs.

    Raises:
        PermissionDenied: The service does not participate in erasures.
    """
    if credential_id not in OF_SERVICES:
        raise PermissionDenied
    return OF_SERVICES[credential_id]


class ErasureKey(msgspec.Struct, frozen=True, kw_only=True):
    store_id: StoreId
    conversation_id: ConversationId
    user_id: UserId


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    key: ErasureKey
    erase_time: datetime
    parts: tuple[Part, ...]

    @property
    def next_parts(self) -> tuple[Part, ...]:
        for first in FIRST:
            if first in self.parts:
                return (first, *(part for part in self.parts if part is Part.LOG))
        return self.parts


def has_left(state: CallState, *, context: int, has_started: bool) -> bool:
    """Return whether a call's data reached a tool or a client. Questions and delegated calls stay inside Pawl."""
    ran = has_started or state in {CallState.SUCCEEDED, CallState.OUTCOME_UNKNOWN}
    return ran and context in {_BACKEND, _FRONT_END}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPart:
    run_ids: Sequence[str]
    call_ids: Sequence[str]
    last: tuple[str, str]
    has_more: bool
