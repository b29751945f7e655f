"""MCP servers over HTTP are reached under the egress rules of their store, and not otherwise (TOOL-3)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.egress import GuardedEgress
from pawl.chassis.egress_rules import EgressRules, read_rules
from pawl.tool.v1 import source_pb2
from tests.rpc.tool_registry.mcp_world import SAFE, McpRegistry, failure, mcp_registry, policy
from tests.rpc.tool_registry.registry import content, outcome, reason
from tests.web_server import Asked, Reply, web_server


def config(url: str, name: str = "web") -> source_pb2.SourceConfig:
    return source_pb2.SourceConfig(
        name=name, mcp_http=source_pb2.McpHttpConfig(url=url), policies=[policy("*", category=SAFE)]
    )


@asynccontextmanager
async def guarded(database_url: str, folder: Path, rules: Mapping[str, EgressRules]) -> AsyncIterator[McpRegistry]:
    async with mcp_registry(database_url, folder, egress=GuardedEgress(rules)) as mcp:
        yield mcp


def opening(*ports: int) -> EgressRules:
    return read_rules(None, [f"127.0.0.1:{port}" for port in ports])


def server(asked: Asked) -> Reply:
    """An MCP server with the tool `do`."""
    message: dict[str, Any] = json.loads(asked.body or b"{}")
    info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    results: dict[str, Any] = {
        "initialize": info,
        "tools/list": {"tools": [{"name": "do", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": "done"}]},
    }
    if asked.method != "POST":
        return Reply(status=405)
    if "id" not in message:
        return Reply(status=202)
    result = results.get(message["method"])
    answer = {"result": result} if result else {"error": {"code": -32601, "message": "no such method"}}
    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}).encode()
    return Reply(body, headers={"Content-Type": "application/json"})


async def refused(mcp: McpRegistry, url: str) -> str:
    """Why a server cannot be added."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mcp.add(config(url), who="admin")
    assert reason(caught.value)[1] == "SOURCE_UNREACHABLE"
    return caught.value.details() or ""


async def test_a_private_server_is_refused_in_words_unless_it_is_opened(database_url: str, tmp_path: Path) -> None:
    async with web_server(server) as web:
        url = f"http://127.0.0.1:{web.port}/mcp"
        async with guarded(database_url, tmp_path, {}) as mcp:
            told = await refused(mcp, url)
            assert f"it may not be reached: port {web.port} of 127.0.0.1 may not be reached" in told
            assert "is not an address that may be reached" in await refused(mcp, "http://127.0.0.1/mcp")
        assert web.connections == 0, "nothing was sent, and no connection opened"
        async with guarded(database_url, tmp_path, {"acme": opening(web.port)}) as mcp:
            await mcp.add(config(url), who="admin")
            assert content(await mcp.run("web.do")) == "done"


async def test_what_is_opened_for_a_store_is_open_for_no_other(database_url: str, tmp_path: Path) -> None:
    async with web_server(server) as web, guarded(database_url, tmp_path, {"other": opening(web.port)}) as mcp:
        assert "may not be reached" in await refused(mcp, f"http://127.0.0.1:{web.port}/mcp")
        assert web.connections == 0


async def test_a_call_that_is_refused_never_ran(database_url: str, tmp_path: Path) -> None:
    """The rules have changed since the source was added."""
    async with web_server(server) as web:
        async with guarded(database_url, tmp_path, {"acme": opening(web.port)}) as mcp:
            await mcp.add(config(f"http://127.0.0.1:{web.port}/mcp"), who="admin")
        async with guarded(database_url, tmp_path, {}) as mcp:
            result = await mcp.run("web.do")
            assert outcome(result) == "FAILED TOOL_ERROR"
            assert "may not be reached" in failure(result)
            checked = await mcp.check("web")
            assert checked.source.state == source_pb2.SOURCE_STATE_UNREACHABLE
            assert "may not be reached" in checked.source.problem


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{other}/mcp",
        "http://[::1]:{web}/mcp",
        "http://169.254.169.254/latest/meta-data",
    ],
)
async def test_a_redirect_leads_nowhere_else(database_url: str, tmp_path: Path, location: str) -> None:
    async with web_server(server) as other:

        def elsewhere(_: Asked) -> Reply:
            return Reply(status=307, headers={"Location": location.format(web=web.port, other=other.port)})

        async with (
            web_server(elsewhere) as web,
            guarded(database_url, tmp_path, {"acme": opening(web.port)}) as mcp,
        ):
            assert "the source 'web' cannot be used" in await refused(mcp, f"http://127.0.0.1:{web.port}/mcp")
            assert web.connections > 0
        assert other.connections == 0
