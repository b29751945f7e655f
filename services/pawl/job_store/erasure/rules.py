"""Erasing conversations, whole and for good: what is to be done, and what is left of them."""

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
    """The parts of an erasure. RUNS comes first, then LEDGER; the others have their turn in any order after these."""

    RUNS = "runs"
    """Its runs have to end."""
    LEDGER = "ledger"
    """The ledger removes what it has of it; the ids of its runs and calls stay for the others."""
    TOOL_REGISTRY = "tool-registry"
    NOTIFIER = "notifier"
    STREAM = "stream"
    """The life cycle of its runs on JetStream."""
    LOG = "log"
    """It stands in the list that is applied again to a database that was restored. This waits for nothing."""


OF_SERVICES: Final[Mapping[str, Part]] = MappingProxyType({TOOL_REGISTRY: Part.TOOL_REGISTRY, NOTIFIER: Part.NOTIFIER})
"""The part of each service that calls."""
FIRST: Final = (Part.RUNS, Part.LEDGER)
"""The parts for which those of services wait."""
OWN: Final = tuple(part for part in Part if part not in OF_SERVICES.values())
"""The parts that the job store does itself."""


def part_of(credential_id: str) -> Part:
    """Return the part that a calling service does.

    Raises:
        PermissionDenied: it has none.
    """
    if credential_id not in OF_SERVICES:
        raise PermissionDenied
    return OF_SERVICES[credential_id]


class ErasureKey(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that is being erased, and whose it was."""

    store_id: StoreId
    conversation_id: ConversationId
    user_id: UserId


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that is being erased, with the parts that are still to be done."""

    key: ErasureKey
    erase_time: datetime
    parts: tuple[Part, ...]

    @property
    def next_parts(self) -> tuple[Part, ...]:
        """The parts that may be done now."""
        for first in FIRST:
            if first in self.parts:
                return (first, *(part for part in self.parts if part is Part.LOG))
        return self.parts


def has_left(state: CallState, *, context: int, has_begun: bool) -> bool:
    """Return whether a tool or a client was given what a call is about. Questions, and calls of agents, stay here."""
    ran = has_begun or state in {CallState.SUCCEEDED, CallState.OUTCOME_UNKNOWN}
    return ran and context in {_BACKEND, _FRONT_END}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPart:
    """Some ids of runs and calls of a conversation, the last of them, and whether there are more."""

    run_ids: Sequence[str]
    call_ids: Sequence[str]
    last: tuple[str, str]
    has_more: bool
