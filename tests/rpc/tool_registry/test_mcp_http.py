"""MCP servers over streamable HTTP: the newest protocol, secrets in headers, and servers that mean ill (TOOL-3)."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from pawl.event.v1 import call_pb2
from pawl.launcher.ports import free_port
from pawl.tool.v1 import execution_pb2, source_pb2
from tests.poll import until
from tests.rpc.tool_registry.mcp_world import SAFE, McpRegistry, failure, mcp_registry, policy, refusal
from tests.rpc.tool_registry.registry import content, outcome

FAKE = Path(__file__).parents[2] / "fakes" / "mcp_http_server.py"
Reply = Callable[[dict[str, Any]], tuple[bytes, bytes]]
"""A message to the head (without its length) and the body of the response."""


@pytest.fixture
async def mcp(database_url: str, tmp_path: Path) -> AsyncIterator[McpRegistry]:
    async with mcp_registry(database_url, tmp_path, secrets={"acme": {"token": "s3cret-token"}}) as made:
        yield made


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


def config(url: str, **more: Any) -> source_pb2.SourceConfig:
    http = source_pb2.McpHttpConfig(url=url, **more)
    return source_pb2.SourceConfig(name="web", mcp_http=http, policies=[policy("*", category=SAFE)])


async def test_a_key_in_the_query_is_for_those_who_may_change_the_source(mcp: McpRegistry, url: str) -> None:
    await mcp.add(config(f"{url}?api_key=s3cret"), who="admin")
    for who, seen in (("admin", f"{url}?api_key=s3cret"), ("operator", f"{url}?api_key=")):
        stub = mcp.registry.sources["acme", who]
        (listed,) = (await stub.ListSources(source_pb2.ListSourcesRequest())).sources
        checked = await stub.CheckSource(source_pb2.CheckSourceRequest(name="web"))
        assert listed.config.mcp_http.url == checked.source.config.mcp_http.url == seen


async def test_a_server_of_the_newest_protocol_works(mcp: McpRegistry, url: str) -> None:
    await mcp.add(config(url, secret_headers={"X-Token": "token"}), who="admin")
    assert content(await mcp.run("web.add", {"a": 1, "b": 2}, call="1")) == {"result": 3}
    assert "you sent [secret]" in str(content(await mcp.run("web.whoami", call="2")))


@pytest.mark.parametrize("effect", [call_pb2.EFFECT_CLASS_AT_MOST_ONCE, call_pb2.EFFECT_CLASS_IDEMPOTENT])
async def test_questions_of_the_newest_protocol_belong_to_their_calls(
    mcp: McpRegistry, url: str, effect: call_pb2.EffectClass.ValueType
) -> None:
    added = config(url)
    added.policies[0].effect_class = effect
    await mcp.add(added, who="admin")
    # Side by side, and each is asked.
    first, second = [await mcp.run("web.order", call=call) for call in ("1", "2")]
    assert outcome(first) == outcome(second) == "INPUT_REQUIRED"
    for call, size in (("2", "small"), ("1", "large")):
        answer = execution_pb2.Answer(question=first.question.question, answer=size)
        assert f"ordered {size}" in str(content(await mcp.run("web.order", call=call, answers=[answer])))


async def test_a_change_that_it_announces_stops_the_tool(mcp: McpRegistry, url: str) -> None:
    await mcp.add(config(url), who="admin")
    await mcp.run("web.change", call="0")

    async def is_refused() -> bool:
        result = await mcp.run("web.add", {"a": 1, "b": 2}, call=os.urandom(4).hex())
        return bool(result.result.is_error) and "NOT_ALLOWED" in failure(result)

    await until(is_refused)


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[str]:
    """A server that answers each POST as `reply` says."""

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


def usual(message: dict[str, Any], call: Callable[[], tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Behave, but for calls."""
    match message.get("method"):
        case "initialize":
            version = message["params"]["protocolVersion"]
            info = {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "x", "version": "1"},
            }
            return as_json(message, result=info)
        case "tools/list":
            return as_json(message, result={"tools": [{"name": "do", "inputSchema": {"type": "object"}}]})
        case "tools/call":
            return call()
        case _ if "id" in message:
            return as_json(message, error={"code": -32601, "message": "no such method"})
        case _:
            return b"HTTP/1.1 202 Accepted", b""


