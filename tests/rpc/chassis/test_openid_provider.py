"""A service as a process of its own that knows its callers by tokens alone, also by those of a real provider. OPS-1."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from joserfc import jwk

from pawl.chassis.rpc_client import open_channel
from pawl.chassis.tokens import to_id
from pawl.launcher.ports import free_port
from tests import openid_provider
from tests.fakes.issuer import issuer_server, key, key_set, token
from tests.openid_provider import provider
from tests.poll import until
from tests.rpc.chassis.echo import EchoStub
from tests.rpc.chassis.waiting import wait_for_file

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


async def test_a_service_knows_callers_by_tokens_as_its_file_says_at_any_time(tmp_path: Path) -> None:
    now = int(time.time())
    async with issuer_server() as issuer, service(tmp_path, issuer.issuer) as echo:
        claims: dict[str, Any] = {"iss": issuer.issuer, "iat": now, "exp": now + 300, "groups": ["leads"]}
        good = token(**claims)
        assert await answer(echo, good) == "UNAVAILABLE", "the keys of the issuer are not there yet"
        issuer.say("/keys", key_set(key()))
        assert await answer(echo, good) == "user/acme/ann"
        wrong: list[dict[str, Any]] = [{"groups": []}, {"exp": now - 300}, {"aud": "other"}]
        for bad in wrong:
            assert await answer(echo, token(**claims | bad)) == "UNAUTHENTICATED"
        assert await answer(echo, "at-least-16-characters") == "UNAUTHENTICATED"
        write_providers(tmp_path)
        await until(lambda: gives(echo, good, "UNAUTHENTICATED"))
        write_providers(tmp_path, issuer.issuer)
        await until(lambda: gives(echo, good, "user/acme/ann"))


async def gives(echo: EchoStub, text: str, expected: str) -> bool:
    return await answer(echo, text) == expected


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
