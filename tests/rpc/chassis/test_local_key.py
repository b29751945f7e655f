"""The key of a suite on this machine, and callers that are known by tokens alone. OPS-1."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from joserfc import jwk

from pawl.agent.v1 import agent_pb2
from pawl.chassis import local_key
from pawl.chassis.local_key import LOCAL_KEY, users_at
from pawl.chassis.rpc_client import open_channel
from pawl.chassis.tokens import to_id
from pawl.client import AsyncClient, PawlError
from pawl.launcher.ports import free_port
from pawl.launcher.secrets import SecretFiles
from pawl.worker import Worker
from tests import openid_provider
from tests.fakes.issuer import issuer_server, key, key_set, token
from tests.openid_provider import provider
from tests.poll import until
from tests.rpc.chassis.echo import EchoStub, wait_for_file

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
KEY = ("authorization", "Bearer the-key-of-the-folder")
Caller = Callable[[str], Awaitable[None]]


def table(*listeners: tuple[str, str, int]) -> str:
    """/proc/net/tcp with these local addresses, states and users."""
    return HEADER + "".join(
        f"   {number}: {address} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {user:5} 0 1 1\n"
        for number, (address, state, user) in enumerate(listeners)
    )


@pytest.mark.skipif(sys.byteorder != "little", reason="the tables are written in the order of the machine")
def test_the_users_behind_an_address_are_those_who_could_get_the_connection() -> None:
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
        assert users_at(address, [table((listening, "01", 1001))]) == set(), "a connection is no listener"


class Stranger:
    """A listener that notes what it is sent, and serves nothing."""

    def __init__(self) -> None:
        self.shown: list[set[tuple[str, str]]] = []
        self.address = ""

    async def serve(self, server: grpc.aio.Server) -> None:
        """Listen, at a port of its own."""
        server.add_generic_rpc_handlers((self._Handler(self),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()

    class _Handler(grpc.GenericRpcHandler):
        def __init__(self, stranger: Stranger) -> None:
            self._stranger = stranger

        def service(self, details: Any) -> Any:
            if details.method.startswith("/grpc.health."):
                return None  # Without a check, a client takes it for healthy.
            self._stranger.shown.append({(key, str(value)) for key, value in details.invocation_metadata})

            async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

            return grpc.stream_stream_rpc_method_handler(refuse)


@pytest.fixture
async def stranger() -> AsyncIterator[Stranger]:
    server, made = grpc.aio.server(), Stranger()
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
async def test_a_listener_of_another_user_is_not_shown_the_key(
    call: Callable[[Path, str], Awaitable[None]], stranger: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_DATA", str(tmp_path))
    monkeypatch.delenv("PAWL_API_KEY", raising=False)
    write_folder(tmp_path, stranger.address, launcher=os.getpid())

    async def was_called(times: int) -> bool:
        await call(tmp_path, stranger.address)
        return len(stranger.shown) >= times

    await until(lambda: was_called(1))
    assert all(KEY in shown for shown in stranger.shown), "it is the user's own"
    stranger.shown.clear()
    # What is still on its way shows the key of before.
    SecretFiles(tmp_path / "secrets").put(LOCAL_KEY, "the-next-key")
    port = int(stranger.address.rpartition(":")[2])
    (tmp_path / "tcp").write_text(table((f"0100007F:{port:04X}", "0A", os.getuid() + 1)))
    monkeypatch.setattr(local_key, "LISTENERS", (tmp_path / "tcp",))
    await until(lambda: was_called(1))
    assert not any("the-next-key" in value for shown in stranger.shown for _, value in shown)


@WAYS
async def test_the_key_goes_nowhere_when_the_suite_has_ended(
    call: Callable[[Path, str], Awaitable[None]], stranger: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its file of addresses is left, because it was killed."""
    monkeypatch.setenv("PAWL_DATA", str(tmp_path))
    monkeypatch.delenv("PAWL_API_KEY", raising=False)
    ended = subprocess.Popen([sys.executable, "-c", ""])  # noqa: ASYNC220  # it ends at once
    ended.wait()
    write_folder(tmp_path, stranger.address, launcher=ended.pid)

    async def was_called() -> bool:
        await call(tmp_path, stranger.address)
        return bool(stranger.shown)

    await until(was_called)
    assert not any(KEY in shown for shown in stranger.shown)


PROGRAM = """
from pawl.chassis.lifecycle import run_service
from pawl.chassis.service import Service
from pawl.chassis.settings import ServiceSettings, load
from tests.rpc.chassis.echo import ECHO_METHODS, EchoServicer, add_echo_to_server

async def main(stop):
    async with Service("echo", load(ServiceSettings)) as service:
        server = service.rpc_server()
        server.add(add_echo_to_server, EchoServicer(), callers=dict.fromkeys(ECHO_METHODS, frozenset({"approver"})))
        await service.serve(server, stop)

run_service(main)
"""
CLIENT = {
    "client_id": "ci|1",
    "client_secret": "secret-of-the-client-of-the-tests",
    "grant_types": ["client_credentials"],
    "redirect_uris": [],
    "response_types": [],
    "id_token_signed_response_alg": "ES256",
}


