"""TLS listeners and channels, rotation of certificates, and the local key of a suite (OPS-1)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import uvloop
from google.protobuf.wrappers_pb2 import StringValue

from pawl.agent.v1 import agent_pb2
from pawl.chassis.identity import local_key
from pawl.chassis.identity.auth import UNKNOWN
from pawl.chassis.identity.local_key import LOCAL_KEY, users_at
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc import tls
from pawl.chassis.rpc.client import open_channel, translating
from pawl.cli.failure import explain
from pawl.client import AsyncClient, PawlError
from pawl.client.target import error_of
from pawl.errors import DependencyUnavailable, Unauthenticated
from pawl.launcher.folder import SecretFiles
from pawl.server.process.http_server import HttpServer, Response, application
from pawl.server.rpc.health import ping
from pawl.server.rpc.server import RpcServer
from pawl.worker import Worker
from tests import certificates
from tests.fakes.manual_clock import ManualClock
from tests.poll import until
from tests.rpc.chassis.echo import EchoServicer, EchoStub, Serve
from tests.rpc.chassis.test_limits_and_access import ANN, GATEWAY, SERVICE_KEY, USER_KEY, Known, bearer, keys
from tests.rpc.refusals import raises

LOOPBACK = "127.0.0.1:0"


@pytest.fixture(scope="module")
def other_authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def serving(serve: Serve, tmp_path: Path, authority: trustme.CA, clock: ManualClock) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(*, checks_services: bool = True, **options: Any) -> AsyncIterator[RpcServer]:
        files = certificates.write(tmp_path, "job-store", authority)
        trusted = files.authority if checks_services else None
        shown = tls.of_service(files.certificate, files.key, trusted, clock=clock)
        async with serve(**{"tls": shown, "listen": LOOPBACK, "authenticator": keys(), **options}) as server:
            yield server

    return start


async def call_as_service(address: str, shown: tls.Tls | None, name: str = "job-store", **options: Any) -> list[str]:
    async with open_channel(
        address, service_key=SERVICE_KEY, tls=shown, server_name=name, **{"batches": True, **options}
    ) as channel:
        return await EchoStub(channel).call("unary", "who", timeout=60)


async def call_as_user(address: str, trusted: Path, clock: Clock, *, key: str = USER_KEY) -> list[str]:
    async with open_channel(address, service_key=key, tls=tls.of_client(trusted, clock)) as channel:
        with translating():
            return await EchoStub(channel).call("unary", "who", timeout=60)


async def test_users_can_call_without_a_certificate(serving: Any, tmp_path: Path, clock: ManualClock) -> None:
    trusted = tmp_path / "job-store-authority.pem"
    for checks_services in (True, False):
        async with serving(checks_services=checks_services) as server:
            for address in (server.address, server.address.replace("127.0.0.1", "localhost")):
                assert await call_as_user(address, trusted, clock) == ["user/acme/ann"]


async def test_service_authenticates_with_its_key_and_certificate(
    serving: Any, tmp_path: Path, authority: trustme.CA, clock: ManualClock
) -> None:
    own = certificates.tls_of(certificates.write(tmp_path, "agent-loop", authority), clock)
    async with serving(service_only=True) as server:
        for batches in (True, False):
            for address in (server.internal_address, f"{server.internal_address},{server.internal_address}"):
                assert await call_as_service(address, own, batches=batches) == ["service//"]
        async with open_channel(server.internal_address, tls=own, server_name="job-store") as channel:
            await ping(channel)


async def test_service_key_is_useless_without_its_certificate(
    serving: Any, tmp_path: Path, authority: trustme.CA, clock: ManualClock
) -> None:
    other = certificates.tls_of(certificates.write(tmp_path, "notifier", authority), clock)
    async with serving(service_only=True) as server:
        trusted = tmp_path / "job-store-authority.pem"
        messages = set()
        for key in (SERVICE_KEY, "another-key-0123456789"):
            caught = await raises(Unauthenticated, call_as_user(server.address, trusted, clock, key=key))
            messages.add(caught.message)
        for batches in (True, False):
            caught = await raises(Unauthenticated, call_as_service(server.internal_address, other, batches=batches))
            messages.add(caught.message)
        assert messages == {UNKNOWN}


async def test_gateway_relays_calls_of_users_without_a_certificate(
    serving: Any, tmp_path: Path, clock: ManualClock
) -> None:
    async with serving(authenticator=Known()) as server:
        shown = tls.of_client(tmp_path / "job-store-authority.pem", clock)
        async with open_channel(server.address, relay_key=lambda: GATEWAY, tls=shown) as channel:
            assert await EchoStub(channel).call("generate", "who", metadata=bearer(ANN)) == ["first", "user/acme/ann"]


async def test_service_port_requires_a_certificate_from_the_authority(
    serving: Any, tmp_path: Path, authority: trustme.CA, other_authority: trustme.CA, clock: ManualClock
) -> None:
    foreign = certificates.write(tmp_path, "agent-loop", other_authority, authority)
    expired = certificates.write(tmp_path, "late", authority, names=("agent-loop",), expired=True)
    async with serving(service_only=True) as server:
        bare = tls.of_client(tmp_path / "job-store-authority.pem", clock)
        await raises(
            DependencyUnavailable,
            *(
                call_as_service(server.internal_address, shown, batches=False)
                for shown in (certificates.tls_of(foreign, clock), certificates.tls_of(expired, clock), bare, None)
            ),
        )


async def test_channel_verifies_name_authority_and_validity(
    serve: Serve, tmp_path: Path, authority: trustme.CA, other_authority: trustme.CA, clock: ManualClock
) -> None:
    own = certificates.tls_of(certificates.write(tmp_path, "agent-loop", authority), clock)
    for files in {
        "another name": certificates.write(tmp_path, "notifier", authority),
        "another authority": certificates.write(tmp_path, "job-store", other_authority, authority),
        "expired": certificates.write(tmp_path, "late", authority, names=("job-store", "127.0.0.1"), expired=True),
    }.values():
        shown = certificates.tls_of(files, clock)
        async with serve(tls=shown, listen=LOOPBACK, authenticator=keys(), service_only=True) as server:
            await raises(DependencyUnavailable, call_as_service(server.internal_address, own))
    foreign = certificates.write(tmp_path, "elsewhere", authority, names=("elsewhere.example",))
    async with serve(tls=certificates.tls_of(foreign, clock), listen=LOOPBACK, authenticator=keys()) as server:
        await raises(DependencyUnavailable, call_as_user(server.address, foreign.authority, clock))


async def test_command_line_explains_each_tls_failure(
    serve: Serve, tmp_path: Path, authority: trustme.CA, other_authority: trustme.CA, clock: ManualClock
) -> None:
    """The explanations depend on error texts of the gRPC library, which may change."""
    trusted = tls.of_client(certificates.write(tmp_path, "agent-loop", authority).authority, clock)
    own = ("127.0.0.1",)
    for words, files, taken in [
        ("has expired", certificates.write(tmp_path, "late", authority, names=own, expired=True), trusted),
        (
            "does not have this name",
            certificates.write(tmp_path, "other", authority, names=("x.example",)),
            trusted,
        ),
        ("was not issued by the CA", certificates.write(tmp_path, "foreign", other_authority, names=own), trusted),
        ("does not speak TLS", None, trusted),
        ("speaks TLS. Pass its CA certificate", certificates.write(tmp_path, "job-store", authority), None),
    ]:
        async with (
            serve(tls=certificates.tls_of(files, clock) if files else None, listen=LOOPBACK) as server,
            open_channel(server.address, tls=taken) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await EchoStub(channel).call("unary", "hello", timeout=60)
            messages = await asyncio.to_thread(explain, error_of(caught.value, server.address), [server.address])
            assert (words in messages, server.address in messages) == (True, True), messages


async def _shown_by(address: str) -> str:
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def test_calls_do_not_fail_while_certificates_and_authority_rotate(
    serving: Any, servicer: EchoServicer, tmp_path: Path, clock: ManualClock
) -> None:
    """Both sides rotate during single calls, batches and an open stream."""
    authorities = [trustme.CA() for _ in range(3)]
    own = certificates.tls_of(certificates.write(tmp_path, "agent-loop", *authorities), clock)
    stop, seen = asyncio.Event(), list[str]()

    async def keep_calling(channel: grpc.aio.Channel) -> None:
        while not stop.is_set():
            assert (await EchoStub(channel).call("unary", "hello", timeout=60)) == ["hello"]

    async def change(shown: tls.Tls, name: str, *trusted: trustme.CA) -> None:
        before = shown()
        certificates.write(tmp_path, name, *trusted)
        await clock.advance(1.0)
        assert shown() is not before

    async with serving(service_only=True) as server:
        held = certificates.tls_of(certificates.write(tmp_path, "job-store", *authorities), clock)
        await clock.advance(1.0)
        options: dict[str, Any] = {"service_key": SERVICE_KEY, "tls": own, "server_name": "job-store"}
        async with (
            open_channel(server.internal_address, **options) as alone,
            open_channel(server.internal_address, **options, batches=True) as batched,
        ):
            open_call = EchoStub(alone).generate(StringValue(value="wait"))
            assert (await open_call.read()).value == "first"
            callers = [asyncio.create_task(keep_calling(channel)) for channel in (alone, batched) for _ in range(4)]

            async def is_renewed() -> bool:
                seen.append((await EchoStub(alone).call("unary", "certificate", timeout=60))[0])
                return seen[-1] in own().certificate.decode()  # type: ignore[union-attr]  # a service has one

            for turn in range(1, 4):
                trusted = [*authorities[turn % 3 :], *authorities[: turn % 3]]
                before = await _shown_by(server.address)
                await change(held, "job-store", *trusted)
                assert await _shown_by(server.address) != before
                await change(own, "agent-loop", *trusted)
                await until(is_renewed)
            stop.set()
            await asyncio.gather(*callers)
            servicer.release.set()
            assert (await open_call.read()).value == "wait"
    assert len(set(seen)) >= 4


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_web_pages_use_the_current_certificate(
    tmp_path: Path, authority: trustme.CA, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """A client that does not use TLS gets no response and does not affect other clients."""
    files, clock = certificates.write(tmp_path, "job-store", authority), ManualClock()
    trusting = ssl.create_default_context(cafile=files.authority)
    unseen: list[Any] = []

    async def page(address: str, **options: Any) -> bytes:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), **options)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            return await reader.read()
        finally:
            writer.close()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        pages = {"/metrics": lambda: Response(body=b"up 1\n")}
        async with HttpServer(application(pages), LOOPBACK, tls=certificates.tls_of(files, clock)) as server:
            for _ in range(2):
                assert (await page(server.address, ssl=trusting)).endswith(b"up 1\n")
                before = await _shown_by(server.address)
                certificates.write(tmp_path, "job-store", authority)
                await clock.advance(1.0)
                assert await _shown_by(server.address) != before
            assert b"up 1" not in await page(server.address)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert unseen == []


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


@dataclass
class OtherListener:
    """A listener that records the keys it receives and never responds."""

    shown: list[set[tuple[str, str]]] = field(default_factory=list)
    address: str = ""

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
    running = asyncio.create_task(Worker(address, name="billing").run())
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
