"""The worker library of Python, against a registry. TOOL-3."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
import trustme
from structlog.testing import capture_logs

from pawl.chassis.local_key import LOCAL_KEY as LOCAL_KEY_FILE
from pawl.chassis.local_key import KeyInClear, find_key
from pawl.chassis.rpc_client import open_channel
from pawl.launcher.secrets import SecretFiles
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tool.v1.execution_pb2_grpc import ExecutionServiceStub
from pawl.tool.v1.tool_pb2_grpc import ToolServiceStub
from pawl.tool_registry.app.workers.workers import WorkerOptions
from pawl.worker import DID_NOT_HAPPEN, CallContext, ToolError, Worker
from pawl.worker.worker import AttachError
from tests import certificates
from tests.keys import LOCAL_KEY, SERVICE_KEY
from tests.poll import PATIENCE_SECONDS, until
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, running
from tests.rpc.tool_registry.test_process import process

KEY = "key-of-machine-of-acme"
OPTIONS = WorkerOptions(lease_seconds=2.0, poll_seconds=0.1)


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, worker_options=OPTIONS) as registry:
        yield registry


@asynccontextmanager
async def working(worker: Worker, registry: Registry, tool: str) -> AsyncIterator[asyncio.Task[None]]:
    """Run a worker until its tool is there, and drain it at the end."""
    task = asyncio.create_task(worker.run())

    async def is_registered() -> bool:
        assert not task.done()
        found = (await registry.ann.ListTools(tool_pb2.ListToolsRequest())).tools
        return tool in [entry.definition.name for entry in found]

    await until(is_registered)
    yield task
    worker.drain()
    await task


async def test_a_result_that_fits_into_no_message_is_too_large(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key=KEY)

    @worker.tool(category="SAFE", effect="IDEMPOTENT", timeout_seconds=60)
    async def dump() -> str:
        """Dump everything."""
        return "x" * 20_000_000

    async with working(worker, registry, "dump"):
        assert outcome(await registry.run("dump")) == "FAILED RESULT_TOO_LARGE"


async def test_functions_become_tools_with_what_their_types_say(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key=KEY)
    told: list[CallContext] = []

    @worker.tool(category="SAFE", effect="IDEMPOTENT", timeout_seconds=5)
    async def charge(amount: int, context: CallContext, currency: str = "EUR") -> dict[str, Any]:
        """Charge an amount."""
        told.append(context)
        context.progress(0.5, "half")
        return {"charged": [amount, currency]}

    @worker.tool(category="SAFE", effect="READ_ONLY")
    def count(words: list[str]) -> int:
        """Count words, in a thread."""
        assert threading.current_thread() is not threading.main_thread()
        return len(words)

    async with working(worker, registry, "count"):
        assert content(await registry.run("charge", {"amount": "3"})) == {"charged": [3, "EUR"]}
        assert content(await registry.run("count", {"words": ["a", "b"]}, call="second")) == 2
        responses = [response async for response in registry.stream("charge", {"amount": 1}, call="third")]
        assert responses[-1].HasField("result")
        verdict = await registry.check("charge", {"amount": "many", "colour": "red"})
    assert "amount" in verdict.error_message
    assert "colour" in verdict.error_message
    assert (told[0].store_id, told[0].user_id, told[0].call_id, told[0].attempt) == ("acme", "ann", "call", 1)


async def test_what_a_function_raises_reaches_the_model_as_for_any_tool(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key=KEY)

    @worker.tool(category="SAFE")
    async def fail(openly: bool) -> None:
        """Fail."""
        raise ToolError("the card was refused") if openly else ValueError("password=secret")

    async with working(worker, registry, "fail"):
        open_failure = await registry.run("fail", {"openly": True})
        assert content(open_failure) == {"error": "the card was refused"}
        hidden = await registry.run("fail", {"openly": False}, call="other")
        assert outcome(hidden) == "FAILED TOOL_ERROR"
        assert "secret" not in content(hidden)["error"]


async def test_a_function_that_raises_stop_iteration_has_failed(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key=KEY)

    @worker.tool(category="SAFE", effect="AT_MOST_ONCE", timeout_seconds=60)
    def first() -> str:
        """Return the first of none."""
        return next(iter(()))

    async with working(worker, registry, "first"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            failure = await registry.run("first")
    assert outcome(failure) == "FAILED TOOL_ERROR"
    assert "RuntimeError" in content(failure)["error"]


async def test_a_cancelled_call_stops_its_function(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key=KEY)
    begun, stopped = threading.Event(), threading.Event()

    @worker.tool(category="SAFE", timeout_seconds=60)
    async def wait() -> None:
        """Wait."""
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    @worker.tool(category="SAFE", timeout_seconds=60)
    def block(context: CallContext) -> None:
        """Wait in a thread."""
        begun.set()
        context.cancelled.wait(60)
        stopped.set()

    async with working(worker, registry, "block"):
        for tool in ("wait", "block"):
            begun.clear()
            stopped.clear()
            asked = asyncio.ensure_future(registry.run(tool, call=tool))
            await asyncio.to_thread(begun.wait)
            assert (await registry.cancel(tool)).stopped
            assert outcome(await asked) == "CANCELLED CANCELLED"
            assert stopped.is_set()


async def test_a_call_survives_the_end_of_the_replica_that_its_worker_is_attached_to(
    database_url: str, tmp_path: Path
) -> None:
    lasting = WorkerOptions(lease_seconds=60, poll_seconds=0.1)
    begun, release = asyncio.Event(), asyncio.Event()
    async with running(database_url, tmp_path, worker_options=lasting) as registry:
        async with running(database_url, tmp_path, name="b", worker_options=lasting, drain_seconds=0) as other:
            worker = Worker(other.address, name="billing", api_key=KEY)

            @worker.tool(category="SAFE", timeout_seconds=60)
            async def pay() -> str:
                """Pay."""
                begun.set()
                await release.wait()
                return "paid"

            task = asyncio.create_task(worker.run())
            await until(lambda: _has(registry, "pay"))
            asked = asyncio.ensure_future(registry.run("pay", timeout_seconds=60))
            await begun.wait()
        release.set()
        async with running(database_url, tmp_path, name="b", worker_options=lasting):
            assert content(await asked) == "paid"
            worker.drain()
            await task


async def _has(registry: Registry, tool: str) -> bool:
    found = (await registry.ann.ListTools(tool_pb2.ListToolsRequest())).tools
    return tool in [entry.definition.name for entry in found]


async def test_a_worker_finds_the_key_of_the_suite_whose_folder_it_is_told(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a process as it is deployed, whose launcher says a moment later where it listens."""
    looks = 0

    def look(*arguments: Any, **named: Any) -> str | None:
        nonlocal looks
        looks += 1
        if looks == 3:
            SecretFiles(tmp_path / "secrets").put(LOCAL_KEY_FILE, LOCAL_KEY)
            endpoints = {"launcher_pid": os.getpid(), "services": {"tool-registry": [{"grpc": address}]}}
            (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))
        return find_key(*arguments, **named)

    monkeypatch.setattr("pawl.worker.worker.find_key", look)
    monkeypatch.setenv("PAWL_DATA", str(tmp_path))
    async with process(database_url, tmp_path, "a") as (registry, address):
        worker = Worker(address, name="billing")

        @worker.tool(category="SAFE")
        async def hello(name: str) -> str:
            """Greet somebody."""
            return f"hello {name}"

        task = asyncio.create_task(worker.run())
        async with (
            open_channel(address, service_key=LOCAL_KEY) as channel,
            open_channel(address, service_key=SERVICE_KEY) as inside,
        ):
            tools, execution = ToolServiceStub(channel), ExecutionServiceStub(inside)

            async def is_there() -> bool:
                listed = (await tools.ListTools(tool_pb2.ListToolsRequest())).tools
                return "hello" in [entry.definition.name for entry in listed]

            await until(is_there)
            request = execution_pb2.ExecuteToolRequest(
                context=context(store="local", user="me"),
                call_id="call",
                tool_name="hello",
                tool_version=1,
                arguments_json=b'{"name": "Ann"}',
            )
            responses = [response async for response in execution.ExecuteTool(request)]
        assert content(responses[-1].result) == "hello Ann"
        worker.drain()
        await task
        registry.terminate()
        assert await registry.wait() == 0


