"""Registry processes that crash or stop, and checkpoints from which calls resume (I5, OPS-5, TOOL-9, decision 14)."""

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

import pytest

from pawl.chassis.ids import CallId, CallKey, ConversationId, RunId, StoreId
from pawl.chassis.rpc.client import open_channel
from pawl.errors import PawlError
from pawl.server.db.database import Database
from pawl.server.db.erasures import ErasurePart
from pawl.tool.v1 import execution_pb2, worker_pb2
from pawl.tool.v1.execution_pb2_grpc import ExecutionServiceStub
from pawl.tool_registry.execution.store.checkpoints import PostgresCheckpoints
from pawl.tool_registry.execution.store.erasures import PostgresErasures
from pawl.tool_registry.rules.journal import Writer
from pawl.tools import Category, EffectClass, ToolContext, tool
from tests.keys import ENVIRONMENT, SERVICE_KEY
from tests.poll import until
from tests.rpc.refusals import raises
from tests.rpc.tool_registry import world
from tests.rpc.tool_registry.attached import OPTIONS, attached, definition, start_call
from tests.rpc.tool_registry.attached import EffectClass as WireEffect
from tests.rpc.tool_registry.registry import content, context, outcome, running
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


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux only: elsewhere children that hide are not found")
async def test_a_killed_registry_leaves_no_tool_processes(database_url: str, tmp_path: Path, ledger: Path) -> None:
    """TOOL-9: the process of the call, its guard and the children of the tool are gone."""
    async with process(database_url, tmp_path, "a") as (registry, address):
        asked = asyncio.ensure_future(execute(address, "linger", path=str(ledger)))
        await until(ledger.exists)
        started = [int(pid) for pid in ledger.read_text().split()]
        registry.send_signal(signal.SIGKILL)
        await raises(PawlError, asked)

        await until(lambda: all(world.is_gone(pid) for pid in started))


