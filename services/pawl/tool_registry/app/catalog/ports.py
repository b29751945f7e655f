"""The ports of the catalog: where definitions are kept, and what runs the tools of stores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

from pawl.chassis.auth import Principal
from pawl.chassis.ids import StoreId
from pawl.tool_registry.domain.definition import ToolDefinition, ToolVersion
from pawl.tool_registry.domain.registering import SOURCE
from pawl.tool_registry.sdk.tool import Tool

T = TypeVar("T")


class TooCostly(Exception):
    """Something that strangers wrote takes more time or memory to work out than there is for it."""


class Helper(Protocol):
    """Works out what strangers wrote where it holds up nobody else."""

    async def run(self, store_id: StoreId, function: Callable[..., T], *arguments: Any, cpu_seconds: float) -> T:
        """Return what a function of a module returns, or raise what it raises; all of it can be pickled.

        Raises:
            TooCostly: it takes more processor time, or more memory than a helper has.
            Overloaded: too much of the store waits already.
            DependencyUnavailable: no helper can be started now.
        """


class ToolSource(Protocol):
    """Runs the tools of one kind of source, which stores have registered."""

    def tool(self, entry: ToolVersion) -> Tool[..., Any] | None:
        """Return what runs a version; None if its source is not there any more. Quick, and never fails."""


class ToolRepository(Protocol):
    """Definitions and their versions, durable. A version, once given, never changes."""

    async def adopt(self, source: str, definitions: Sequence[ToolDefinition]) -> Sequence[ToolVersion]:
        """Return the version of each loaded definition, in order.

        A definition seen before has the version it had then, in every process;
        another one gets the next version. Atomic, and safe to call from several
        processes at once.
        """

    async def register(
        self,
        store_id: StoreId,
        definition: ToolDefinition,
        *,
        replace: bool,
        source: str,
        binding: bytes = b"",
        registrant: Principal = SOURCE,
    ) -> ToolVersion:
        """Register a store's tool, durably; the same definition again (source and binding too) changes nothing.

        Atomic with the checks of `domain.registering`.

        Raises:
            ToolExists: the name has another definition and `replace` is not set, or is that of another source.
            PermissionDenied: the registrant may not replace the tool, or not by this definition.
            InvalidField: the share of the registrant or of the store is full.
        """

    async def unregister(self, store_id: StoreId, name: str) -> None:
        """Take a store's tool out of the register; its versions stay readable.

        Raises:
            ToolNotFound: there is none.
        """

    async def current(self, store_id: StoreId, names: Collection[str] | None = None) -> Sequence[ToolVersion]:
        """Return the current versions of a store's tools, all or those named, by name."""

    async def version(self, store_id: StoreId, name: str, version: int) -> ToolVersion | None:
        """Return a version, current or not; `store_id` is empty for loaded tools."""
