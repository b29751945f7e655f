"""The roles that the containers give the services: each may do all that its service does, and touch nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import asyncpg
import pytest

from pawl.chassis.database import Database
from pawl.launcher.postgres import binaries

ROOT = Path(__file__).parents[3]
SCHEMAS = ("job_store", "tool_registry", "notifier")
PASSWORD = 'it\'s a "password"'  # with what needs quoting


@pytest.fixture
async def roles(database_url: str) -> AsyncIterator[str]:
    """A database made as the container makes it."""
    url = urlsplit(database_url)
    asked = {name: values[0] for name, values in parse_qs(url.query).items()}
    name = url.path.removeprefix("/")
    made = subprocess.run(  # noqa: ASYNC221  # a moment
        ["sh", str(ROOT / "deploy/postgres-roles.sh")],
        env={
            "PATH": f"{binaries()}{os.pathsep}{os.environ['PATH']}",
            "PGHOST": asked.get("host") or url.hostname or "",
            "PGPORT": str(url.port or asked.get("port") or 5432),
            "PGPASSWORD": url.password or "",
            "POSTGRES_USER": url.username or asked.get("user") or "postgres",
            "POSTGRES_DB": name,
            **{f"POSTGRES_{schema.upper()}_PASSWORD": PASSWORD for schema in SCHEMAS},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    yield database_url
    admin = await asyncpg.connect(database_url)
    for role in SCHEMAS:
        await admin.execute(f"DROP OWNED BY {role} CASCADE")
        await admin.execute(f"DROP ROLE {role}")
    await admin.close()


def url_as(url: str, role: str) -> str:
    host = urlsplit(url).netloc.rpartition("@")[2]
    return urlsplit(url)._replace(netloc=f"{role}:{quote(PASSWORD)}@{host}").geturl()


async def test_each_service_works_with_a_role_that_owns_its_schema_and_nothing_else(roles: str) -> None:
    """OPS-1."""
    for schema in SCHEMAS:
        async with Database(url_as(roles, schema), application_name="test") as database:
            await database.migrate(schema, f"pawl.{schema}.adapters.sql.migrations")
    for role in SCHEMAS:
        connection = await asyncpg.connect(url_as(roles, role))
        assert not await connection.fetchval(
            "SELECT rolsuper OR rolcreaterole OR rolcreatedb FROM pg_roles WHERE rolname = current_user"
        )
        for schema in SCHEMAS:
            reading = connection.fetchval(f"SELECT count(*) FROM {schema}.migrations")  # noqa: S608  # one of ours
            if schema == role:
                assert await reading
            else:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await reading
        for forbidden in ("CREATE SCHEMA mine", "CREATE TABLE public.mine ()", "CREATE ROLE mine"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(forbidden)
        await connection.close()
