"""Checks the tools that a worker offers, and registers them in its store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import StoreId, WorkerId
from pawl.errors import InvalidField, PermissionDenied, ToolExists
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool_registry.catalog.catalog import Catalog
from pawl.tool_registry.catalog.store import PostgresToolRepository
from pawl.tool_registry.rules.registering import check_source
from pawl.tool_registry.sources.worker.rules import WorkerKey, source_of
from pawl.tool_registry.sources.worker.store.workers import PostgresWorkerRepository
from pawl.tools import wire
from pawl.tools.rules.definition import (
    ToolDefinition,
    ToolVersion,
    check_definition,
    check_own_name,
    definition_hash,
)
from pawl.values import ExecutionContext


class WorkerTools:
    """Registers workers' tools. A worker's tool must not have the name of a tool that this process has loaded."""

    def __init__(self, repository: PostgresToolRepository, workers: PostgresWorkerRepository, catalog: Catalog) -> None:
        self._repository = repository
        self._workers = workers
        self._catalog = catalog

    async def register(self, caller: Principal, hello: pb.WorkerHello) -> Mapping[str, str]:
        """Register new definitions. Return the hashes of all the worker's definitions by name.

        An older definition does not replace a newer definition of the same group while a live worker has the newer one.

        Raises:
            InvalidField, InvalidSchema: A definition is invalid, or there are too many. Nothing is registered.
            PermissionDenied: The caller is not an admin, and the group belongs to another user, or a definition is
                laxer than its predecessor.
            ToolExists: Another source has a tool with that name. Nothing is registered, unless that source is
                registering it at the same time.
        """
        definitions = [wire.DEFINITION.read(message) for message in hello.tools]
        await self._check(caller.store_id, definitions)
        worker = WorkerKey(caller.store_id, hello.group_name, WorkerId(hello.worker_id))
        registrant = await self._registrant(caller, hello.group_name)
        store_id, source = caller.store_id, source_of(hello.group_name)
        hashes = {definition.name: definition_hash(definition) for definition in definitions}
        current = {entry.definition.name: entry for entry in await self._repository.current(store_id, set(hashes))}
        for entry in current.values():
            check_source(entry, source, registrant)
        own = {name: entry for name, entry in current.items() if entry.source == source}
        for definition in definitions:
            if await self._is_due(worker, own.get(definition.name), hashes[definition.name]):
                await self._repository.register(
                    store_id, definition, replace=True, source=source, registrant=registrant
                )
        return hashes

    async def _registrant(self, caller: Principal, group_name: str) -> Principal:
        owner_id = await self._workers.owner(caller.store_id, group_name, caller.user_id)
        if owner_id != caller.user_id and Role.ADMIN not in caller.roles:
            raise PermissionDenied(
                f"the group {group_name!r} belongs to another user; choose another name or attach as an admin"
            )
        return replace(caller, user_id=owner_id)

    async def _is_due(self, worker: WorkerKey, current: ToolVersion | None, given: str) -> bool:
        if current is None:
            return True
        known = definition_hash(current.definition)
        if known == given:
            return False
        return not await self._workers.has_successor(worker, current.definition.name, given, known)

    async def _check(self, store_id: StoreId, definitions: Collection[ToolDefinition]) -> None:
        if not definitions:
            raise InvalidField("hello.tools must have at least one tool", field="hello.tools")
        loaded = self._catalog.loaded_names
        names = [definition.name for definition in definitions]
        if len(set(names)) != len(names):
            raise InvalidField("hello.tools: names must be unique", field="hello.tools")
        for definition in definitions:
            if definition.context is not ExecutionContext.BACKEND:
                raise InvalidField(f"{definition.name}: context must be BACKEND", field="context")
            check_own_name(definition.name)
            check_definition(definition)
            await self._catalog.check_schema(store_id, definition.arguments_schema)
            if definition.name in loaded:
                raise ToolExists(f"{definition.name!r} is the name of one of the deployment's tools")
