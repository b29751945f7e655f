"""pawl.tool.v1.ToolService: the register of tools; the store comes from the credential."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import grpc

from pawl.chassis.auth import require_user
from pawl.errors import InvalidField, InvalidPageToken
from pawl.tool.v1 import tool_pb2, tool_pb2_grpc
from pawl.tool_registry.app.catalog.catalog import Catalog
from pawl.tool_registry.domain.definition import Caller
from pawl.tool_registry.rpc import convert

PAGE_SIZE_DEFAULT: Final = 50
PAGE_SIZE_MAX: Final = 200

_PAGE_OF: Final = "tools:"

Context = grpc.aio.ServicerContext[Any, Any]


class ToolServicer(tool_pb2_grpc.ToolServiceServicer):
    """Translates between the wire and the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def RegisterTool(
        self, request: tool_pb2.RegisterToolRequest, context: Context
    ) -> tool_pb2.RegisterToolResponse:
        definition = convert.DEFINITION.read(request.definition)
        entry = await self._catalog.register(_caller(), definition, replace=request.replace)
        return tool_pb2.RegisterToolResponse(tool=convert.tool_message(entry))

    async def UnregisterTool(
        self, request: tool_pb2.UnregisterToolRequest, context: Context
    ) -> tool_pb2.UnregisterToolResponse:
        await self._catalog.unregister(_caller(), request.name)
        return tool_pb2.UnregisterToolResponse()

    async def GetTool(self, request: tool_pb2.GetToolRequest, context: Context) -> tool_pb2.GetToolResponse:
        entry = await self._catalog.get(_caller(), request.name, request.version)
        return tool_pb2.GetToolResponse(tool=convert.tool_message(entry))

    async def ListTools(self, request: tool_pb2.ListToolsRequest, context: Context) -> tool_pb2.ListToolsResponse:
        if request.page_size > PAGE_SIZE_MAX:
            raise InvalidField(f"page_size: at most {PAGE_SIZE_MAX}", field="page_size")
        size = request.page_size or PAGE_SIZE_DEFAULT
        after = _name_of(request.page_token)
        entries = [entry for entry in await self._catalog.visible(_caller()) if entry.definition.name > after]
        page = entries[:size]
        token = _token_after(page[-1].definition.name) if len(entries) > size else ""
        return tool_pb2.ListToolsResponse(tools=map(convert.tool_message, page), next_page_token=token)


def _caller() -> Caller:
    user = require_user()
    return Caller(store_id=user.store_id, user_id=user.user_id, roles=user.roles)


def _token_after(name: str) -> str:
    return base64.urlsafe_b64encode(f"{_PAGE_OF}{name}".encode()).decode()


def _name_of(token: str) -> str:
    if not token:
        return ""
    try:
        text = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise InvalidPageToken from None
    if not text.startswith(_PAGE_OF):
        raise InvalidPageToken
    return text.removeprefix(_PAGE_OF)
