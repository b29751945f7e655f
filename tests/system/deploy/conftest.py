"""PostgreSQL and NATS as docker-compose.yml has them, the scripted model, and the containers of the services."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from pawl.launcher import nats
from pawl.launcher.options import SuiteOptions
from pawl.launcher.postgres import ROLES, binaries
from pawl.launcher.suite import Suite
from tests.servers import open_folder
from tests.system.deploy.containers import ROOT, Containers, fill_in

KEY = "key-of-ann-0123456789"


@pytest.fixture
async def containers() -> AsyncIterator[Containers]:
    """The embedded PostgreSQL stands in for its image, and the scripted model for the model server."""
    with open_folder() as folder:
        options = SuiteOptions(data=folder / "data", stages=(), scripted_model=True)
        async with Suite(options) as suite:
            variables = fill_in(
                (ROOT / "deploy/compose.env.example").read_text(),
                OPENAI_BASE_URL=suite.endpoints.model_base_url or "",
                PAWL_MODEL="pawl-scripted",
            )
            port = urlsplit(suite.database_url).port
            assert port
            async with Containers(folder, variables, {5432: port}) as containers:
                containers.write_keys([{"key": KEY, "store_id": "acme", "user_id": "ann", "roles": ["member"]}])
                await _prepare(suite, containers.parts["postgres"]["environment"])
                await containers.start("nats", nats.program())
                yield containers


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
    script = ROOT / "deploy/postgres-roles.sh"
    roles = await asyncio.create_subprocess_exec("sh", script, env=path | address | environment)
    assert await roles.wait() == 0
