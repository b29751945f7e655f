"""Finds tools: those loaded by this process, and those registered in each store."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import jsonschema_rs
import msgspec

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.process import logs
from pawl.chassis.strict_json import dumps_canonical
from pawl.errors import InvalidField, InvalidSchema, PermissionDenied, ToolExists, ToolNotFound
from pawl.tool_registry.catalog.ports import Helper, TooCostly, ToolSource
from pawl.tool_registry.catalog.store import PostgresToolRepository
from pawl.tool_registry.rules.check import (
    Accepted,
    Refused,
    check_arguments,
    check_untrusted,
    fits_newest,
    is_quick,
    refused,
    schema_problem,
)
from pawl.tool_registry.rules.registering import (
    FRONT_END,
    SOURCE,
    WORKER,
    WORKFLOW,
    check_not_shadowing,
    check_own,
    check_owner,
    check_source,
    own_version,
)
from pawl.tools.rules.definition import (
    ToolDefinition,
    ToolVersion,
    check_definition,
    check_own_name,
    definition_hash,
    is_restricted,
)
from pawl.tools.rules.schema import check_output, compile_schema, did_you_mean, output_schema_problem, weigh
from pawl.tools.sdk.tool import Tool
from pawl.values import ExecutionContext, OfferFallback

_KEPT_VERSIONS_MAX: Final = 2000
# Limit on the total `ArgumentsSchema.size` of cached versions. Compiled validators need about thirty times this size.
_KEPT_BYTES_MAX: Final = 8 * 1024 * 1024
_WEIGHT_BYTES: Final = 20
_CHECK_CPU_SECONDS: Final = 1.0
# Half of a check's limit, so that a check can always recompile a registered schema.
_COMPILE_CPU_SECONDS: Final = 0.5
# Store id of loaded tools.
_EVERY_STORE: Final = StoreId("")

T = TypeVar("T")

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsSchema:
    # Canonical JSON.
    packed: bytes
    # See `schema.weigh`.
    weight: float
    recursion: bool
    # None if the schema is too expensive to use outside a helper process.
    validator: jsonschema_rs.Draft202012Validator | None

    @property
    def size(self) -> int:
        """The estimated size in the cache, in bytes.

        The size includes the pattern's weight, because a compiled pattern may need a lot of memory.
        """
        return len(self.packed) + (int(_WEIGHT_BYTES * self.weight) if self.validator else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogTool:
    """A tool version with its schema and, if this process can run it, its runner."""

    entry: ToolVersion
    schema: ArgumentsSchema
    loaded: LoadedTool | None = None
    # The store's current version. None if the tool was unregistered.
    in_force: ToolVersion | None = None

    @property
    def definition(self) -> ToolDefinition:
        return self.entry.definition

    def may_be_called_by(self, user_id: UserId, roles: frozenset[str]) -> bool:
        """Return whether both the pinned and the current definition allow the caller."""
        return all(definition.may_be_called_by(user_id, roles) for definition in self.definitions)

    @property
    def definitions(self) -> list[ToolDefinition]:
        """The pinned definition and, if the tool still exists with a different definition, its current definition."""
        if self.in_force is None or self.in_force is self.entry:
            return [self.definition]
        return [self.definition, self.in_force.definition]

    @property
    def is_available(self) -> bool:
        """True if calls can be executed. Front-end, user and workflow tools need no runner in this process."""
        if self.loaded is not None or self.definition.context in {ExecutionContext.FRONTEND, ExecutionContext.HUMAN}:
            return True
        return self.in_force is not None and self.in_force.source == WORKFLOW

    @property
    def newest_schema(self) -> ArgumentsSchema | None:
        """The schema of the version that this process would run.

        None if that is the pinned version, or if this process has no runner for the tool.
        """
        if self.loaded is None or self.loaded.entry.version == self.entry.version:
            return None
        return self.loaded.schema


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTool:
    """The newest version of a tool that this process can run: a function, or a tool from one of the store's sources."""

    tool: Tool[..., Any]
    entry: ToolVersion
    schema: ArgumentsSchema


