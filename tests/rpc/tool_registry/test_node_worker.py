"""The worker of docs/examples/node-worker, which shares no code with the product. TOOL-3."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pawl.tool.v1 import tool_pb2
from tests import npm
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, content, running
from tests.tidy.tree import ROOT

EXAMPLE = ROOT / "docs/examples/node-worker"
INSTALL_SECONDS_MAX = 120

# Packages are downloaded.
pytestmark = pytest.mark.long


async def test_javascript_worker_runs_calls_and_drains(database_url: str, tmp_path: Path) -> None:
    npm.install(EXAMPLE, tmp_path / "worker", timeout_seconds=INSTALL_SECONDS_MAX)
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
