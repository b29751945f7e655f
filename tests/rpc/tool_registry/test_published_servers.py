"""Published programs: third-party MCP servers, over stdio and streamable HTTP, and the JavaScript worker (TOOL-3).

JavaScript programs come from the npm registry. Without the registry, their tests are skipped.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from pawl.tool.v1 import source_pb2, tool_pb2
from tests import npm
from tests.poll import until
from tests.rpc.tool_registry.mcp_world import SAFE, McpRegistry, answer, policy
from tests.rpc.tool_registry.registry import Registry, content, outcome, running
from tests.tidy.tree import ROOT

PACKAGE = "@modelcontextprotocol/server-everything@2026.8.31"
INSTALL_SECONDS_MAX = 150

# Packages are downloaded and dozens of programs started.
pytestmark = pytest.mark.long


def stdio(name: str, *command: str | Path, **more: Any) -> source_pb2.SourceConfig:
    return source_pb2.SourceConfig(
        name=name,
        mcp_stdio=source_pb2.McpStdioConfig(command=list(map(str, command)), **more),
        policies=[policy("*", category=SAFE)],
    )


def python(name: str, module: str, *arguments: str | Path) -> source_pb2.SourceConfig:
    return stdio(name, sys.executable, "-m", module, *arguments)


async def test_time_server_returns_the_time(mcp: McpRegistry) -> None:
    source = await mcp.add(python("time", "mcp_server_time"))
    assert [tool.definition.name for tool in source.tools] == ["time.convert_time", "time.get_current_time"]
    arguments = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    assert content(await mcp.run("time.convert_time", arguments))["target"]["datetime"].endswith("T21:00:00+09:00")
    assert outcome(await mcp.run("time.get_current_time", {"timezone": "Mars"}, call="2")) == "FAILED TOOL_ERROR"


async def test_reference_server_returns_content_questions_and_progress(mcp: McpRegistry, tmp_path: Path) -> None:
    npm.add(tmp_path, PACKAGE, timeout_seconds=INSTALL_SECONDS_MAX)
    server = tmp_path / "node_modules/@modelcontextprotocol/server-everything/dist/index.js"
    await mcp.add(stdio("every", npm.NODE, server))
    assert content(await mcp.run("every.echo", {"message": "hi"}, call="1")) == "Echo: hi"
    image = content(await mcp.run("every.get-tiny-image", call="2"))["content"][1]
    assert (image["type"], image["mimeType"], image["bytes"]) == ("image", "image/png", 4033)
    links = content(await mcp.run("every.get-resource-links", call="3"))["content"]
    assert [item["type"] for item in links] == ["text", "resource_link", "resource_link", "resource_link"]
    embedded = content(await mcp.run("every.get-resource-reference", {"resourceType": "Blob"}, call="4"))["content"]
    assert (embedded[1]["type"], embedded[1]["bytes"] > 0) == ("resource", True)
    for call, text, said in (("5", '{"name": "Ann", "integer": 7}', "Ann"), ("6", None, "declined")):
        asked = await mcp.run("every.trigger-elicitation-request", call=call)
        assert outcome(asked) == "INPUT_REQUIRED"
        answered = await mcp.run("every.trigger-elicitation-request", call=call, answers=[answer(asked, text)])
        assert said in str(content(answered))
    steps = {"duration": 1, "steps": 4}
    stream = mcp.registry.stream("every.trigger-long-running-operation", steps, call="7")
    assert max([response.progress.fraction async for response in stream if response.HasField("progress")]) == 1.0
    steps = {"duration": 100, "steps": 100}
    running = asyncio.create_task(mcp.run("every.trigger-long-running-operation", steps, call="8"))
    await until(lambda: mcp.registry.executor.running_count == 1)
    assert (await mcp.registry.cancel("8")).stopped
    assert outcome(await running) == "CANCELLED CANCELLED"


EXAMPLE = ROOT / "docs/examples/node-worker"
NODE_SECONDS_MAX = 120


async def test_javascript_worker_runs_calls_and_drains(database_url: str, tmp_path: Path) -> None:
    npm.install(EXAMPLE, tmp_path / "worker", timeout_seconds=NODE_SECONDS_MAX)
    async with running(database_url, tmp_path) as registry:
        worker = await asyncio.create_subprocess_exec(
            npm.NODE,
            "worker.js",
            cwd=tmp_path / "worker",
            env=npm.environment(
                PAWL_ADDRESS=registry.address, PAWL_API_KEY="key-of-machine-of-acme", PAWL_PROTO=str(ROOT / "proto")
            ),
        )
        try:
            await until(lambda: has_tool(registry, worker))
            assert content(await registry.run("shout", {"text": "hello"})) == {"shouted": "HELLO", "for": "ann"}
            worker.terminate()
            assert await worker.wait() == 0
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


async def has_tool(registry: Registry, worker: asyncio.subprocess.Process) -> bool:
    assert worker.returncode is None
    found = (await registry.ann.ListTools(tool_pb2.ListToolsRequest())).tools
    return "shout" in [entry.definition.name for entry in found]
