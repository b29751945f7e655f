"""The port of sources: what connects them."""

from __future__ import annotations

from typing import Protocol

from pawl.chassis.ids import StoreId
from pawl.tool_registry.catalog.ports import ToolSource
from pawl.tool_registry.sources.rules import Discovery, Source


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