@asynccontextmanager
async def service(folder: Path, issuer: str) -> AsyncIterator[EchoStub]:
    """The service, for tokens of that issuer."""
    address_file, log = folder / "addresses.json", folder / "log"
    write_providers(folder, issuer)
    variables = {"PAWL_OIDC_FILE": str(folder / "oidc.json"), "PAWL_ADDRESS_FILE": str(address_file)}
    with log.open("w") as output:
        environment = {"PATH": os.environ["PATH"], **variables}
        command = [sys.executable, "-c", PROGRAM]
        process = subprocess.Popen(command, env=environment, stderr=output, text=True)  # noqa: ASYNC220  # a moment
        try:
            await wait_for_file(address_file, process)
            async with open_channel(json.loads(address_file.read_text())["grpc"]) as channel:
                yield EchoStub(channel)
        finally:
            process.terminate()
            code = await asyncio.to_thread(process.wait)
    assert code == 0, log.read_text()


def write_providers(folder: Path, *issuers: str) -> None:
    roles = {"claim": "groups", "map": {"leads": ["approver"]}}
    rules = {"audience": "pawl", "store": {"claim": "tenant"}, "user": {"claim": "sub"}, "roles": roles}
    (folder / "draft").write_text(json.dumps([{"issuer": issuer, **rules} for issuer in issuers]))
    (folder / "draft").replace(folder / "oidc.json")


async def answer(echo: EchoStub, text: str) -> str:
    """Return who the service says calls with a token, or the code of its refusal."""
    try:
        [who] = await echo.call("unary", "who", metadata=[("authorization", f"Bearer {text}")])
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return who


async def gives(echo: EchoStub, text: str, expected: str) -> bool:
    return await answer(echo, text) == expected


async def test_a_service_knows_callers_by_tokens_as_its_file_says_at_any_time(tmp_path: Path) -> None:
    now = int(time.time())
    async with issuer_server() as issuer, service(tmp_path, issuer.issuer) as echo:
        claims: dict[str, Any] = {"iss": issuer.issuer, "iat": now, "exp": now + 300, "groups": ["leads"]}
        good = token(**claims)
        assert await answer(echo, good) == "UNAVAILABLE", "the keys of the issuer are not there yet"
        issuer.say("/keys", key_set(key()))
        assert await answer(echo, good) == "user/acme/ann"
        for name, wrong in (("groups", []), ("exp", now - 300), ("aud", "other")):
            assert await answer(echo, token(**claims | {name: wrong})) == "UNAUTHENTICATED", name
        write_providers(tmp_path)
        await until(lambda: gives(echo, good, "UNAUTHENTICATED"))
        write_providers(tmp_path, issuer.issuer)
        await until(lambda: gives(echo, good, "user/acme/ann"))


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openid_provider.install(tmp_path_factory.mktemp("npm"))


async def fetched(issuer: str, **headers: str) -> str:
    """Return a token that the provider gives to its client by client_credentials."""
    secret = base64.b64encode(f"{urllib.parse.quote('ci|1')}:{CLIENT['client_secret']}".encode()).decode()
    async with httpx2.AsyncClient(trust_env=False, timeout=60.0) as client:
        given = await client.post(
            f"{issuer}/token",
            data={"grant_type": "client_credentials"},
            headers={"authorization": f"Basic {secret}", **headers},
        )
    text: str = given.json()["access_token"]
    return text


@pytest.mark.long
async def test_tokens_of_a_real_provider_through_rotation_and_outage(modules: Path, tmp_path: Path) -> None:
    """With oidc-provider of npm, a certified one."""
    issuer = f"http://127.0.0.1:{free_port()}"
    one, two = (jwk.generate_key("EC", "P-256", {"kid": name}) for name in ("one", "two"))
    who = f"user/acme/{to_id('ci|1')}"
    async with AsyncExitStack() as up:
        await up.enter_async_context(provider(modules, issuer, [CLIENT], one))
        async with service(tmp_path, issuer) as echo:
            old = await fetched(issuer)
            assert await answer(echo, old) == who
            assert await answer(echo, await fetched(issuer, **{"x-audience": "other"})) == "UNAUTHENTICATED"
            assert await answer(echo, old[:-8] + "AAAAAAAA") == "UNAUTHENTICATED"
            await up.aclose()
            assert await answer(echo, old) == who, "while the provider is away"
            await up.enter_async_context(provider(modules, issuer, [CLIENT], two, one))
            assert await answer(echo, await fetched(issuer)) == who, "by a key that the service has not seen"
            assert await answer(echo, old) == who
