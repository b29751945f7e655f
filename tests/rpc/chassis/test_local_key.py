"""OPS-1: the local key of a suite is sent only to that suite."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.agent.v1 import agent_pb2
from pawl.chassis.identity import local_key
from pawl.chassis.identity.local_key import LOCAL_KEY, users_at
from pawl.client import AsyncClient, PawlError
from pawl.launcher.folder import SecretFiles
from pawl.worker import Worker
from tests.poll import until

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
KEY = ("authorization", "Bearer the-key-of-the-folder")


def table(*listeners: tuple[str, str, int]) -> str:
    """Return the content of /proc/net/tcp with these local addresses, states and users."""
    return HEADER + "".join(
        f"   {number}: {address} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {user:5} 0 1 1\n"
        for number, (address, state, user) in enumerate(listeners)
    )


@pytest.mark.skipif(sys.byteorder != "little", reason="the tables are written in the order of the machine")
def test_socket_owners_include_every_user_able_to_accept_the_connection() -> None:
    any_ipv6, own_ipv6 = f"{0:032}:1DB1", f"{0:024}01000000:1DB1"
    for listening, address, takes in (
        ("0100007F:1DB1", "127.0.0.1:7601", True),
        ("00000000:1DB1", "127.0.0.1:7601", True),
        ("0100007F:1DB1", "127.0.0.1:7602", False),
        ("0200007F:1DB1", "127.0.0.1:7601", False),
        ("00000000:1DB1", "[::1]:7601", False),
        (own_ipv6, "[::1]:7601", True),
        (any_ipv6, "[::1]:7601", True),
        (any_ipv6, "127.0.0.1:7601", True),
        ("0000000000000000FFFF00000100007F:1DB1", "127.0.0.1:7601", True),
        (own_ipv6, "127.0.0.1:7601", False),
    ):
        both = [table(), table((listening, "0A", 1), (listening, "0A", 2))]
        assert users_at(address, both) == ({1, 2} if takes else set()), (listening, address)
        assert users_at(address, [table((listening, "01", 1001))]) == set(), "a connection is not a listener"


class OtherListener:
    """A listener that records the keys it receives and never responds."""

    def __init__(self) -> None:
        self.shown: list[set[tuple[str, str]]] = []
        self.address = ""

    async def serve(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((self._Handler(self),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()

    class _Handler(grpc.GenericRpcHandler):
        def __init__(self, other_listener: OtherListener) -> None:
            self._stranger = other_listener

        def service(self, details: Any) -> Any:
            if details.method.startswith("/grpc.health."):
                return None  # Without a health check, a client treats it as healthy
            self._stranger.shown.append({(key, str(value)) for key, value in details.invocation_metadata})

            async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

            return grpc.stream_stream_rpc_method_handler(refuse)


@pytest.fixture
async def other_listener() -> AsyncIterator[OtherListener]:
    server, made = grpc.aio.server(), OtherListener()
    await made.serve(server)
    yield made
    await server.stop(0)


def write_folder(folder: Path, address: str, *, launcher: int) -> None:
    SecretFiles(folder / "secrets").put(LOCAL_KEY, "the-key-of-the-folder")
    replica = {"grpc": address, "metrics": "", "pid": 1, "ready": True}
    names = ("agent-loop", "tool-registry", "notifier", "job-store")
    endpoints = {
        "launcher_pid": launcher,
        "data": str(folder),
        "secrets": "",
        "services": {n: [replica] for n in names},
    }
    (folder / "endpoints.json").write_text(json.dumps(endpoints))


def target(folder: Path) -> AsyncClient:
    return AsyncClient(data=folder, retry_seconds=0, environment={})


async def a_command(folder: Path, _: str) -> None:
    async with target(folder) as found:
        with contextlib.suppress(PawlError):
            await found.agents.ListRuns(agent_pb2.ListRunsRequest())


async def a_session(folder: Path, address: str) -> None:
    with contextlib.suppress(Exception):
        async with target(folder).session() as session:
            await session.next_frame()


async def a_worker(folder: Path, address: str) -> None:
    del folder
    worker = Worker(address, name="billing")
    running = asyncio.create_task(worker.run())
    await asyncio.wait({running}, timeout=0.5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


WAYS = pytest.mark.parametrize("call", [a_command, a_session, a_worker])


@WAYS
async def test_another_users_listener_does_not_get_the_key(
    call: Callable[[Path, str], Awaitable[None]],
    other_listener: OtherListener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAWL_DATA", str(tmp_path))
    monkeypatch.delenv("PAWL_API_KEY", raising=False)
    write_folder(tmp_path, other_listener.address, launcher=os.getpid())

    async def was_called(times: int) -> bool:
        await call(tmp_path, other_listener.address)
        return len(other_listener.shown) >= times

    await until(lambda: was_called(1))
    assert all(KEY in shown for shown in other_listener.shown), "it belongs to the user"
    other_listener.shown.clear()
    # Requests already being sent show the previous key.
    SecretFiles(tmp_path / "secrets").put(LOCAL_KEY, "the-next-key")
    port = int(other_listener.address.rpartition(":")[2])
    (tmp_path / "tcp").write_text(table((f"0100007F:{port:04X}", "0A", os.getuid() + 1)))
    monkeypatch.setattr(local_key, "LISTENERS", (tmp_path / "tcp",))
    await until(lambda: was_called(1))
    assert not any("the-next-key" in value for shown in other_listener.shown for _, value in shown)


@WAYS
async def test_key_is_not_sent_after_the_suite_has_ended(
    call: Callable[[Path, str], Awaitable[None]],
    other_listener: OtherListener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OPS-1: the address file may remain after the suite was killed."""
    monkeypatch.setenv("PAWL_DATA", str(tmp_path))
    monkeypatch.delenv("PAWL_API_KEY", raising=False)
    ended = subprocess.Popen([sys.executable, "-c", ""])  # noqa: ASYNC220  # it ends at once
    ended.wait()
    write_folder(tmp_path, other_listener.address, launcher=ended.pid)

    async def was_called() -> bool:
        await call(tmp_path, other_listener.address)
        return bool(other_listener.shown)

    await until(was_called)
    assert not any(KEY in shown for shown in other_listener.shown)