HUGE = b'{"jsonrpc": "2.0", "id": 1, "result": {"content": "' + b" " * 5_000_000
BRACKETS = b'{"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "%s"}]}}' % (b"[" * 200_001)
CALLS = {
    "huge": (b"HTTP/1.1 200 OK\r\nContent-Type: application/json", HUGE),
    "bomb": (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip",
        gzip.compress(b" " * 50_000_000),
    ),
    "garbage": (b"HTTP/1.1 200 OK\r\nContent-Type: application/json", b"<html>"),
    "brackets": (b"HTTP/1.1 200 OK\r\nContent-Type: application/json", BRACKETS),
    "event of brackets": (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream", b"data: %s\n\n" % BRACKETS),
    "event": (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream", b"data: " + b"x" * 5_000_000),
    "cut": (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream", b"data: {}\n\n"),
    "elsewhere": (b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:9/stolen", b""),
    "elsewhere with events": (
        b"HTTP/1.1 307 Go\r\nLocation: /other\r\nContent-Type: text/event-stream",
        b"data: x\n\n" * 600_000,
    ),
    "broken": (b"HTTP/1.1 500 Oh", b""),
}


@pytest.mark.parametrize("kind", CALLS)
async def test_an_answer_that_cannot_be_read_is_bounded_and_typed(mcp: McpRegistry, kind: str) -> None:
    async with serving(lambda message: usual(message, lambda: CALLS[kind])) as url:
        await mcp.add(config(url), who="admin")
        unreadable = {"UNKNOWN OUTCOME_UNKNOWN", "FAILED TOOL_ERROR"}
        is_too_large = kind in {"huge", "brackets", "event of brackets", "elsewhere with events"}
        expected = {"FAILED RESULT_TOO_LARGE"} if is_too_large else unreadable
        assert outcome(await mcp.run("web.do")) in expected
        assert (await mcp.check("web")).source.state == source_pb2.SOURCE_STATE_READY


async def test_a_call_of_a_session_that_the_server_forgot_is_made_once_in_another(mcp: McpRegistry) -> None:
    """As servers do that keep sessions in memory, and say so in JSON."""
    called = []
    error = {"code": -32001, "message": "Session not found"}

    def reply(message: dict[str, Any]) -> tuple[bytes, bytes]:
        def call() -> tuple[bytes, bytes]:
            called.append(message)
            if len(called) == 1:
                _, body = as_json(message, error=error)
                return b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json", body
            return as_json(message, result={"content": [{"type": "text", "text": "done"}]})

        head, body = usual(message, call)
        is_first = message.get("method") == "initialize"
        return (head + b"\r\nMcp-Session-Id: one" if is_first else head), body

    async with serving(reply) as url:
        await mcp.add(config(url), who="admin")
        assert content(await mcp.run("web.do")) == "done"
    assert len(called) == 2


@pytest.mark.parametrize("reply", [CALLS["huge"], CALLS["bomb"], CALLS["garbage"], CALLS["broken"], CALLS["elsewhere"]])
async def test_what_is_no_mcp_server_is_unreachable(mcp: McpRegistry, reply: tuple[bytes, bytes]) -> None:
    async with serving(lambda _: reply) as url:
        assert await refusal(mcp.add(config(url), who="admin")) == "SOURCE_UNREACHABLE"


async def test_a_secret_does_not_follow_a_redirect_to_somebody_else(mcp: McpRegistry) -> None:
    heard: list[str] = []

    def thief(message: dict[str, Any]) -> tuple[bytes, bytes]:
        heard.append(message["method"])
        return b"HTTP/1.1 200 OK", b""

    async with serving(thief) as other:
        location = f"HTTP/1.1 307 Go\r\nLocation: {other}".encode()
        async with serving(lambda _: (location, b"")) as url:
            asked = mcp.add(config(url, secret_headers={"X-Token": "token"}), who="admin")
            assert await refusal(asked) == "SOURCE_UNREACHABLE"
    assert heard == []


@pytest.mark.parametrize(
    "http",
    [
        source_pb2.McpHttpConfig(url="ftp://example.com"),
        source_pb2.McpHttpConfig(url="http://user:password@example.com"),
        source_pb2.McpHttpConfig(url="http://"),
        source_pb2.McpHttpConfig(url="https://example.com", headers={"a b": "c"}),
        source_pb2.McpHttpConfig(url="https://example.com", headers={"a": "c\r\nd: e"}),
    ],
)
async def test_an_address_or_header_that_cannot_be_is_refused(mcp: McpRegistry, http: source_pb2.McpHttpConfig) -> None:
    assert await refusal(mcp.add(source_pb2.SourceConfig(name="web", mcp_http=http), who="admin")) == "INVALID_FIELD"
