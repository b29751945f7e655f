"""The registry as a process: start, kill -9, SIGTERM. I5, OPS-5, TOOL-9, decision 14."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.rpc_client import open_channel
from pawl.tool.v1 import execution_pb2
from pawl.tool.v1.execution_pb2_grpc import ExecutionServiceStub
from tests.keys import ENVIRONMENT, SERVICE_KEY
from tests.poll import until
from tests.rpc.tool_registry.registry import content, context, eventually, outcome
from tests.rpc.tool_registry.world import is_gone
from tests.service import command
from tests.web_server import Reply, pages, web_server

TOOLS = '''
import asyncio
import ctypes
import os
import subprocess
from pathlib import Path
from pawl.tools import Category, ProcessLimits, ToolContext, tool

@tool(category=Category.SAFE, timeout_seconds=60, process=ProcessLimits())
def linger(path: str) -> None:
    """Hold the interpreter for a minute, with a child that hides."""
    hidden = subprocess.Popen(["/bin/sleep", "300"], start_new_session=True)
    Path(path + ".draft").write_text(f"{os.getpid()} {os.getppid()} {hidden.pid}")
    Path(path + ".draft").rename(path)
    ctypes.PyDLL(None).sleep(60)
'''


@asynccontextmanager
async def process(database_url: str, folder: Path, name: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A registry of its own; gives its process and address."""
    address_file = folder / f"{name}.json"
    started = await asyncio.create_subprocess_exec(
        *command("tool_registry", execution_lease_seconds=2.0),
        env=os.environ
        | ENVIRONMENT
        | {
            "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
            "PAWL_DATABASE_URL": database_url,
            "PAWL_DATABASE_UNSAFE": "true",
            "PAWL_LISTEN": "127.0.0.1:0",
            "PAWL_METRICS_LISTEN": "127.0.0.1:0",
            "PAWL_ADDRESS_FILE": str(address_file),
            "PAWL_DATA": str(folder),
            "PAWL_TOOLS": "slow_tools, missing_tools",
        },
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:

        async def listens() -> bool:
            assert started.returncode is None
            return address_file.exists()

        await until(listens)
        yield started, json.loads(address_file.read_text())["grpc"]
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def execute(address: str, tool_name: str, *, store: str = "acme", **fields: Any) -> execution_pb2.ExecutionResult:
    """Run a call; fields that no request has are its arguments."""
    attempts = fields.pop("earlier_attempts", 0)
    request = execution_pb2.ExecuteToolRequest(
        context=context(store=store),
        call_id="call",
        tool_name=tool_name,
        tool_version=1,
        arguments_json=json.dumps(fields).encode(),
        earlier_attempts=attempts,
    )
    async with open_channel(address, service_key=SERVICE_KEY) as channel:
        responses = [response async for response in ExecutionServiceStub(channel).ExecuteTool(request)]
    return responses[-1].result


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    (tmp_path / "slow_tools.py").write_text(TOOLS)
    return tmp_path / "ledger"


def written(path: Path) -> Any:
    async def is_there() -> bool:
        return path.exists()

    return is_there


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux only: elsewhere children that hide are not found")
async def test_a_killed_registry_leaves_nothing_of_a_tool_behind(
    database_url: str, tmp_path: Path, ledger: Path
) -> None:
    """TOOL-9: neither the process of the call, nor its guard, nor what the tool has started."""
    async with process(database_url, tmp_path, "a") as (registry, address):
        asked = asyncio.ensure_future(execute(address, "linger", path=str(ledger)))
        await until(written(ledger))
        started = [int(pid) for pid in ledger.read_text().split()]
        registry.send_signal(signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError):
            await asked

        await eventually(lambda: all(is_gone(pid) for pid in started))


async def test_a_process_lets_each_store_reach_what_the_file_says(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with web_server(pages({"/": Reply(b"hello", headers={"Content-Type": "text/plain"})})) as server:
        path, url = tmp_path / "egress.json", f"http://localhost:{server.port}/"
        path.write_text(json.dumps({"acme": {"private": [f"localhost:{server.port}"]}}))
        monkeypatch.setenv("PAWL_EGRESS_FILE", str(path))
        async with process(database_url, tmp_path, "a") as (_, address):
            assert content(await execute(address, "web_scrape", url=url))["text"] == "hello"
            assert outcome(await execute(address, "web_scrape", url=url, store="other")) == "FAILED TOOL_ERROR"
        assert server.connections == 1