async def test_a_worker_that_the_registry_does_not_want_ends(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key="key-of-ann-of-acme")

    @worker.tool()
    async def nothing() -> None:
        """Do nothing."""

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await worker.run()
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert str(error.value).startswith(f"{registry.address} does not take the worker 'billing': ")
    assert "PAWL_API_KEY" in str(error.value)


@pytest.mark.parametrize("address", ["203.0.113.9:7602", "127.0.0.1:1, registry.example:7602"])
async def test_a_worker_does_not_send_its_key_in_clear_beyond_this_machine(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-1"""
    opened: list[str] = []

    def open_none(address: str, **_: Any) -> NoReturn:
        opened.append(address)
        raise ConnectionError

    monkeypatch.setattr("pawl.worker.worker.open_channel", open_none)
    monkeypatch.delenv("PAWL_API_KEY", raising=False)
    with pytest.raises(KeyInClear, match=r"unencrypted.*`authority` of a Worker.*`key_in_clear`") as caught:
        await Worker(address, name="billing", api_key=KEY).run()
    assert KEY not in str(caught.value)
    monkeypatch.setenv("PAWL_API_KEY", KEY)
    with pytest.raises(KeyInClear):
        await Worker(address, name="billing").run()
    assert opened == []
    with pytest.raises(ConnectionError):
        await Worker(address, name="billing", key_in_clear=True).run()
    monkeypatch.setenv("PAWL_KEY_IN_CLEAR", "1")
    with pytest.raises(ConnectionError):
        await Worker(address, name="billing").run()
    assert opened == [address, address]


async def test_a_worker_at_another_address_than_the_registry_s_is_told_so() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with pytest.raises(AttachError, match=f"{address} does not take .* must be that of tool-registry"):
            await Worker(address, name="billing", api_key=KEY).run()
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("is_secure", "trusted", "hint"),
    [
        (True, None, "If TLS is spoken there, give `authority`"),
        (True, "theirs.pem", "of another authority than `authority`"),
        (False, "theirs.pem", "leave out `authority`"),
    ],
)
async def test_a_worker_that_does_not_agree_about_tls_logs_what_to_give(
    tmp_path: Path, is_secure: bool, trusted: str | None, hint: str
) -> None:
    """It tries again, because a certificate may be mended, so the log is all that people see."""
    files = certificates.write(tmp_path, "tool-registry", trustme.CA())
    (tmp_path / "theirs.pem").write_bytes(trustme.CA().cert_pem.bytes())
    shown = grpc.ssl_server_credentials([(files.key.read_bytes(), files.certificate.read_bytes())])
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", shown) if is_secure else server.add_insecure_port("127.0.0.1:0")
    await server.start()
    authority = tmp_path / trusted if trusted else None

    async def is_told() -> bool:
        return any(hint in line.get("hint", "") for line in logs)

    with capture_logs() as logs:
        worker = Worker(f"127.0.0.1:{port}", name="billing", authority=authority, api_key=KEY)
        task = asyncio.create_task(worker.run())
        try:
            await until(is_told)
        finally:
            task.cancel()
            await asyncio.wait([task])
            await server.stop(None)


async def test_a_worker_that_cannot_attach_says_where_and_why(registry: Registry) -> None:
    """In a folder without the key of a suite it tries again, since the suite may start later."""
    worker = Worker(registry.address, name="billing")
    with capture_logs() as logs:
        task = asyncio.create_task(worker.run())

        def refusals() -> list[Any]:
            return [e for e in logs if e["event"] == "worker.stream_broken" and e["code"] == "UNAUTHENTICATED"]

        async def is_refused() -> bool:
            return bool(refusals())

        await until(is_refused)
        worker.drain()
        await asyncio.gather(task, return_exceptions=True)
    said = refusals()[0]
    assert said["address"] == registry.address
    assert "authorization: Bearer" in said["detail"]


def test_a_parameter_without_a_type_is_named() -> None:
    def charge(customer, cents: int) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        """Charge."""

    with pytest.raises(TypeError, match="charge: parameter customer has no type; write for example customer: str"):
        Worker("127.0.0.1:1", name="billing").tool()(charge)


async def test_reconcile_says_what_happened(registry: Registry) -> None:
    worker = Worker(registry.address, name="billing", api_key=KEY)

    async def reconcile(context: CallContext) -> Any:
        return DID_NOT_HAPPEN if context.call_id == "never" else "found"

    with pytest.raises(ValueError, match="reconcile"):
        worker.tool(effect="RECONCILABLE")

    @worker.tool(category="SAFE", effect="RECONCILABLE", reconcile=reconcile)
    async def order() -> str:
        """Order."""
        return "ordered"

    async with working(worker, registry, "order"):
        assert content(await registry.run("order")) == "ordered"


async def test_nothing_that_a_tool_says_ends_its_worker(database_url: str, tmp_path: Path) -> None:
    """What is in a checkpoint, an error or progress may come from anybody, and other calls run beside it."""
    too_deep: Any = 1
    for _ in range(40):
        too_deep = [too_deep]
    said: dict[str, Any] = {
        "nul": "a\0b",
        "number": 2**64,
        "nan": float("nan"),
        "deep": too_deep,
        "surrogate": "\ud800",
        "object": object(),
    }
    async with running(database_url, tmp_path, worker_options=OPTIONS) as registry:
        worker = Worker(registry.address, name="billing", api_key=KEY)

        @worker.tool(category="SAFE", effect="IDEMPOTENT", timeout_seconds=60)
        async def keep(what: str, context: CallContext) -> None:
            """Keep something."""
            await context.checkpoint(said[what])

        @worker.tool(category="SAFE", effect="IDEMPOTENT", timeout_seconds=60)
        async def fail(number: int, context: CallContext) -> None:
            """Say something, and fail with it."""
            words = ["\ud800", "\0", "long"][number] * 2_000_000
            context.progress(0.5, words)
            raise ToolError(words)

        async with working(worker, registry, "fail"):
            for what in said:
                failed = content(await registry.run("keep", {"what": what}, call=what))
                assert "a checkpoint must be JSON" in failed["error"], what
            for number in range(3):
                failed = await registry.run("fail", {"number": number}, call=f"fail_{number}")
                assert outcome(failed) == "FAILED TOOL_ERROR"
