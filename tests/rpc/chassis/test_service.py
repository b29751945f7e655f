"""A whole process made of the chassis, as each service's main function composes it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import trustme

from pawl.chassis.rpc_client import open_channel
from tests import certificates
from tests.keys import ENVIRONMENT, LOCAL_KEY
from tests.rpc.chassis.echo import EchoStub
from tests.rpc.chassis.waiting import wait_for_file

PROGRAM = """
from pawl.chassis.lifecycle import run_service
from pawl.chassis.service import Service
from pawl.chassis.roles import ANYBODY
from pawl.chassis.settings import ServiceSettings, load
from tests.rpc.chassis.echo import ECHO_METHODS, EchoServicer, add_echo_to_server

async def main(stop):
    async with Service("echo", load(ServiceSettings)) as service:
        database = await service.open_database()
        await service.open_bus()
        server = service.rpc_server()
        server.add(add_echo_to_server, EchoServicer(), callers=dict.fromkeys(ECHO_METHODS, ANYBODY))
        await service.serve(server, stop)

run_service(main)
"""


def start(**variables: str) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], **ENVIRONMENT, **variables}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.PIPE, text=True)


async def test_a_service_starts_serves_and_stops(database_url: str, nats_url: str, tmp_path: Path) -> None:
    """OPS-2, OPS-5."""
    address_file = tmp_path / "addresses.json"
    process = start(
        PAWL_DATABASE_URL=database_url,
        PAWL_DATABASE_UNSAFE="true",
        PAWL_NATS_URL=nats_url,
        PAWL_ADDRESS_FILE=str(address_file),
        PAWL_INSTANCE_ID="i-1",
    )
    await wait_for_file(address_file, process)
    addresses = json.loads(address_file.read_text())
    async with open_channel(addresses["grpc"], service_key=LOCAL_KEY) as channel:
        assert await EchoStub(channel).call("unary", "hello") == ["hello"]

    def get(path: str) -> bytes:
        with urlopen(f"http://{addresses['metrics']}{path}") as response:
            body: bytes = response.read()
            return body

    health = json.loads(await asyncio.to_thread(get, "/healthz"))
    assert health["serving"] is True
    assert health["checks"]["database"] == "ok"
    metrics = (await asyncio.to_thread(get, "/metrics")).decode()
    assert 'pawl_echo_rpc_requests_total{code="OK",method="/test.v1.EchoService/Unary"} 1.0' in metrics
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0, log
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert events[-2:] == ["grpc.stopped", "process.stopped"]
    assert all(json.loads(line)["instance"] == "i-1" for line in log.splitlines())


def test_a_service_refuses_a_database_that_may_lose_what_it_acknowledged(database_url: str) -> None:
    """I1: by one sentence, and with the exit code that says that another try is no use."""
    process = start(PAWL_DATABASE_URL=database_url)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "fsync is off" in json.loads(log.splitlines()[-1])["error"]
    assert "Traceback" not in log


async def test_a_service_that_others_can_reach_says_once_that_it_speaks_no_tls(
    database_url: str, tmp_path: Path
) -> None:
    """It is not refused: something in front may end TLS."""
    address_file, keys = tmp_path / "addresses.json", tmp_path / "keys.json"
    keys.write_text("[]")
    files = certificates.write(tmp_path, "echo", trustme.CA())
    for environment, warnings in ((dict[str, str](), 1), (files.environment, 0)):
        process = start(
            PAWL_DATABASE_URL=database_url,
            PAWL_DATABASE_UNSAFE="true",
            PAWL_ADDRESS_FILE=str(address_file),
            PAWL_LOCAL_KEY="",
            PAWL_API_KEYS_FILE=str(keys),
            PAWL_METRICS_LISTEN="0.0.0.0:0",
            **environment,
        )
        await wait_for_file(address_file, process)
        address_file.unlink()
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 0, log
        assert [json.loads(line)["event"] for line in log.splitlines()].count("tls.absent") == warnings
