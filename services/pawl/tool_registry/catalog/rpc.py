"""Implements pawl.tool.v1.ToolService. The store comes from the caller's credential."""

from __future__ import annotations

from pawl.chassis.identity.auth import require_user
from pawl.chassis.rpc.kinds import Context
from pawl.tool.v1 import tool_pb2 as pb
from pawl.tool.v1 import tool_pb2_grpc
from pawl.tool_registry import convert
from pawl.tool_registry.catalog.catalog import Catalog
from pawl.tool_registry.pages import cut, page_size, page_token, position_of
from pawl.tools import wire


class ToolServicer(tool_pb2_grpc.ToolServiceServicer):
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def RegisterTool(self, request: pb.RegisterToolRequest, context: Context) -> pb.RegisterToolResponse:
        definition = wire.DEFINITION.read(request.definition)
        entry = await self._catalog.register(require_user(), definition, replace=request.replace)
        return pb.RegisterToolResponse(tool=convert.tool_message(entry))

    async def UnregisterTool(self, request: pb.UnregisterToolRequest, context: Context) -> pb.UnregisterToolResponse:
        await self._catalog.unregister(require_user(), request.name)
        return pb.UnregisterToolResponse()

    async def GetTool(self, request: pb.GetToolRequest, context: Context) -> pb.GetToolResponse:
        entry = await self._catalog.get(require_user(), request.name, request.version)
        return pb.GetToolResponse(tool=convert.tool_message(entry))

    async def ListTools(self, request: pb.ListToolsRequest, context: Context) -> pb.ListToolsResponse:
        size = page_size(request.page_size)
        (after,) = position_of("tools", request.page_token, tuple[str]) or ("",)
        entries = [entry for entry in await self._catalog.visible(require_user()) if entry.definition.name > after]
        page, token = cut(entries, size, lambda entry: page_token("tools", entry.definition.name))
        return pb.ListToolsResponse(tools=map(convert.tool_message, page), next_page_token=token)
