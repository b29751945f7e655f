"""The Python worker library against a registry (TOOL-3)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from structlog.testing import capture_logs

from pawl.chassis.identity.local_key import KeyInClear
from pawl.chassis.process.tasks import end
from pawl.tool.v1 import tool_pb2
from pawl.tool_registry.sources.worker.workers import WorkerOptions
from pawl.worker import DID_NOT_HAPPEN, CallContext, ToolError, Worker
from pawl.worker.worker import AttachError
from tests.poll import PATIENCE_SECONDS, until
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.registry import Registry, content, error_of, outcome, running

KEY = "key-of-machine-of-acme"
OPTIONS = WorkerOptions(lease_seconds=2.0, poll_seconds=0.1)


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, worker_options=OPTIONS) as registry:
        yield registry


async def has_tool(registry: Registry, tool: str, task: asyncio.Task[None] | None = None) -> bool:
    assert task is None or not task.done()
    found = (await registry.ann.ListTools(tool_pb2.ListToolsRequest())).tools
    return tool in [entry.definition.name for entry in found]


@asynccontextmanager
async def working(worker: Worker, registry: Registry, tool: str) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.run())
    await until(lambda: has_tool(registry, tool, task))
    yield task
    worker.drain()
    await task


async def test_functions_become_tools_described_by_their_types(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key=KEY)
    contexts: list[CallContext] = []

    @worker.tool(category="SAFE", effect="IDEMPOTENT", timeout_seconds=5)
    async def charge(amount: int, context: CallContext, currency: str = "EUR") -> dict[str, Any]:
        """Charge an amount."""
        contexts.append(context)
        context.progress(0.5, "half")
        return {"charged": [amount, currency]}

    @worker.tool(category="SAFE", effect="READ_ONLY")
    def count(words: list[str]) -> int:
        """Count words, in a thread."""
        assert threading.current_thread() is not threading.main_thread()
        return len(words)

    async with working(worker, registry, "count"):
        assert content(await registry.run("charge", {"amount": "3"}, traceparent="t")) == {"charged": [3, "EUR"]}
        assert content(await registry.run("count", {"words": ["a", "b"]}, call="second")) == 2
        responses = [response async for response in registry.stream("charge", {"amount": 1}, call="third")]
        assert responses[-1].HasField("result")
        verdict = await registry.check("charge", {"amount": "many", "colour": "red"})
    assert [name for name in ("amount", "colour") if name not in verdict.error_message] == []
    first = contexts[0]
    found = (first.store_id, first.user_id, first.call_id, first.attempt, first.traceparent)
    assert found == ("acme", "ann", "call", 1, "t")


async def test_cancelled_call_stops_its_function(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key=KEY)
    started, stopped = threading.Event(), threading.Event()

    @worker.tool(category="SAFE", timeout_seconds=60)
    async def wait() -> None:
        """Wait."""
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    @worker.tool(category="SAFE", timeout_seconds=60)
    def block(context: CallContext) -> None:
        """Wait in a thread."""
        started.set()
        context.cancelled.wait(60)
        stopped.set()

    async with working(worker, registry, "block"):
        for tool in ("wait", "block"):
            started.clear()
            stopped.clear()
            asked = asyncio.ensure_future(registry.run(tool, call=tool))
            await asyncio.to_thread(started.wait)
            assert (await registry.cancel(tool)).stopped
            assert outcome(await asked) == "CANCELLED CANCELLED"
            assert stopped.is_set()


async def test_call_survives_the_loss_of_its_workers_replica(database_url: str, tmp_path: Path) -> None:
    lasting = WorkerOptions(lease_seconds=60, poll_seconds=0.1)
    started, release = asyncio.Event(), asyncio.Event()
    async with running(database_url, tmp_path, worker_options=lasting) as registry:
        async with running(database_url, tmp_path, name="b", worker_options=lasting, drain_seconds=0) as other:
            worker = Worker(other.address, name="billing", api_key=KEY)

            @worker.tool(category="SAFE", timeout_seconds=60)
            async def pay() -> str:
                """Pay."""
                started.set()
                await release.wait()
                return "paid"

            task = asyncio.create_task(worker.run())
            await until(lambda: has_tool(registry, "pay"))
            asked = asyncio.ensure_future(registry.run("pay", timeout_seconds=60))
            await started.wait()
        release.set()
        async with running(database_url, tmp_path, name="b", worker_options=lasting):
            assert content(await asked) == "paid"
            worker.drain()
            await task


async def test_sigterm_drains_all_workers_of_a_process(registry: Registry) -> None:
    workers = [Worker(registry.address, name=name, api_key=KEY) for name in ("pay", "ship")]

    async def act() -> None:
        """Act."""

    for worker, name in zip(workers, ("pay", "ship"), strict=True):
        act.__name__ = name
        worker.tool()(act)
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    for name in ("pay", "ship"):
        await until(partial(has_tool, registry, name))
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*tasks)


async def test_an_exception_or_return_value_never_ends_the_worker(registry: Registry) -> None:
    """Checkpoints, errors and progress may contain untrusted data, and other calls run in parallel."""
    too_deep: Any = 1
    for _ in range(40):
        too_deep = [too_deep]
    unkept: dict[str, Any] = {
        "nul": "a\0b",
        "number": 2**64,
        "nan": float("nan"),
        "deep": too_deep,
        "surrogate": "\ud800",
        "object": object(),
    }
    worker = Worker(registry.address, name="billing", api_key=KEY)

    async def reconcile(context: CallContext) -> Any:
        return DID_NOT_HAPPEN

    @worker.tool(category="SAFE", effect="IDEMPOTENT", timeout_seconds=60)
    async def do(way: str, context: CallContext) -> str:
        """Do something odd."""
        if way in unkept:
            await context.checkpoint(unkept[way])
        if way.startswith("say"):
            words = {"say surrogate": "\ud800", "say nul": "\0", "say long": "long"}[way] * 2_000_000
            context.progress(0.5, words)
            raise ToolError(words)
        if way == "hidden":
            raise ValueError("password=secret")
        if way == "open":
            raise ToolError("the card was refused")
        return "x" * 20_000_000

    @worker.tool(category="SAFE", effect="RECONCILABLE", timeout_seconds=60, reconcile=reconcile)
    def first() -> str:
        """Return the first item of an empty list."""
        return next(iter(()))

    async with working(worker, registry, "first"):
        for number, way in enumerate((*unkept, "say surrogate", "say nul", "say long", "hidden", "open")):
            error = error_of(await registry.run("do", {"way": way}, call=f"c{number}"))
            assert ("secret" in error, "a checkpoint must be JSON" in error) == (False, way in unkept), way
        assert error == "the card was refused"
        assert outcome(await registry.run("do", {"way": "large"}, call="large")) == "FAILED RESULT_TOO_LARGE"
        assert "RuntimeError" in content(await registry.run("first", call="first"))["error"]


async def test_worker_that_cannot_attach_reports_the_address_and_reason(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-1: the worker also never sends its key unencrypted to another machine."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await Worker(registry.address, name="billing", api_key="key-of-ann-of-acme").run()
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert str(error.value).startswith(f"{registry.address} refused the worker 'billing': ")
    with capture_logs() as logs:  # Without a key it retries, since the suite may start later
        keyless = asyncio.create_task(Worker(registry.address, name="billing").run())
        await until(lambda: [line for line in logs if line.get("code") == "UNAUTHENTICATED"])
        await end([keyless])
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with pytest.raises(AttachError, match=f"{address} refused .* must be the tool-registry"):
        await Worker(address, name="billing", api_key=KEY).run()
    await server.stop(None)
    opened: list[str] = []

    def open_none(address: str, **_: Any) -> NoReturn:
        opened.append(address)
        raise ConnectionError

    monkeypatch.setattr("pawl.worker.worker.open_channel", open_none)
    for address in ("203.0.113.9:7602", "127.0.0.1:1, registry.example:7602"):
        caught = await raises(
            KeyInClear,
            Worker(address, name="billing", api_key=KEY).run(),
            match=r"unencrypted.*`authority` of a Worker.*`key_in_clear`",
        )
        assert KEY not in str(caught)
        assert opened == []
    await raises(ConnectionError, Worker(address, name="billing", api_key=KEY, key_in_clear=True).run())
    monkeypatch.setenv("PAWL_API_KEY", KEY)
    await raises(KeyInClear, Worker(address, name="billing").run())
    monkeypatch.setenv("PAWL_KEY_IN_CLEAR", "1")
    await raises(ConnectionError, Worker(address, name="billing").run())
    assert opened == [address, address]


async def test_functions_get_checkpoints_of_earlier_executions(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key=KEY)

    @worker.tool(category="SAFE", effect="IDEMPOTENT", timeout_seconds=60)
    async def build(context: CallContext) -> Any:
        """Build."""
        await context.checkpoint({"at": context.attempt})
        return context.last_checkpoint

    @worker.tool(category="SAFE", effect="READ_ONLY", timeout_seconds=60)
    def measure(context: CallContext) -> Any:
        """Measure, in a thread."""
        context.checkpoint(1)
        context.checkpoint("x" * 20_000)

    async with working(worker, registry, "measure"):
        assert content(await registry.run("build")) is None
        assert content(await registry.run("build", earlier_attempts=1)) == {"at": 1}
        assert "exceeds the limit of 16384" in content(await registry.run("measure", call="other"))["error"]
