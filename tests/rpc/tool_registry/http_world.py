"""A service over HTTP with some answers, and a connector that may reach it."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from pawl.chassis.egress import GuardedEgress
from pawl.chassis.egress_rules import read_rules
from pawl.chassis.ids import StoreId
from pawl.tool_registry.adapters.http.tools import KIND, HttpTools
from pawl.tool_registry.adapters.process.helpers import Helpers
from pawl.tool_registry.domain.definition import RESULT_BYTES_MAX, ToolVersion
from pawl.tool_registry.domain.openapi_document import DOCUMENT_BYTES_MAX
from pawl.tool_registry.domain.source import DiscoveredTool, Source
from pawl.tools import Tool, ToolContext
from tests.web_server import Reply, WebServer, pages, web_server

SECRETS = {"token": "Bearer 0123456789abcdef", "broken": "0123456789\r\nX-Other: 1"}
JSON = {"Content-Type": "application/json"}
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "q": {"type": "string"}, "items": {"type": "array"}},
    "required": ["id"],
}


def document(port: int, **operations: Any) -> dict[str, Any]:
    """A document whose operations are all GET, at the path of their name."""
    return {
        "openapi": "3.1.0",
        "servers": [{"url": f"http://127.0.0.1:{port}"}],
        "paths": {f"/{name}": {method: {"operationId": name}} for name, method in operations.items()},
    }


@dataclass
class World:
    """A service, and a connector that may reach it."""

    server: WebServer
    connector: HttpTools
    helpers: Helpers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def discover(self, config: dict[str, Any], *, store: str = "acme") -> list[DiscoveredTool]:
        source = Source(store_id=StoreId(store), name="shop", kind=KIND, config=json.dumps(config).encode())
        return list((await self.connector.discover(source)).tools)

    async def endpoint(self, path: str, method: str = "GET", **changes: Any) -> DiscoveredTool:
        fields = {
            "url": self.url + path,
            "method": method,
            "description": "Do.",
            "argumentsSchemaJson": encoded(SCHEMA),
        }
        (tool,) = await self.discover({"httpEndpoint": fields | changes})
        return tool

    def tool(self, discovered: DiscoveredTool, **changes: Any) -> Tool[..., Any]:
        """What the executor would be given."""
        entry = ToolVersion(
            store_id=StoreId("acme"),
            definition=replace(discovered.definition, **changes),
            version=1,
            source=f"{KIND}:shop",
            create_time=0,
            binding=discovered.binding,
        )
        tool = self.connector.tool(entry)
        assert tool is not None
        return tool

    async def call(self, discovered: DiscoveredTool, arguments: Any = None, *, store: str = "acme", **more: Any) -> Any:
        context = ToolContext(store_id=store, call_id="call", _find_secret=SECRETS.__getitem__)
        return await self.tool(discovered, **more)(arguments=arguments or {"id": "1"}, context=context)


def encoded(value: Any) -> str:
    return base64.b64encode(value if isinstance(value, bytes) else json.dumps(value).encode()).decode()


@asynccontextmanager
async def http_world() -> AsyncIterator[World]:
    """A service with some answers; only the store acme may reach it."""
    replies = {
        "/json": Reply(b'{"a": [1, 2.5, null]}', headers=JSON),
        "/text": Reply("naïve".encode(), headers={"Content-Type": "text/plain"}),
        "/not-json": Reply(b'{"a": NaN}', headers=JSON),
        "/none": Reply(status=204),
        "/image": Reply(b"\x89PNG", headers={"Content-Type": "image/png"}),
        "/large": Reply(b"a" * (RESULT_BYTES_MAX + 1), headers={"Content-Type": "text/plain"}),
        "/huge": Reply(b"a" * (DOCUMENT_BYTES_MAX + 1), headers=JSON),
        "/refuses": Reply(b"no such order " + b"x" * 5000, status=422),
        "/fails": Reply(status=500),
        "/moved": Reply(status=302, headers={"Location": "/json"}),
        "/inside": Reply(status=302, headers={"Location": "http://169.254.169.254/"}),
        "/breaks": Reply(breaks=True),
        "/page": Reply(b"<html>"),
    }
    async with web_server(pages(replies)) as server:
        rules = {"acme": read_rules(None, [f"127.0.0.1:{server.port}"])}
        egress = GuardedEgress(rules, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        async with Helpers() as helpers:
            yield World(server, HttpTools(egress, helpers), helpers)