class Catalog:
    """The tools of this process and of all stores.

    A loaded tool takes precedence over a store's tool with the same name. A conflict is possible only if the store
    registered the name before the tool was loaded.
    """

    def __init__(self, repository: PostgresToolRepository, sources: Mapping[str, ToolSource], helper: Helper) -> None:
        self._repository = repository
        self._helper = helper
        self._sources = sources
        self._loaded: dict[str, LoadedTool] = {}
        self._versions: OrderedDict[tuple[str, str, int], CatalogTool] = OrderedDict()
        self._kept_bytes = 0

    async def load(self, source: str, tools: Iterable[Tool[..., Any]]) -> None:
        """Load this process's tools. Log and skip a tool whose name is already taken."""
        new: dict[str, Tool[..., Any]] = {}
        for tool in tools:
            if tool.name in self._loaded or tool.name in new:
                _log.error("tool.name_taken", tool=tool.name, source=source)
            else:
                new[tool.name] = tool
        entries = await self._repository.adopt(source, [tool.definition for tool in new.values()])
        for tool, entry in zip(new.values(), entries, strict=True):
            self._loaded[tool.name] = LoadedTool(tool=tool, entry=entry, schema=_schema(entry))
        if new:
            _log.info("tool.loaded", source=source, tools=sorted(new))

    def forget(self, prefix: str) -> None:
        """Unload this process's tools whose source names start with `prefix`."""
        remaining = {name: each for name, each in self._loaded.items() if not each.entry.source.startswith(prefix)}
        if len(remaining) < len(self._loaded):
            self._loaded = remaining
            # They may refer to the forgotten tools.
            self._versions.clear()
            self._kept_bytes = 0

    @property
    def loaded_names(self) -> list[str]:
        return sorted(self._loaded)

    async def visible(self, caller: Principal) -> list[ToolVersion]:
        """Return the current versions of all tools that the caller may call, sorted by name."""
        entries = await self._entries(caller.store_id)
        return [entry for _, entry in sorted(entries.items()) if _is_for(entry, caller)]

    async def get(self, caller: Principal, name: str, version: int) -> ToolVersion:
        """Return a version of a tool. Version 0 is the current one.

        Raises:
            ToolNotFound: The version does not exist, or the caller may not call it.
        """
        store_id = caller.store_id
        entry = await self._current(store_id, name) if version == 0 else await self._entry(store_id, name, version)
        if entry is None or not _is_for(entry, caller):
            raise ToolNotFound(tool_name=name)
        return entry

    async def current_version(self, store_id: StoreId, name: str) -> int:
        """Return the current version of a tool, or 0 if it does not exist."""
        entry = await self._current(store_id, name)
        return entry.version if entry else 0

    async def find(self, store_id: StoreId, name: str, version: int) -> CatalogTool | None:
        """Return a version with its compiled schema and its runner, if this process has one.

        Return None if it does not exist.
        """
        loaded = self._loaded.get(name)
        if loaded is not None and loaded.entry.version == version:
            return CatalogTool(entry=loaded.entry, schema=loaded.schema, loaded=loaded, in_force=loaded.entry)
        owner = "" if loaded is not None else store_id
        key = (owner, name, version)
        found = self._versions.get(key)
        if found is None:
            entry = await self._entry(store_id, name, version)
            if entry is None:
                return None
            found = self._compiled(key, entry, loaded)
        self._versions.move_to_end(key)
        found = replace(found, in_force=await self._current(store_id, name))
        source = self._sources.get(found.entry.source_kind)
        return found if source is None else self._with_source(found, source)

    def _with_source(self, found: CatalogTool, source: ToolSource) -> CatalogTool:
        entry, current = found.entry, found.in_force
        if current is None or current.source != entry.source:
            return found
        tool = source.tool(current)
        if tool is None:
            return found
        key = (entry.store_id, entry.definition.name, current.version)
        newest = self._versions.get(key) or self._compiled(key, current, None)
        return replace(found, loaded=LoadedTool(tool=tool, entry=current, schema=newest.schema))

    async def check(self, store_id: StoreId, found: CatalogTool, raw: bytes) -> Accepted | Refused:
        """Return the canonical arguments if the version that would run accepts them. Otherwise, return the violations.

        Cheap checks run in this process. All others run in a helper process, which limits their cost.

        Raises:
            Overloaded: The store has too many checks queued.
        """
        schema, newest = found.schema, found.newest_schema
        name = found.definition.name
        weight = schema.weight + (newest.weight if newest else 0.0)
        if schema.validator is not None and is_quick(weight, raw):
            checked = check_arguments(found.definition, schema.validator, raw)
            if isinstance(checked, Refused) or newest is None or newest.validator is None:
                return checked
            return fits_newest(name, newest.validator, checked)
        check = functools.partial(check_untrusted, recursion=schema.recursion)
        packed = newest.packed if newest else None
        try:
            answer = await self._helper.run(
                store_id, check, name, schema.packed, raw, packed, cpu_seconds=_CHECK_CPU_SECONDS
            )
        except TooCostly:
            return refused(name, "take too long to check against its schema: send fewer or smaller ones")
        if isinstance(answer, Refused):
            return answer
        canonical, note = answer
        return Accepted(arguments=msgspec.json.decode(canonical), canonical=canonical, note=note)

    async def check_schema(self, store_id: StoreId, schema: Mapping[str, Any]) -> None:
        """Check that a store may register a tool with this arguments schema.

        Raises:
            InvalidSchema: The schema is unusable. The message contains the position and the cause.
        """
        await self._check_usable(store_id, schema_problem, schema, "the arguments schema")

    async def check_output_schema(self, store_id: StoreId, schema_json: bytes) -> None:
        """Check that a run may use this schema for its structured output.

        Raises:
            InvalidSchema: The schema is unusable. The message contains the position and the cause.
            Overloaded: The store has too many checks queued.
        """
        await self._check_usable(store_id, output_schema_problem, schema_json, "the schema")

    async def _check_usable(self, store_id: StoreId, problem_of: Callable[[T], str], schema: T, name: str) -> None:
        try:
            problem = await self._helper.run(store_id, problem_of, schema, cpu_seconds=_COMPILE_CPU_SECONDS)
        except TooCostly:
            problem = f"{name} takes too long to compile"
        if problem:
            raise InvalidSchema(problem)

    async def check_output(self, store_id: StoreId, schema_json: bytes, output: bytes) -> tuple[bytes, list[str]]:
        """Return an answer's canonical JSON if it matches the schema. Otherwise, return the violations.

        Raises:
            Overloaded: The store has too many checks queued.
        """
        try:
            return await self._helper.run(store_id, check_output, schema_json, output, cpu_seconds=_CHECK_CPU_SECONDS)
        except TooCostly:
            return b"", ["the answer takes too long to check against its schema: return a shorter one"]

    def _compiled(self, key: tuple[str, str, int], entry: ToolVersion, loaded: LoadedTool | None) -> CatalogTool:
        made = CatalogTool(entry=entry, schema=_schema(entry), loaded=loaded)
        earlier = self._versions.pop(key, None)
        self._kept_bytes += made.schema.size - (earlier.schema.size if earlier else 0)
        self._versions[key] = made
        while self._kept_bytes > _KEPT_BYTES_MAX or len(self._versions) > _KEPT_VERSIONS_MAX:
            _, oldest = self._versions.popitem(last=False)
            self._kept_bytes -= oldest.schema.size
        return made

    async def resolve(
        self, caller: Principal, names: Sequence[str], pinned: Mapping[str, int], *, skip_missing: bool = False
    ) -> list[ToolVersion]:
        """Return the tools in `names`, sorted by name. If `names` is empty, return all tools.

        For a tool in `pinned`, return the pinned version. With `skip_missing`, omit tools that do not exist or that the
        caller may not call.

        Raises:
            ToolNotFound: A pinned version does not exist or, without `skip_missing`, a tool in `names` does not exist
                or may not be called by the caller.
        """
        store_id = caller.store_id
        if names:
            entries = await self._entries(store_id, set(names))
            found = {name: entries[name] for name in names if name in entries}
        else:
            found = {entry.definition.name: entry for entry in await self.visible(caller)}
        for name, version in pinned.items():
            if name not in names and names:
                continue
            entry = await self._entry(store_id, name, version)
            if entry is None:
                raise ToolNotFound(f"tool {name!r} has no version {version}", tool_name=name)
            found[name] = entry
        for name in () if skip_missing else names:
            if name not in found or not _is_for(found[name], caller):
                near = did_you_mean(name, [entry.definition.name for entry in await self.visible(caller)])
                raise ToolNotFound(f"there is no tool {name!r}{near}", tool_name=name)
        return [found[name] for name in sorted(found) if _is_for(found[name], caller)]

    async def register(self, caller: Principal, definition: ToolDefinition, *, replace: bool) -> ToolVersion:
        """Register a front-end tool in the caller's store.

        Raises:
            InvalidField, InvalidSchema: The definition is invalid.
            ToolExists: A loaded tool has this name, or another definition has this name and `replace` is not set.
            PermissionDenied: The caller is not an admin and would replace another user's tool or relax a definition.
        """
        await self._check_front_end(caller.store_id, definition)
        return await self._repository.register(
            caller.store_id, definition, replace=replace, source=FRONT_END, registrant=caller
        )

    async def check_own(self, caller: Principal, definitions: Sequence[ToolDefinition]) -> list[str]:
        """Validate the front-end tools that a caller sends with a run. Return their digests. Nothing is stored.

        Raises:
            InvalidField, InvalidSchema: A definition is invalid.
            ToolExists: A name belongs to another tool that the caller may call.
        """
        check_own(definitions)
        for definition in definitions:
            await self._check_front_end(caller.store_id, definition)
        check_not_shadowing(definitions, await self.visible(caller))
        return [definition_hash(definition) for definition in definitions]

    async def put_workflow(
        self, store_id: StoreId, name: str, definition: ToolDefinition | None, *, validate_only: bool
    ) -> None:
        """Register a workflow as a tool of its store. If `definition` is None, remove this tool.

        Raises:
            InvalidField, InvalidSchema: The definition is invalid.
            ToolExists: The name belongs to another tool.
        """
        current = await self._current(store_id, name)
        if definition is None:
            if current is not None and current.source == WORKFLOW and not validate_only:
                await self._repository.unregister(store_id, name)
            return
        check_definition(definition)
        await self.check_schema(store_id, definition.arguments_schema)
        if current is not None:
            check_source(current, WORKFLOW, SOURCE)
        if not validate_only:
            await self._repository.register(store_id, definition, replace=True, source=WORKFLOW)

    def own(self, store_id: StoreId, definition: ToolDefinition) -> CatalogTool:
        """Return the tool for a definition that was sent with a run, and validated when the run started."""
        # Registered names never start with "@", so the keys cannot collide.
        key = (store_id, f"@{definition_hash(definition)}", 1)
        found = self._versions.get(key) or self._compiled(key, own_version(store_id, definition), None)
        self._versions.move_to_end(key)
        return found

    async def _check_front_end(self, store_id: StoreId, definition: ToolDefinition) -> None:
        if definition.context is not ExecutionContext.FRONTEND:
            raise InvalidField("context: only FRONTEND tools can be registered here", field="context")
        check_own_name(definition.name)
        check_definition(definition)
        await self.check_schema(store_id, definition.arguments_schema)
        if definition.offer_fallback is OfferFallback.BACKEND_TOOL:
            fallback = self._loaded.get(definition.fallback_tool_name)
            if fallback is None or fallback.tool.definition.context is not ExecutionContext.BACKEND:
                raise InvalidField("fallback_tool_name must be a backend tool", field="fallback_tool_name")
        if definition.name in self._loaded:
            raise ToolExists(f"{definition.name!r} is one of the deployment's tools and cannot be replaced")

    async def unregister(self, caller: Principal, name: str) -> None:
        """Unregister one of the store's front-end tools.

        Callers who may attach workers can also unregister worker tools.

        Raises:
            ToolNotFound: The store has no such tool, the tool belongs to a source or to the deployment, or it is a
                worker tool and the caller may not attach workers.
            PermissionDenied: The caller is not an admin, and the tool is restricted or belongs to another user.
        """
        if name in self._loaded:
            raise ToolNotFound("the deployment's tools cannot be unregistered", tool_name=name)
        current = await self._current(caller.store_id, name)
        if current is not None and current.source_kind == WORKER:
            if caller.roles.isdisjoint({Role.ADMIN, Role.WORKER}):
                raise ToolNotFound(
                    f"unregistering tools of {current.source} requires the worker or admin role", tool_name=name
                )
            check_owner(current, caller)
        elif current is not None and current.source == FRONT_END:
            check_owner(current, caller)
            if is_restricted(current.definition) and Role.ADMIN not in caller.roles:
                raise PermissionDenied("unregistering a restricted tool requires the admin role")
        elif current is not None:
            raise ToolNotFound(
                f"tools of {current.source} cannot be unregistered on their own: remove the source", tool_name=name
            )
        await self._repository.unregister(caller.store_id, name)

    async def _entries(self, store_id: StoreId, names: Collection[str] | None = None) -> dict[str, ToolVersion]:
        asked = None if names is None else set(names) - self._loaded.keys()
        entries = () if asked is not None and not asked else await self._repository.current(store_id, asked)
        stored = {entry.definition.name: entry for entry in entries}
        return stored | {name: loaded.entry for name, loaded in self._loaded.items()}

    async def _current(self, store_id: StoreId, name: str) -> ToolVersion | None:
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded.entry
        return next(iter(await self._repository.current(store_id, {name})), None)

    async def _entry(self, store_id: StoreId, name: str, version: int) -> ToolVersion | None:
        loaded = self._loaded.get(name)
        if loaded is not None and loaded.entry.version == version:
            return loaded.entry
        # A run can outlive its tools: a tool that was once loaded is still known, even if this process cannot run it.
        found = await self._repository.version(store_id, name, version) if loaded is None else None
        return found or await self._repository.version(_EVERY_STORE, name, version)


def _is_for(entry: ToolVersion, caller: Principal) -> bool:
    return entry.definition.may_be_called_by(caller.user_id, caller.roles)


def _schema(entry: ToolVersion) -> ArgumentsSchema:
    schema = entry.definition.arguments_schema
    weight = weigh(schema)
    # Only the deployment's trusted code may use recursive schemas.
    recursion = not entry.store_id
    return ArgumentsSchema(
        packed=dumps_canonical(dict(schema)),
        weight=weight,
        recursion=recursion,
        validator=compile_schema(schema, recursion=recursion) if is_quick(weight, b"") else None,
    )