async def test_a_process_may_only_reach_the_hosts_that_the_egress_file_allows_its_store(
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


STEPS = '''
import time
from pathlib import Path
from pawl.tools import Category, EffectClass, ProcessLimits, ToolContext, tool

@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, timeout_seconds=60, process=ProcessLimits())
def count(path: str, context: ToolContext) -> int:
    """Count, and hang at 2 the first time."""
    for number in range(context.last_checkpoint or 0, 6):
        with Path(path).open("a") as file:
            file.write(f"{number}\\n")
        context.checkpoint(number + 1)
        while number == 2:
            time.sleep(0.02)
    return context.attempt
'''


async def test_tool_resumes_from_its_checkpoint_after_a_registry_crash(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "slow_tools.py").write_text(STEPS)
    steps = tmp_path / "steps"

    async with process(database_url, tmp_path, "a") as (first, address):
        asked = asyncio.ensure_future(execute(address, "count", path=str(steps)))
        async with Database(database_url, application_name="test") as database:
            await until(lambda: database.fetchval("SELECT content = '3' FROM tool_registry.checkpoints"))
        first.kill()
        await raises(PawlError, asked)
    async with process(database_url, tmp_path, "b") as (_, address):
        result = await execute(address, "count", path=str(steps), earlier_attempts=1)
    assert content(result) == 2
    assert steps.read_text().split() == ["0", "1", "2", "3", "4", "5"], "each step once"


def writer(token: str, *, attempt: int = 1) -> Writer:
    return Writer(key=CallKey(StoreId("acme"), CallId("c1")), run_id=RunId("run"), attempt=attempt, token=token)


@asynccontextmanager
async def record(database_url: str) -> Any:
    async with Database(database_url, application_name="test") as database:
        yield database, PostgresCheckpoints(database)


async def test_latest_attempt_can_write_regardless_of_its_number(database_url: str) -> None:
    """A restarted caller may count its attempts from zero."""
    async with record(database_url) as (_, checkpoints):
        assert await checkpoints.keep(writer("a"), b"1", is_first=True)
        assert await checkpoints.take(writer("b", attempt=5)) == b"1"
        assert not await checkpoints.keep(writer("a"), b"2", is_first=False)
        assert not await checkpoints.keep(writer("late"), b"2", is_first=True)
        assert await checkpoints.take(writer("c", attempt=2)) == b"1"
        assert not await checkpoints.keep(writer("b", attempt=5), b"3", is_first=False)
        assert await checkpoints.keep(writer("c", attempt=2), b"4", is_first=True)
        assert await checkpoints.take(writer("d", attempt=3)) == b"4"


async def test_checkpoints_expire_and_are_deleted_with_their_conversation(database_url: str) -> None:
    part = ErasurePart(
        store_id=StoreId("acme"),
        conversation_id=ConversationId("conversation"),
        run_ids=(RunId("run"),),
        call_ids=(CallId("c1"),),
    )
    async with record(database_url) as (database, checkpoints):
        assert await checkpoints.keep(writer("a"), b"1", is_first=True)
        for seconds, count in ((60.0, 1), (0.0, 0)):
            await checkpoints.forget(seconds)
            assert await database.fetchval("SELECT count(*) FROM tool_registry.checkpoints") == count
        assert await checkpoints.keep(writer("b"), b"1", is_first=True)
        await PostgresErasures(database).erase(part)
        assert await database.fetchval("SELECT count(*) FROM tool_registry.checkpoints") == 0
        assert not await checkpoints.keep(writer("b"), b"2", is_first=False), "it does not come back"
        assert await checkpoints.take(writer("c", attempt=2)) is None


async def test_invalid_checkpoint_is_rejected_and_secrets_are_not_stored(database_url: str, tmp_path: Path) -> None:
    """The size limit also applies after the redaction of secrets, which may lengthen a checkpoint."""
    kept = {
        "large": ("x" * 16_384, "over the limit of 16384"),
        "nan": (float("nan"), "must be JSON"),
        "object": (object(), "JSON"),
        "pin": ("1234" * 4000, "over the limit of"),
    }

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def leak(context: ToolContext, what: str) -> Any:
        """Keep something."""
        if context.attempt == 1:
            secrets = {"key": context.secret("api_key"), "pin": context.secret("pin")}
            await context.checkpoint(kept[what][0] if what in kept else {"key": secrets["key"]})
        return context.last_checkpoint

    async with running(
        database_url, tmp_path, [leak], secrets={"acme": {"api_key": "hunter2", "pin": "1234"}}
    ) as registry:
        for what, (_, said) in kept.items():
            assert said in content(await registry.run("leak", {"what": what}, call=what))["error"]
            assert content(await registry.run("leak", {"what": what}, call=what, earlier_attempts=1)) is None
        await registry.run("leak", {"what": "secret"})
        assert content(await registry.run("leak", {"what": "secret"}, earlier_attempts=1)) == {"key": "[secret]"}


async def test_a_worker_resumes_from_the_checkpoint_of_a_lost_worker(database_url: str, tmp_path: Path) -> None:
    tool = definition(effect=WireEffect.EFFECT_CLASS_IDEMPOTENT)
    async with running(database_url, tmp_path, worker_options=OPTIONS) as registry, attached(registry, tool) as first:
        asked, call = await start_call(registry, first)
        assert not call.last_checkpoint_json
        made: dict[str, Any] = {"call_id": call.call_id, "lease_epoch": call.lease_epoch, "number": 7}

        async def keep(content_json: bytes) -> bool:
            await first.send(checkpoint=worker_pb2.WorkerCheckpoint(content_json=content_json, **made))
            while not isinstance(receipt := await first.next(), worker_pb2.CheckpointReceipt):
                pass
            assert receipt.number == 7
            return receipt.kept

        for bad in (b"", b"{", b'"\\u0000"', b"[" * 40 + b"]" * 40, b'"' + b"x" * 16_384 + b'"'):
            assert not await keep(bad), bad[:9]
        assert await keep(b'{"at": 1}')
        await world.execute(database_url, "UPDATE tool_registry.worker_calls SET is_lost = true")
        async with attached(registry, tool, worker="w2") as second:
            found = await second.invocation()
            assert found.last_checkpoint_json == b'{"at":1}'
            assert not await keep(b'{"at": 0}'), "it no longer holds the call"
            await second.answer(found)
        assert outcome(await asked) == "SUCCEEDED"
    # Checkpoints of calls that the ledger no longer knows are deleted with their run.
    async with record(database_url) as (database, _):
        part = ErasurePart(store_id=StoreId("acme"), conversation_id=CONVERSATION, run_ids=(RunId("run"),), call_ids=())
        await PostgresErasures(database).erase(part)
        for table in ("checkpoints", "worker_calls"):
            assert await database.fetchval(f"SELECT count(*) FROM tool_registry.{table}") == 0  # noqa: S608


CONVERSATION = ConversationId("conversation")
