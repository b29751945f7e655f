"""Four processes that call each other with certificates, and the programs of people who call them."""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import pytest_asyncio
import trustme

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.chassis import tls
from pawl.chassis.clock import SystemClock
from pawl.chassis.rpc_client import open_channel
from pawl.event.v1 import run_pb2
from pawl.launcher import Suite, SuiteOptions
from pawl.launcher.services import STAGES
from pawl.worker import Worker
from tests import certificates, commands
from tests.keys import LOCAL_KEY
from tests.poll import until

SERVICES = [spec.name for stage in STAGES for spec in stage]
ROUNDS = 3

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def authorities() -> list[trustme.CA]:
    """Authorities one after the other; each certificate is of the first, and all are trusted."""
    return [trustme.CA() for _ in range(ROUNDS + 1)]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Not pytest's own: that is closed to the account under which PostgreSQL runs when the tests run as root.
    with tempfile.TemporaryDirectory(prefix="pawl-tls-") as folder:
        yield Path(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(folder: Path, authorities: list[trustme.CA]) -> AsyncIterator[Suite]:
    """A suite in which each service has a certificate of its own."""
    issued = {name: certificates.write(folder, name, *authorities) for name in SERVICES}
    options = SuiteOptions(
        data=folder / "data",
        local_key=LOCAL_KEY,
        service_environment={name: files.environment for name, files in issued.items()},
    )
    async with Suite(options) as suite:
        yield suite


def pawl(*arguments: str, keyboard: str = "", **variables: str) -> commands.Done:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PAWL_", "OPENAI_"))}
    return commands.pawl(*arguments, environment={**kept, "COLUMNS": "200", **variables}, keyboard=keyboard)


async def test_a_run_of_four_processes_with_certificates(suite: Suite, folder: Path) -> None:
    """The command line finds key and authority in the data folder; with an address it is given them."""
    done = await asyncio.to_thread(pawl, "run", "what is 17 * 23?", PAWL_DATA=str(suite.folder.path))
    assert (done.code, done.errors) == (0, "")
    assert "391" in done.output
    address = suite.endpoints.addresses("agent-loop")[0]
    given = {"PAWL_API_KEY": LOCAL_KEY, "PAWL_DATA": str(folder / "nothing")}
    roots = str(folder / "agent-loop-authority.pem")
    done = await asyncio.to_thread(pawl, "--address", address, "--ca", roots, "runs", **given)
    assert (done.code, done.errors) == (0, "")
    assert "17 * 23" in done.output
    done = await asyncio.to_thread(pawl, "--address", address, "runs", PAWL_TLS_CA_FILE=roots, **given)
    assert done.code == 0


async def test_the_command_line_says_what_is_wrong_with_tls(suite: Suite, folder: Path) -> None:
    address = suite.endpoints.addresses("agent-loop")[0]
    given = {"PAWL_API_KEY": LOCAL_KEY, "PAWL_DATA": str(folder / "nothing")}
    done = await asyncio.to_thread(pawl, "--address", address, "runs", **given)
    assert (done.code, done.errors.splitlines()[-1]) == (
        2,
        f"{address} speaks TLS. Give the certificate of its authority with --ca FILE or PAWL_TLS_CA_FILE.",
    )
    foreign = certificates.write(folder, "foreign", trustme.CA()).authority
    done = await asyncio.to_thread(pawl, "--address", address, "--ca", str(foreign), "runs", **given)
    assert (done.code, done.errors.splitlines()[-1].partition(". ")[0]) == (
        2,
        f"The certificate at {address} is of another authority than --ca or PAWL_TLS_CA_FILE gives",
    )
    nats = (suite.endpoints.nats or "").removeprefix("nats://")
    done = await asyncio.to_thread(pawl, "--address", nats, "--ca", str(foreign), "runs", **given)
    assert (done.code, done.errors.splitlines()[-1]) == (
        2,
        f"{nats} does not speak TLS. Leave out --ca and PAWL_TLS_CA_FILE.",
    )


async def test_a_conversation_and_a_worker_over_tls(
    suite: Suite, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of a session goes to one replica, the worker to the registry."""
    data = str(suite.folder.path)
    words = "what is 17 * 23?\n/quit\n"
    done = await asyncio.to_thread(lambda: pawl("chat", keyboard=words, PAWL_DATA=data))
    assert (done.code, done.errors) == (0, "")
    assert "391" in done.output
    (address,) = suite.endpoints.addresses("tool-registry")
    monkeypatch.setenv("PAWL_TLS_CA_FILE", str(folder / "tool-registry-authority.pem"))
    for number, authority in enumerate((None, folder / "tool-registry-authority.pem")):
        worker = Worker(address, name=f"billing-{number}", api_key=LOCAL_KEY, authority=authority)

        async def pay() -> str:
            """Pay."""
            return "paid"

        pay.__name__ = f"pay_{number}"
        worker.tool(category="SAFE")(pay)
        running = asyncio.create_task(worker.run())

        async def is_there(name: str = pay.__name__) -> bool:
            return f"{name}\t" in (await asyncio.to_thread(pawl, "tools", PAWL_DATA=data)).output

        await until(is_there)
        worker.drain()
        await running
        monkeypatch.delenv("PAWL_TLS_CA_FILE", raising=False)


async def test_metrics_and_health_are_pages_over_tls(suite: Suite, folder: Path) -> None:
    for name in SERVICES:
        trusting = ssl.create_default_context(cafile=folder / f"{name}-authority.pem")
        replica = suite.endpoints.services[name][0]

        def get(path: str, address: str = replica.metrics, context: ssl.SSLContext = trusting) -> bytes:
            with urlopen(f"https://{address}{path}", context=context, timeout=60) as response:  # ours
                body: bytes = response.read()
                return body

        assert b'"serving":true' in await asyncio.to_thread(get, "/healthz")
        assert b"rpc_requests_total" in await asyncio.to_thread(get, "/metrics")


async def test_no_run_fails_while_all_certificates_and_their_authority_change(
    suite: Suite, folder: Path, authorities: list[trustme.CA]
) -> None:
    """One client keeps its channel, and the services theirs."""
    trusted = tls.of_client(folder / "agent-loop-authority.pem", SystemClock())
    stop, ended = asyncio.Event(), list[run_pb2.Run]()
    (address,) = suite.endpoints.addresses("agent-loop")
    async with open_channel(address, service_key=LOCAL_KEY, tls=trusted, deadline_seconds=60) as channel:
        stub = AgentServiceStub(channel)

        async def keep_running(user: str) -> None:
            metadata = (("pawl-user", user),)
            while not stop.is_set():
                started = await stub.StartRun(agent_pb2.StartRunRequest(text="what is 17 * 23?"), metadata=metadata)
                request = agent_pb2.WatchRunRequest(run_id=started.run.run_id)
                async for _ in stub.WatchRun(request, metadata=metadata):
                    pass
                found = await stub.GetRun(agent_pb2.GetRunRequest(run_id=started.run.run_id), metadata=metadata)
                ended.append(found.run)

        people = [asyncio.create_task(keep_running(f"user-{number}")) for number in range(2)]
        for turn in range(1, ROUNDS + 1):
            in_turn = [*authorities[turn:], *authorities[:turn]]
            for name in SERVICES:
                certificates.write(folder, name, *in_turn)
            before = len(ended)

            async def is_taken_up(turn: int = turn, before: int = before) -> bool:
                renewed = suite.process("agent-loop").log.path.read_text().count('"tls.channel_renewed"')
                assert not any(person.done() for person in people), await asyncio.gather(*people)
                return renewed >= 2 * turn and len(ended) > before

            await until(is_taken_up)
        stop.set()
        await asyncio.gather(*people)
    assert {run.state for run in ended} == {run_pb2.RUN_STATE_COMPLETED}
    log = suite.process("agent-loop").log.path.read_text()
    assert "rpc.unreachable" not in log.partition("grpc.listening")[2]
