"""Implements pawl.tool.v1.SourceService, which manages a store's sources. The store comes from the credential."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pawl.chassis.identity.auth import LOCAL_CREDENTIAL, require_decider, require_user
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidField, PermissionDenied
from pawl.tool.v1 import source_pb2 as pb
from pawl.tool.v1 import source_pb2_grpc
from pawl.tool_registry import convert
from pawl.tool_registry.sources.http.rules.binding import without_values
from pawl.tool_registry.sources.rules import ToolChange, as_approved, definitions_hash
from pawl.tool_registry.sources.source import Source
from pawl.tool_registry.sources.sources import ListedSource, Sources
from pawl.tools import wire

_OWNERS_ONLY: Final = (
    "this deployment may start any program, so only the local key may add one;"
    " to allow others, list programs in PAWL_MCP_PROGRAMS_FILE"
)


class SourceServicer(source_pb2_grpc.SourceServiceServicer):
    """Manages a store's sources. With `is_personal`, only the local key may add programs."""

    def __init__(self, sources: Sources, *, is_personal: bool = False) -> None:
        self._sources = sources
        self._is_personal = is_personal

    async def AddSource(self, request: pb.AddSourceRequest, context: Context) -> pb.AddSourceResponse:
        user = require_decider()
        source = Source(store_id=user.store_id, config=request.config)
        if not source.kind:
            raise InvalidField("config.kind is required", field="config.kind")
        if source.runs_program and self._is_personal and user.credential_id != LOCAL_CREDENTIAL:
            raise PermissionDenied(_OWNERS_ONLY)
        listed = await self._sources.add(
            source, may_replace=request.replace, roles=user.roles, validate_only=request.validate_only
        )
        return pb.AddSourceResponse(source=_source_message(listed, user.roles), left_out=_left_out(listed))

    async def RemoveSource(self, request: pb.RemoveSourceRequest, context: Context) -> pb.RemoveSourceResponse:
        user = require_user()
        await self._sources.remove(user.store_id, request.name, roles=user.roles)
        return pb.RemoveSourceResponse()

    async def ListSources(self, request: pb.ListSourcesRequest, context: Context) -> pb.ListSourcesResponse:
        user = require_user()
        listed = await self._sources.list(user.store_id)
        return pb.ListSourcesResponse(sources=[_source_message(each, user.roles) for each in listed])

    async def CheckSource(self, request: pb.CheckSourceRequest, context: Context) -> pb.CheckSourceResponse:
        user = require_user()
        checked = await self._sources.check(user.store_id, request.name)
        return pb.CheckSourceResponse(
            source=_source_message(checked.listed, user.roles),
            changes=map(_change_message, checked.changes),
            found_hash=checked.found_hash,
            left_out=_left_out(checked.listed),
        )

    async def ApproveSource(self, request: pb.ApproveSourceRequest, context: Context) -> pb.ApproveSourceResponse:
        user = require_decider()
        listed = await self._sources.approve(user.store_id, request.name, request.definitions_hash, roles=user.roles)
        return pb.ApproveSourceResponse(source=_source_message(listed, user.roles))


def _left_out(listed: ListedSource) -> list[pb.LeftOutTool]:
    return [pb.LeftOutTool(name=tool.name, reason=tool.reason) for tool in listed.left_out]


def _source_message(listed: ListedSource, roles: Collection[str]) -> pb.Source:
    source = listed.source
    message = pb.Source(
        config=source.config,
        state=pb.SourceState.Value(f"SOURCE_STATE_{source.state.name}"),
        problem=source.problem,
        definitions_hash=definitions_hash(as_approved(listed.tools)),
        tools=map(convert.tool_message, listed.tools),
    )
    message.create_time.FromMicroseconds(int(source.create_time * 1_000_000))
    if source.changer not in roles:
        hide_values(message.config)
    return message


def hide_values(config: pb.SourceConfig) -> None:
    """Remove the values of headers, environment variables and URL queries, but keep their names."""
    kind = getattr(config, config.WhichOneof("kind") or "", None)
    for field in ("url", "document_url", "base_url"):
        if url := getattr(kind, field, ""):
            setattr(kind, field, without_values(url))
    for field in ("headers", "environment"):
        values = getattr(kind, field, {})
        for name in values:
            values[name] = ""


def _change_message(change: ToolChange) -> pb.SourceChange:
    return pb.SourceChange(
        tool_name=change.tool_name,
        approved=None if change.approved is None else wire.DEFINITION.fields(change.approved),
        found=None if change.found is None else wire.DEFINITION.fields(change.found),
    )
