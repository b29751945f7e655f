"""The port of sources: what connects them."""

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
from pawl.tool_registry.rules.definition import ToolVersion, check_definition
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


_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSource:
    """A source with its tools as approved."""

    source: Source
    tools: Sequence[ToolVersion]
    left_out: Sequence[LeftOut] = ()
    """The tools that it has and that cannot be registered; known when it was just asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSource:
    """A source that was asked; `found_hash` is empty if it gave no answer."""

    listed: ListedSource
    changes: Sequence[ToolChange]
    found_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Adds, removes, lists, checks and approves the sources of stores.

    What is approved is what is registered: the definitions and bindings of a
    source's tools. There is no second copy that could differ.
    """

    repository: PostgresSourceRepository
    tools: PostgresToolRepository
    catalog: Catalog
    connectors: Mapping[str, Connector]
    clock: Clock

    async def add(self, source: Source, *, may_replace: bool, roles: Collection[str]) -> ListedSource:
        """Connect a source and register its tools; the same again changes nothing.

        The source is written before its tools: what a crash leaves out, `check` shows.

        Raises:
            PermissionDenied: programs need the role operator and a deployment that allows them, everything else admin.
            InvalidField, InvalidSchema: the configuration, or a tool, cannot be used.
            SourceExists: the name has another configuration and `may_replace` is not set.
            SourceUnreachable: it does not answer, or not as it should.
            ToolExists: something else has the name of one of its tools.
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
        found = await self._answered(source)
        registered = await self.tools.current(source.store_id)
        origins = {source.origin} if before is None else {source.origin, before.origin}
        self._refuse_taken(found.tools, registered, origins)
        await self.repository.put(replace(source, create_time=self.clock.now()))
        if before is not None:
            await self._connector(before).forget(source.store_id, source.name)
        await self._register(source, found.tools, [entry for entry in registered if entry.source in origins])
        _log.info("source.added", store=source.store_id, source=source.name, kind=source.kind, tools=len(found.tools))
        return replace(await self._get(source.store_id, source.name), left_out=found.left_out)

    async def remove(self, store_id: StoreId, name: str, *, roles: Collection[str]) -> None:
        """Take a source and its tools out, the source last, so that what a crash leaves can be removed again.

        Raises:
            SourceNotFound: there is none.
            PermissionDenied: as for `add`.
        """
        listed = await self._get(store_id, name)
        _require_changer(listed.source, roles)
        await self._unregister(store_id, [entry.definition.name for entry in listed.tools])
        await self.repository.remove(store_id, name)
        await self._connector(listed.source).forget(store_id, name)
        _log.info("source.removed", store=store_id, source=name)

    async def list(self, store_id: StoreId) -> Sequence[ListedSource]:
        """Return the sources of a store, by name, as they were when they were last asked."""
        registered = await self.tools.current(store_id)
        return [_with_tools(source, registered) for source in await self.repository.list(store_id)]

    async def check(self, store_id: StoreId, name: str) -> CheckedSource:
        """Ask a source for its tools and say how they differ from the approved ones; its tools stay as they are.

        Raises:
            SourceNotFound: there is none.
        """
        listed = await self._get(store_id, name)
        try:
            found = await self._discover(listed.source)
        except (SourceUnreachable, InvalidSchema, InvalidField, PermissionDenied) as error:
            listed = await self._in_state(listed, SourceState.UNREACHABLE, error.message)
            return CheckedSource(listed=listed, changes=(), found_hash="")
        differences = changes(as_approved(listed.tools), found.tools)
        state, problem = SourceState.READY, ""
        if differences:
            state = SourceState.CHANGED
            problem = f"{len(differences)} tools are not as they were approved: an admin looks at them and approves"
        listed = await self._in_state(listed, state, problem)
        listed = replace(listed, left_out=found.left_out)
        return CheckedSource(listed=listed, changes=differences, found_hash=definitions_hash(found.tools))

    async def approve(self, store_id: StoreId, name: str, found_hash: str, *, roles: Collection[str]) -> ListedSource:
        """Register the tools as their source describes them now, which must be what `found_hash` stands for.

        Raises:
            SourceNotFound: there is none.
            PermissionDenied: as for `add`.
            SourceUnreachable: it does not answer, or not as it should.
            SourceChanged: the definitions are others again.
            InvalidSchema, InvalidField, ToolExists: as for `add`.
        """
        listed = await self._get(store_id, name)
        _require_changer(listed.source, roles)
        source = listed.source
        found = (await self._answered(source)).tools
        if definitions_hash(found) != found_hash:
            raise SourceChanged
        self._refuse_taken(found, await self.tools.current(store_id), {source.origin})
        await self._register(source, found, listed.tools)
        await self.repository.set_state(store_id, name, SourceState.READY, "")
        _log.info("source.approved", store=store_id, source=name, definitions_hash=found_hash)
        return await self._get(store_id, name)

    async def _answered(self, source: Source) -> Discovery:
        """Return what `_discover` does, or say which source it is that does not answer."""
        try:
            return await self._discover(source)
        except SourceUnreachable as error:
            raise SourceUnreachable(f"the source {source.name!r} cannot be used: {error.message}") from None

    async def _discover(self, source: Source) -> Discovery:
        """Return the tools under their policies, each fit to be registered."""
        discovery = await self._connector(source).discover(source)
        found = under_policies(source, discovery.tools)
        if len(found) > TOOLS_MAX:
            raise InvalidField(
                f"{source.name} has {len(found)} tools, the limit is {TOOLS_MAX}: exclude some by policies",
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
            raise InvalidSchema(f"no tool of {source.name} can be used: {left_out[0].name}: {left_out[0].reason}")
        return Discovery(tools=fit, left_out=left_out)

    def _refuse_taken(
        self, found: Sequence[DiscoveredTool], registered: Sequence[ToolVersion], origins: Collection[str]
    ) -> None:
        taken = {entry.definition.name for entry in registered if entry.source not in origins}
        taken.update(self.catalog.loaded_names)
        for tool in found:
            if tool.definition.name in taken:
                raise ToolExists(f"{tool.definition.name!r} is a tool of something else")

    async def _register(self, source: Source, found: Sequence[DiscoveredTool], approved: Sequence[ToolVersion]) -> None:
        for tool in found:
            await self.tools.register(
                source.store_id, tool.definition, replace=True, source=source.origin, binding=tool.binding
            )
        names = {tool.definition.name for tool in found}
        gone = [entry.definition.name for entry in approved if entry.definition.name not in names]
        await self._unregister(source.store_id, gone)

    async def _unregister(self, store_id: StoreId, names: Sequence[str]) -> None:
        for name in names:
            try:
                await self.tools.unregister(store_id, name)
            except ToolNotFound:
                continue  # Somebody else did it meanwhile.

    async def _get(self, store_id: StoreId, name: str) -> ListedSource:
        source = await self.repository.get(store_id, name) if may_be_source(name) else None
        if source is None:
            raise SourceNotFound
        return await self._listed(source)

    async def _listed(self, source: Source) -> ListedSource:
        return _with_tools(source, await self.tools.current(source.store_id))

    async def _in_state(self, listed: ListedSource, state: SourceState, problem: str) -> ListedSource:
        source = listed.source
        await self.repository.set_state(source.store_id, source.name, state, problem)
        return replace(listed, source=replace(source, state=state, problem=problem))

    def _connector(self, source: Source) -> Connector:
        connector = self.connectors.get(source.kind)
        if connector is None:
            raise InvalidField(f"config: sources of the kind {source.kind!r} are not served here", field="config")
        return connector


def _with_tools(source: Source, registered: Sequence[ToolVersion]) -> ListedSource:
    return ListedSource(source=source, tools=[entry for entry in registered if entry.source == source.origin])


def _require_changer(source: Source, roles: Collection[str]) -> None:
    if source.changer not in roles:
        reason = ": the source is a program on the registry's machine" if source.runs_program else ""
        raise PermissionDenied(f"this needs the role {source.changer}{reason}")
