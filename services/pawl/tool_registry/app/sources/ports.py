"""The ports of sources: where they are kept, and what connects them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pawl.chassis.ids import StoreId
from pawl.tool_registry.app.catalog.ports import ToolSource
from pawl.tool_registry.domain.source import Discovery, Source, SourceRecord, SourceState


class Connector(ToolSource, Protocol):
    """One kind of source that stores can add: connects, and runs its tools."""

    async def prepared(self, source: Source) -> Source:
        """Return a source as it is kept: without what it has no use for.

        Raises:
            InvalidField: the configuration cannot be used.
        """

    async def discover(self, source: Source) -> Discovery:
        """Return the tools that a source has now, by name.

        Raises:
            InvalidField, InvalidSchema: the configuration cannot be used.
            SourceUnreachable: it does not answer, or not as it should.
        """

    async def forget(self, store_id: StoreId, name: str) -> None:
        """Close what is open for a source that was removed or changed. Idempotent."""


class SourceRepository(Protocol):
    """The sources of stores, durable. Their tools are in the ToolRepository."""

    async def put(self, record: SourceRecord) -> None:
        """Write a source, in place of one of its name.

        Raises:
            InvalidField: the store has SOURCES_MAX sources.
        """

    async def set_state(self, store_id: StoreId, name: str, state: SourceState, problem: str) -> None:
        """Write where a source stands; one that is gone stays gone."""

    async def get(self, store_id: StoreId, name: str) -> SourceRecord | None:
        """Return a source of a store."""

    async def list(self, store_id: StoreId) -> Sequence[SourceRecord]:
        """Return the sources of a store, by name."""

    async def remove(self, store_id: StoreId, name: str) -> bool:
        """Delete a source; returns whether it was there."""
