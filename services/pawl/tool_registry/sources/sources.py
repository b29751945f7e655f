"""Adds, checks, approves and removes sources, and defines the Connector protocol."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import (
    InvalidField,
    InvalidSchema,
    PermissionDenied,
    SourceChanged,
    SourceExists,
    SourceNotFound,
    SourceUnreachable,
    ToolExists,
    ToolNotFound,
)
from pawl.tool_registry.catalog.catalog import Catalog
from pawl.tool_registry.catalog.ports import ToolSource
from pawl.tool_registry.catalog.store import PostgresToolRepository
from pawl.tool_registry.sources.rules import (
    TOOLS_MAX,
    DiscoveredTool,
    Discovery,
    LeftOut,
    ToolChange,
    as_approved,
    changes,
    check_source_name,
    definitions_hash,
    may_be_source,
)
from pawl.tool_registry.sources.source import Source, SourceState, check_policies, under_policies
from pawl.tool_registry.sources.store import PostgresSourceRepository
from pawl.tools.rules.definition import ToolVersion, check_definition


class Connector(ToolSource, Protocol):
    """Connects one kind of source, and runs its tools."""

    async def prepared(self, source: Source) -> Source:
        """Return the source in its stored form, without unused parts.

        Raises:
            InvalidField: The configuration is invalid.
        """

    async def discover(self, source: Source) -> Discovery:
        """Return the tools that a source currently has.

        Raises:
            InvalidField, InvalidSchema: The configuration is invalid.
            SourceUnreachable: The source does not answer, or answers incorrectly.
        """

    async def forget(self, store_id: StoreId, name: str) -> None:
        """Close connections to a source that was removed or changed. Idempotent."""


_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSource:
    source: Source
    tools: Sequence[ToolVersion]
    # The tools that cannot be registered. Set only after the source was queried.
    left_out: Sequence[LeftOut] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSource:
    """The result of a check. `found_hash` is empty if the source did not respond."""

    listed: ListedSource
    changes: Sequence[ToolChange]
    found_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Adds, removes, lists, checks and approves stores' sources.

    The definitions and bindings registered for a source's tools are the approved ones, so there is no second copy that
    could differ.
    """

    repository: PostgresSourceRepository
    tools: PostgresToolRepository
    catalog: Catalog
    connectors: Mapping[str, Connector]
    clock: Clock

    async def add(
        self, source: Source, *, may_replace: bool, roles: Collection[str], validate_only: bool = False
    ) -> ListedSource:
        """Connect a source and register its tools. With `validate_only`, nothing is stored. Idempotent.

        The source is written before its tools. If the process crashes between these writes, `check` shows the missing
        tools.

        Raises:
            PermissionDenied: The caller lacks the required role (operator for programs, admin for other sources), or
                the deployment does not allow the program.
            InvalidField, InvalidSchema: The configuration, or a tool, is invalid.
            SourceExists: A source with this name has another configuration, and `may_replace` is not set.
            SourceUnreachable: The source does not answer, or answers incorrectly.
            ToolExists: One of the source's tool names is already taken.
        """
        _require_changer(source, roles)
        check_source_name(source.name)
        source = await self._connector(source).prepared(source)
        check_policies(source.config.policies)
        before = await self.repository.get(source.store_id, source.name)
        if before is not None and before.config == source.config:
            return await self._listed(before)
        if before is not None and not may_replace:
            raise SourceExists
        found = await self._discover_named(source)
        registered = await self.tools.current(source.store_id)
        origins = {source.origin} if before is None else {source.origin, before.origin}
        self._refuse_taken(found.tools, registered, origins)
        if validate_only:
            return ListedSource(source=source, tools=(), left_out=found.left_out)
        await self.repository.put(replace(source, create_time=self.clock.now()))
        if before is not None:
            await self._connector(before).forget(source.store_id, source.name)
        await self._register(source, found.tools, [entry for entry in registered if entry.source in origins])
        _log.info("source.added", store=source.store_id, source=source.name, kind=source.kind, tools=len(found.tools))
        return replace(await self._get(source.store_id, source.name), left_out=found.left_out)

    async def remove(self, store_id: StoreId, name: str, *, roles: Collection[str]) -> None:
        """Remove a source's tools, and then the source. After a crash, the removal can be repeated.

        Raises:
            SourceNotFound: The source does not exist.
            PermissionDenied: See `add`.
        """
        listed = await self._get(store_id, name)
        _require_changer(listed.source, roles)
        await self._unregister(store_id, [entry.definition.name for entry in listed.tools])
        await self.repository.remove(store_id, name)
        await self._connector(listed.source).forget(store_id, name)
        _log.info("source.removed", store=store_id, source=name)

    async def list(self, store_id: StoreId) -> Sequence[ListedSource]:
        """Return a store's sources, sorted by name, as of their last check."""
        registered = await self.tools.current(store_id)
        return [_with_tools(source, registered) for source in await self.repository.list(store_id)]

    async def check(self, store_id: StoreId, name: str) -> CheckedSource:
        """Query a source and compare its tools with the approved ones. Registered tools do not change.

        Raises:
            SourceNotFound: The source does not exist.
        """
        listed = await self._get(store_id, name)
        try:
            found = await self._discover(listed.source)
        except (SourceUnreachable, InvalidSchema, InvalidField, PermissionDenied) as error:
            listed = await self._with_state(listed, SourceState.UNREACHABLE, error.message)
            return CheckedSource(listed=listed, changes=(), found_hash="")
        differences = changes(as_approved(listed.tools), found.tools)
        state, problem = SourceState.READY, ""
        if differences:
            state = SourceState.CHANGED
            problem = (
                f"{len(differences)} tools differ from the approved ones; an admin must review and approve the changes"
            )
        listed = await self._with_state(listed, state, problem)
        listed = replace(listed, left_out=found.left_out)
        return CheckedSource(listed=listed, changes=differences, found_hash=definitions_hash(found.tools))

    async def approve(self, store_id: StoreId, name: str, found_hash: str, *, roles: Collection[str]) -> ListedSource:
        """Register the tools that the source currently describes, which must match `found_hash`.

        Raises:
            SourceNotFound: The source does not exist.
            PermissionDenied: See `add`.
            SourceUnreachable: The source does not answer, or answers incorrectly.
            SourceChanged: The definitions have changed since the check.
            InvalidSchema, InvalidField, ToolExists: See `add`.
        """
        listed = await self._get(store_id, name)
        _require_changer(listed.source, roles)
        source = listed.source
        found = (await self._discover_named(source)).tools
        if definitions_hash(found) != found_hash:
            raise SourceChanged
        self._refuse_taken(found, await self.tools.current(store_id), {source.origin})
        await self._register(source, found, listed.tools)
        await self.repository.set_state(store_id, name, SourceState.READY, "")
        _log.info("source.approved", store=store_id, source=name, definitions_hash=found_hash)
        return await self._get(store_id, name)

    async def _discover_named(self, source: Source) -> Discovery:
        try:
            return await self._discover(source)
        except SourceUnreachable as error:
            raise SourceUnreachable(f"the source {source.name!r} is not usable: {error.message}") from None

    async def _discover(self, source: Source) -> Discovery:
        discovery = await self._connector(source).discover(source)
        found = under_policies(source, discovery.tools)
        if len(found) > TOOLS_MAX:
            raise InvalidField(
                f"policies: {source.name} has {len(found)} tools, over the limit of {TOOLS_MAX}; exclude some",
                field="policies",
            )
        fit: list[DiscoveredTool] = []
        left_out = list(discovery.left_out)
        for tool in found:
            try:
                check_definition(tool.definition)
                await self.catalog.check_schema(source.store_id, tool.definition.arguments_schema)
            except (InvalidSchema, InvalidField) as error:
                left_out.append(LeftOut(name=tool.definition.name, reason=error.message))
            else:
                fit.append(tool)
        if left_out and not fit:
            raise InvalidSchema(f"no tool of {source.name} is usable: {left_out[0].name}: {left_out[0].reason}")
        return Discovery(tools=fit, left_out=left_out)

    def _refuse_taken(
        self, found: Sequence[DiscoveredTool], registered: Sequence[ToolVersion], origins: Collection[str]
    ) -> None:
        taken = {entry.definition.name for entry in registered if entry.source not in origins}
        taken.update(self.catalog.loaded_names)
        for tool in found:
            if tool.definition.name in taken:
                raise ToolExists(f"the tool name {tool.definition.name!r} is already taken")

    async def _register(self, source: Source, found: Sequence[DiscoveredTool], approved: Sequence[ToolVersion]) -> None:
        for tool in found:
            await self.tools.register(
                source.store_id, tool.definition, replace=True, source=source.origin, binding=tool.binding
            )
        names = {tool.definition.name for tool in found}
        removed = [entry.definition.name for entry in approved if entry.definition.name not in names]
        await self._unregister(source.store_id, removed)

    async def _unregister(self, store_id: StoreId, names: Sequence[str]) -> None:
        for name in names:
            try:
                await self.tools.unregister(store_id, name)
            except ToolNotFound:
                continue  # Already unregistered by another caller.

    async def _get(self, store_id: StoreId, name: str) -> ListedSource:
        source = await self.repository.get(store_id, name) if may_be_source(name) else None
        if source is None:
            raise SourceNotFound
        return await self._listed(source)

    async def _listed(self, source: Source) -> ListedSource:
        return _with_tools(source, await self.tools.current(source.store_id))

    async def _with_state(self, listed: ListedSource, state: SourceState, problem: str) -> ListedSource:
        source = listed.source
        await self.repository.set_state(source.store_id, source.name, state, problem)
        return replace(listed, source=replace(source, state=state, problem=problem))

    def _connector(self, source: Source) -> Connector:
        connector = self.connectors.get(source.kind)
        if connector is None:
            raise InvalidField(
                f"config: this deployment does not support sources of kind {source.kind!r}", field="config"
            )
        return connector


def _with_tools(source: Source, registered: Sequence[ToolVersion]) -> ListedSource:
    return ListedSource(source=source, tools=[entry for entry in registered if entry.source == source.origin])


def _require_changer(source: Source, roles: Collection[str]) -> None:
    if source.changer not in roles:
        reason = ", because the source is a program on the registry's machine" if source.runs_program else ""
        raise PermissionDenied(f"this requires the {source.changer} role{reason}")
