"""docker-compose.yml works: its commands, environment and files start the suite, which answers a client."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import httpx2
import pytest

from pawl.client import AsyncClient
from pawl.launcher import nats
from pawl.launcher.options import SuiteOptions
from pawl.launcher.postgres import ROLES, binaries
from pawl.launcher.suite import Suite
from tests.system.deploy.containers import ROOT, Containers, fill_in

pytestmark = pytest.mark.long
_KEY = "key-of-ann-0123456789"
_IN_ORDER = ("job-store", "tool-registry", "notifier", "agent-loop", "gateway", "mailbox")


async def test_containers_start_from_the_compose_file_and_answer_a_client() -> None:
    """The embedded PostgreSQL and scripted model stand in for the image of PostgreSQL and the model server."""
    with tempfile.TemporaryDirectory(prefix="pawl-compose-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL's account needs access.
        options = SuiteOptions(data=folder / "data", stages=(), scripted_model=True)
        async with Suite(options) as suite:
            database = urlsplit(suite.database_url)
            variables = fill_in(
                (ROOT / "deploy/compose.env.example").read_text(),
                OPENAI_BASE_URL=suite.endpoints.model_base_url or "",
                PAWL_MODEL="pawl-scripted",
            )
            assert database.port
            async with Containers(folder, variables, {5432: database.port}) as containers:
                containers.write_keys([{"key": _KEY, "store_id": "acme", "user_id": "ann", "roles": ["member"]}])
                await _prepare(suite, containers.parts["postgres"]["environment"])
                await containers.start("nats", nats.program())
                for service in _IN_ORDER:
                    await containers.start(service)
                await _answers(containers)


async def _prepare(suite: Suite, environment: dict[str, str]) -> None:
    """Do to the embedded server what the image of PostgreSQL does to its empty volume."""
    server = urlsplit(suite.database_url)
    password = (suite.folder.path / "secrets/postgres-superuser").read_text().strip()
    admin = await asyncpg.connect(
        host=server.hostname, port=server.port, user="postgres", password=password, database="postgres"
    )
    await admin.execute("DROP DATABASE pawl WITH (FORCE)")
    for role in ROLES:
        await admin.execute(f"DROP ROLE {role}")
    await admin.execute("CREATE DATABASE pawl")
    await admin.close()
    address = {"PGHOST": str(server.hostname), "PGPORT": str(server.port), "PGPASSWORD": password}
    path = {"PATH": f"{binaries()}{os.pathsep}{os.environ['PATH']}"}
    roles = await asyncio.create_subprocess_exec(
        "sh", ROOT / "deploy/postgres-roles.sh", env=path | address | environment
    )
    assert await roles.wait() == 0


async def _answers(containers: Containers) -> None:
    async with AsyncClient([f"127.0.0.1:{containers.port(7601)}"], api_key=_KEY) as pawl:
        run = await pawl.start("what is 17 * 23?")
        text = "".join([piece async for piece in pawl.text(run.run_id)])
    assert "391" in text
    async with httpx2.AsyncClient(trust_env=False) as http:
        for port in range(7610, 7616):
            answer = await http.get(f"http://127.0.0.1:{containers.port(port)}/metrics")
            assert answer.is_success
        assert (await http.get(f"http://127.0.0.1:{containers.port(7600)}/healthz")).is_success
