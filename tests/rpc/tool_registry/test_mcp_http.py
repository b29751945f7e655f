"""MCP servers over streamable HTTP: the newest protocol, secrets, hostile servers, and egress rules (TOOL-3)."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.launcher.ports import free_port
from pawl.server.egress.client import GuardedEgress
from pawl.server.egress.policy import read_rules
from pawl.tool.v1 import source_pb2
from tests.poll import until
from tests.rpc.tool_registry.mcp_world import SAFE, UNKNOWN, McpRegistry, answer, failure, mcp_registry, policy
from tests.rpc.tool_registry.registry import content, outcome, reason, refusal
from tests.tables import for_each
from tests.web_server import Asked, web_server
from tests.web_server import Reply as WebReply

FAKE = Path(__file__).parents[2] / "fakes" / "mcp_http_server.py"
# Maps a message to the head (without its length) and the body of the response
Reply = Callable[[dict[str, Any]], tuple[bytes, bytes]]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, str(FAKE), str(port))

    async def answers() -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await until(answers)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    await process.wait()


def config(url: str, name: str = "web", **more: Any) -> source_pb2.SourceConfig:
    http = source_pb2.McpHttpConfig(url=url, **more)
    return source_pb2.SourceConfig(name=name, mcp_http=http, policies=[policy("*", category=SAFE)])


async def test_server_with_the_newest_protocol_works(mcp: McpRegistry, url: str) -> None:
    await mcp.add(config(url, secret_headers={"X-Token": "token"}), who="admin")
    assert content(await mcp.run("web.add", {"a": 1, "b": 2}, call="1")) == {"result": 3}
    assert "you sent [secret]" in str(content(await mcp.run("web.whoami", call="2")))
    # The calls run in parallel, and each call gets its own question.
    first, second = [await mcp.run("web.order", call=call) for call in ("3", "4")]
    assert outcome(first) == outcome(second) == "INPUT_REQUIRED"
    for call, size in (("4", "small"), ("3", "large")):
        done = await mcp.run("web.order", call=call, answers=[answer(first, size)])
        assert f"ordered {size}" in str(content(done))


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if not head.startswith(b"post"):
                    writer.write(b"HTTP/1.1 405 No\r\nContent-Length: 0\r\n\r\n")
                    continue
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                first, body = reply(json.loads(await reader.readexactly(length)))
                writer.write(b"%s\r\nContent-Length: %d\r\n\r\n%s" % (first, len(body), body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"


def as_json(message: dict[str, Any], **result: Any) -> tuple[bytes, bytes]:
    answer = {"jsonrpc": "2.0", "id": message.get("id"), **result}
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json", json.dumps(answer).encode()


async def test_missing_key_is_reported(mcp: McpRegistry) -> None:
    async with serving(lambda _: (b"HTTP/1.1 401 Unauthorized", b"")) as url:
        with pytest.raises(grpc.aio.AioRpcError, match=r"status 401.*--secret-header"):
            await mcp.add(config(url), who="admin")


INFO = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
RESULTS: dict[str, Any] = {
    "initialize": INFO,
    "tools/list": {"tools": [{"name": "do", "inputSchema": {"type": "object"}}]},
    "tools/call": {"content": [{"type": "text", "text": "done"}]},
}


def usual(message: dict[str, Any], call: Callable[[], tuple[bytes, bytes]] | None = None) -> tuple[bytes, bytes]:
    method = message.get("method", "")
    if call is not None and method == "tools/call":
        return call()
    if method in RESULTS:
        return as_json(message, result=RESULTS[method])
    if "id" in message:
        return as_json(message, error={"code": -32601, "message": "no such method"})
    return b"HTTP/1.1 202 Accepted", b""


HUGE = b'{"jsonrpc": "2.0", "id": 1, "result": {"content": "' + b" " * 5_000_000
BRACKETS = b'{"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "%s"}]}}' % (b"[" * 200_001)
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream"
CALLS = {
    "huge": (b"HTTP/1.1 200 OK\r\nContent-Type: application/json", HUGE),
    "bomb": (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip",
        gzip.compress(b" " * 50_000_000),
    ),
    "garbage": (b"HTTP/1.1 200 OK\r\nContent-Type: application/json", b"<html>"),
    "event of brackets": (EVENTS, b"data: %s\n\n" % BRACKETS),
    "event": (EVENTS, b"data: " + b"x" * 5_000_000),
    "cut": (EVENTS, b"data: {}\n\n"),
    "elsewhere": (b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:9/stolen", b""),
    "elsewhere with events": (
        b"HTTP/1.1 307 Go\r\nLocation: /other\r\nContent-Type: text/event-stream",
        b"data: x\n\n" * 600_000,
    ),
    "broken": (b"HTTP/1.1 500 Oh", b""),
}


async def test_an_unreadable_answer_becomes_a_bounded_and_typed_error(mcp: McpRegistry) -> None:
    async with serving(lambda message: usual(message, lambda: CALLS[kind])) as url:
        await mcp.add(config(url), who="admin")
        for kind in CALLS:
            is_too_large = kind in {"huge", "event of brackets", "elsewhere with events"}
            expected = {"FAILED RESULT_TOO_LARGE"} if is_too_large else {UNKNOWN, "FAILED TOOL_ERROR"}
            assert outcome(await mcp.run("web.do", call=kind.replace(" ", "_"))) in expected, kind
            assert (await mcp.check("web")).source.state == source_pb2.SOURCE_STATE_READY


async def test_call_is_repeated_once_after_the_server_forgets_its_session(mcp: McpRegistry) -> None:
    """Servers that keep sessions in memory can lose them, and report this in JSON."""
    called = []
    error = {"code": -32001, "message": "Session not found"}

    def reply(message: dict[str, Any]) -> tuple[bytes, bytes]:
        def call() -> tuple[bytes, bytes]:
            called.append(message)
            if len(called) > 1:
                return as_json(message, result=RESULTS["tools/call"])
            return b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json", as_json(message, error=error)[1]

        head, body = usual(message, call)
        return (head + b"\r\nMcp-Session-Id: one" if message.get("method") == "initialize" else head), body

    async with serving(reply) as url:
        await mcp.add(config(url), who="admin")
        assert content(await mcp.run("web.do")) == "done"
    assert len(called) == 2


@for_each(
    "answered",
    [
        {"id": None, "error": {"code": -1, "message": "no"}},
        {"id": 10_000, "result": {}},
        {"method": "notifications/message"},
    ],
)
async def test_unrelated_json_response_is_rejected_without_waiting(mcp: McpRegistry, answered: dict[str, Any]) -> None:
    reply = (b"HTTP/1.1 200 OK\r\nContent-Type: application/json", json.dumps({"jsonrpc": "2.0", **answered}).encode())
    async with serving(lambda _: reply) as url:
        with pytest.raises(grpc.aio.AioRpcError, match="not have the request's id"):
            await mcp.add(config(url), who="admin")


async def test_server_without_mcp_support_is_reported_as_unreachable(mcp: McpRegistry) -> None:
    for kind in ("huge", "bomb", "garbage", "broken", "elsewhere"):
        async with serving(lambda _, kind=kind: CALLS[kind]) as url:  # type: ignore[misc]
            assert await refusal(mcp.add(config(url), who="admin")) == "SOURCE_UNREACHABLE", kind


async def test_invalid_address_or_header_is_rejected(mcp: McpRegistry) -> None:
    for url, headers in (
        ("ftp://example.com", {}),
        ("http://user:password@example.com", {}),
        ("http://", {}),
        ("https://example.com", {"a b": "c"}),
        ("https://example.com", {"a": "c\r\nd: e"}),
    ):
        assert await refusal(mcp.add(config(url, headers=headers), who="admin")) == "INVALID_FIELD", url


def well_behaved(asked: Asked) -> WebReply:
    if asked.method != "POST":
        return WebReply(status=405)
    head, body = usual(json.loads(asked.body or b"{}"))
    return WebReply(body, status=int(head.split()[1]), headers={"Content-Type": "application/json"})


def guarded(database_url: str, folder: Path, *ports: int, store: str = "acme") -> Any:
    rules = {store: read_rules(None, [f"127.0.0.1:{port}" for port in ports])}
    secrets = {"acme": {"token": "s3cret-token"}}
    return mcp_registry(database_url, folder, secrets=secrets, egress=GuardedEgress(rules))


async def unreachable(mcp: McpRegistry, url: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mcp.add(config(url, secret_headers={"X-Token": "token"}), who="admin")
    assert reason(caught.value)[1] == "SOURCE_UNREACHABLE"
    return caught.value.details() or ""


async def test_private_server_is_reached_only_by_its_store(database_url: str, tmp_path: Path) -> None:
    async with web_server(well_behaved) as web:
        url = f"http://127.0.0.1:{web.port}/mcp"
        async with guarded(database_url, tmp_path, web.port, store="other") as mcp:
            await unreachable(mcp, url)
            assert "is not an allowed address" in await unreachable(mcp, "http://127.0.0.1/mcp")
        assert web.connections == 0, "nothing was sent, and no connection opened"
        async with guarded(database_url, tmp_path, web.port) as mcp:
            await mcp.add(config(url), who="admin")
            assert content(await mcp.run("web.do")) == "done"
        async with guarded(database_url, tmp_path) as mcp:  # The rules have changed since the source was added
            result = await mcp.run("web.do", call="closed")
            assert (outcome(result), "is not allowed" in failure(result)) == ("FAILED TOOL_ERROR", True)
            assert (await mcp.check("web")).source.state == source_pb2.SOURCE_STATE_UNREACHABLE


async def test_redirect_is_not_followed(database_url: str, tmp_path: Path) -> None:
    """Otherwise an allowed server could pass on the secret headers to any other."""
    async with web_server(well_behaved) as other, web_server(well_behaved) as web:
        async with guarded(database_url, tmp_path, web.port, other.port) as mcp:
            for location in (
                f"http://127.0.0.1:{other.port}/mcp",
                f"http://[::1]:{web.port}/mcp",
                "http://169.254.169.254/latest/meta-data",
            ):
                web.answer = lambda _, to=location: WebReply(status=307, headers={"Location": to})  # type: ignore[misc]
                await unreachable(mcp, f"http://127.0.0.1:{web.port}/mcp")
        assert web.connections > 0
        assert other.connections == 0
