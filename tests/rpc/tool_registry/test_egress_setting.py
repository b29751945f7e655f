"""The registry as a process keeps the egress rules of its file. TOOL-7, OPS-5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pawl.chassis.rpc_client import open_channel
from pawl.tool.v1 import execution_pb2
from pawl.tool.v1.execution_pb2_grpc import ExecutionServiceStub
from tests.keys import ENVIRONMENT, SERVICE_KEY
from tests.rpc.tool_registry.registry import content, context, outcome
from tests.rpc.tool_registry.test_process import process
from tests.web_server import Reply, pages, web_server


async def scrape(address: str, url: str, store: str) -> execution_pb2.ExecutionResult:
    request = execution_pb2.ExecuteToolRequest(
        context=context(store=store),
        call_id="call",
        tool_name="web_scrape",
        tool_version=1,
        arguments_json=json.dumps({"url": url}).encode(),
    )
    async with open_channel(address, service_key=SERVICE_KEY) as channel:
        responses = [response async for response in ExecutionServiceStub(channel).ExecuteTool(request)]
    return responses[-1].result


async def test_a_process_lets_each_store_reach_what_the_file_says(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with web_server(pages({"/": Reply(b"hello", headers={"Content-Type": "text/plain"})})) as server:
        path, url = tmp_path / "egress.json", f"http://localhost:{server.port}/"
        path.write_text(json.dumps({"acme": {"private": [f"localhost:{server.port}"]}}))
        monkeypatch.setenv("PAWL_EGRESS_FILE", str(path))
        async with process(database_url, tmp_path, "a") as (_, address):
            assert content(await scrape(address, url, "acme"))["text"] == "hello"
            assert outcome(await scrape(address, url, "other")) == "FAILED TOOL_ERROR"
        assert server.connections == 1


def test_a_process_does_not_start_with_rules_that_cannot_be_used(database_url: str, tmp_path: Path) -> None:
    path = tmp_path / "egress.json"
    path.write_text('{"*": {"private": ["169.254.169.254:80"]}}')
    ended = subprocess.run(
        [sys.executable, "-m", "pawl.tool_registry"],
        env=os.environ
        | ENVIRONMENT
        | {
            "PAWL_DATABASE_URL": database_url,
            "PAWL_DATABASE_UNSAFE": "true",
            "PAWL_LISTEN": "127.0.0.1:0",
            "PAWL_METRICS_LISTEN": "127.0.0.1:0",
            "PAWL_EGRESS_FILE": str(path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode != 0
    assert "PAWL_EGRESS_FILE" in ended.stdout + ended.stderr
