"""The database roles of the containers: each service can do its work and access nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qs, quote, urlsplit

import asyncpg
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from pawl.chassis.process.start import StartError
from pawl.launcher.postgres import binaries
from pawl.server.process import log_setup
from pawl.server.process.service import Service
from pawl.server.process.settings import ServiceSettings
from tests.keys import ENVIRONMENT
from tests.rpc.refusals import raises

ROOT = Path(__file__).parents[3]
SCHEMAS = ("job_store", "tool_registry", "notifier")
APPEND_ONLY = {"job_store": ("key_events", "settings_changes"), "tool_registry": ("audit",)}
PASSWORD = 'it\'s a "password"'  # needs quoting
TABLES = "SELECT relname FROM pg_class WHERE relnamespace = $1::text::regnamespace AND relkind = 'r'"

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


def make_roles(database_url: str) -> None:
    """Run the script that creates the roles in the PostgreSQL container."""
    url = urlsplit(database_url)
    asked = {name: values[0] for name, values in parse_qs(url.query).items()}
    made = subprocess.run(
        ["sh", str(ROOT / "deploy/postgres-roles.sh")],
        env={
            "PATH": f"{binaries()}{os.pathsep}{os.environ['PATH']}",
            "PGHOST": asked.get("host") or url.hostname or "",
            "PGPORT": str(url.port or asked.get("port") or 5432),
            "PGPASSWORD": url.password or "",
            "POSTGRES_USER": url.username or asked.get("user") or "postgres",
            "POSTGRES_DB": url.path.removeprefix("/"),
            **{f"POSTGRES_{schema.upper()}_PASSWORD": PASSWORD for schema in SCHEMAS},
            **{f"POSTGRES_{schema.upper()}_OWNER_PASSWORD": PASSWORD for schema in SCHEMAS},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr


@pytest.fixture
async def url(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(log_setup, "configure", lambda **_: None)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield database_url
    admin = await asyncpg.connect(database_url)
    for role in await admin.fetch("SELECT rolname FROM pg_roles WHERE rolname ~ '^(job_store|tool_registry|notifier)'"):
        await admin.execute(f"DROP OWNED BY {role['rolname']} CASCADE")
        await admin.execute(f"DROP ROLE {role['rolname']}")
    await admin.close()


@pytest.fixture
def roles(url: str) -> str:
    make_roles(url)
    return url


def url_as(url: str, role: str) -> str:
    host = urlsplit(url).netloc.rpartition("@")[2]
    return urlsplit(url)._replace(netloc=f"{role}:{quote(PASSWORD)}@{host}").geturl()


async def start(schema: str, url: str, owner_url: str | None) -> list[str]:
    """Prepare the database as a service does at its start, and return the logged warnings."""
    settings = ServiceSettings(
        database_url=SecretStr(url),
        database_owner_url=SecretStr(owner_url) if owner_url else None,
        database_unsafe=True,
    )
    with capture_logs() as entries:
        async with Service(schema, settings) as service:
            await service.create_schema(await service.open_database(), schema, append_only=APPEND_ONLY.get(schema, ()))
    return [entry["event"] for entry in entries if entry["log_level"] == "warning" and "unsafe" not in entry["event"]]


async def start_all(url: str) -> None:
    for schema in SCHEMAS:
        assert await start(schema, url_as(url, schema), url_as(url, f"{schema}_owner")) == []


async def refused(connection: Connection, *statements: str) -> None:
    for statement in statements:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)
            pytest.fail(f"PostgreSQL lets this role {statement}")


async def test_each_database_role_can_use_only_its_own_schema(roles: str) -> None:
    """OPS-1: a role cannot even read other schemas."""
    await start_all(roles)
    admin = await asyncpg.connect(roles)
    tables = {schema: [row["relname"] for row in await admin.fetch(TABLES, schema)] for schema in SCHEMAS}
    await admin.close()
    for role in SCHEMAS:
        connection = await asyncpg.connect(url_as(roles, role))
        for schema, table in ((name, table) for name in SCHEMAS for table in tables[name]):
            if schema == role:
                await connection.fetch(f"SELECT * FROM {schema}.{table}")  # noqa: S608
                # As retention does.
                if table not in (*APPEND_ONLY.get(schema, ()), "schema_version"):
                    await connection.execute(f"DELETE FROM {schema}.{table} WHERE false")  # noqa: S608
            else:
                await refused(
                    connection,
                    f"SELECT 1 FROM {schema}.{table}",  # noqa: S608
                    f"INSERT INTO {schema}.{table} DEFAULT VALUES",
                    f"DELETE FROM {schema}.{table}",  # noqa: S608
                    f"TRUNCATE {schema}.{table}",
                    f"DROP TABLE {schema}.{table}",
                )
        await connection.close()


async def test_no_role_creates_objects(roles: str) -> None:
    """OPS-1: the roles of the services own no tables and cannot change a schema."""
    await start_all(roles)
    for role in SCHEMAS:
        connection = await asyncpg.connect(url_as(roles, role))
        assert not await connection.fetchval(
            "SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls FROM pg_roles WHERE rolname = current_user"
        )
        assert not await connection.fetchval(
            "SELECT count(*) FROM pg_class WHERE pg_has_role(current_user, relowner, 'MEMBER')"
        )
        await refused(
            connection,
            "CREATE SCHEMA mine",
            "CREATE TABLE public.mine ()",
            "CREATE TEMPORARY TABLE mine ()",
            "CREATE ROLE mine",
            *(f"CREATE TABLE {schema}.mine ()" for schema in SCHEMAS),
            *(f"CREATE FUNCTION {schema}.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'" for schema in SCHEMAS),
            *(f"DROP SCHEMA {schema} CASCADE" for schema in SCHEMAS),
            f"SET ROLE {role}_owner",
            f"UPDATE {role}.schema_version SET version = ''",  # noqa: S608
            f"DELETE FROM {role}.schema_version",  # noqa: S608
        )
        await connection.close()


ENTRY = {
    **dict.fromkeys(
        ["store_id", "kind", "user_id", "run_id", "call_id", "tool_name", "verdict", "reason", "by_user_id"], "x"
    ),
    **dict.fromkeys(["arguments_sha256", "result_sha256", "prev_hash", "hash", "agent_name"], "x"),
    **dict.fromkeys(["credential_id", "delegate_user_id", "by_credential_id", "by_delegate_user_id"], "x"),
    **dict.fromkeys(["seq", "tool_version", "result_bytes", "duration_us"], 1),
    "recorded_at": datetime(2026, 1, 1, tzinfo=UTC),
}


async def add_entry(connection: Connection) -> None:
    places = ", ".join(f"${number + 1}" for number in range(len(ENTRY)))
    await connection.execute(
        f"INSERT INTO tool_registry.audit ({', '.join(ENTRY)}) VALUES ({places})",  # noqa: S608
        *ENTRY.values(),
    )


async def test_audit_entries_cannot_be_changed_or_deleted(roles: str) -> None:
    """OPS-1: PostgreSQL itself refuses the statements."""
    await start_all(roles)
    registry = await asyncpg.connect(url_as(roles, "tool_registry"))
    await add_entry(registry)
    for role in SCHEMAS:
        connection = await asyncpg.connect(url_as(roles, role))
        await refused(
            connection,
            "UPDATE tool_registry.audit SET verdict = 'ALLOW'",
            "DELETE FROM tool_registry.audit",
            "TRUNCATE tool_registry.audit",
            "SELECT * FROM tool_registry.audit FOR UPDATE",
            "INSERT INTO tool_registry.audit SELECT * FROM tool_registry.audit"
            " ON CONFLICT (store_id, seq) DO UPDATE SET verdict = 'ALLOW'",
            "ALTER TABLE tool_registry.audit RENAME TO away",
            "ALTER TABLE tool_registry.audit ADD COLUMN more int",
            f"ALTER TABLE tool_registry.audit OWNER TO {role}",
            "ALTER TABLE tool_registry.audit DISABLE TRIGGER ALL",
            "ALTER TABLE tool_registry.audit ENABLE ROW LEVEL SECURITY",
            "CREATE TRIGGER mine BEFORE INSERT ON tool_registry.audit FOR EACH ROW"
            " EXECUTE FUNCTION suppress_redundant_updates_trigger()",
            "CREATE RULE mine AS ON INSERT TO tool_registry.audit DO INSTEAD NOTHING",
            "DROP INDEX tool_registry.audit_decisions",
            "DROP TABLE tool_registry.audit",
            "SET session_replication_role = replica",
        )
        await connection.close()
    assert await registry.fetchval("SELECT verdict FROM tool_registry.audit") == "x"
    await registry.close()


async def test_key_events_cannot_be_changed_and_old_ones_are_deleted(roles: str) -> None:
    """OPS-1: job-store's role can insert and read key events, but can delete only old ones."""
    await start_all(roles)
    connection = await asyncpg.connect(url_as(roles, "job_store"))
    columns = "kind, store_id, key_id, key_name, user_id, roles, by_store_id, by_user_id, by_delegate_user_id"
    add = (
        f"INSERT INTO job_store.key_events (time, {columns}, by_credential_id)"  # noqa: S608
        " SELECT now() - make_interval(days => $1), $2, '', '', '', '', '{}', '', '', '', ''"
        " FROM generate_series(1, $3)"
    )
    await connection.execute(add, 91, "KEY_CREATED", 3)
    await connection.execute(add, 89, "KEY_CREATED", 4)
    await refused(
        connection,
        "UPDATE job_store.key_events SET kind = ''",
        "DELETE FROM job_store.key_events",
        "TRUNCATE job_store.key_events",
        "SELECT * FROM job_store.key_events FOR UPDATE",
        "ALTER TABLE job_store.key_events DISABLE TRIGGER ALL",
        "DROP TABLE job_store.key_events",
        "CREATE OR REPLACE FUNCTION job_store.remove_old_key_events(rows_max integer) RETURNS bigint LANGUAGE sql"
        " AS 'SELECT 1'",
        "ALTER FUNCTION job_store.remove_old_key_events RESET ALL",
        "DROP FUNCTION job_store.remove_old_key_events",
    )
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        notifier = await asyncpg.connect(url_as(roles, "notifier"))
        try:
            await notifier.fetchval("SELECT job_store.remove_old_key_events(10)")
        finally:
            await notifier.close()
    assert [await connection.fetchval("SELECT job_store.remove_old_key_events(2)") for _ in range(4)] == [2, 1, 0, 0]
    counts = await connection.fetch("SELECT kind, count(*) FROM job_store.key_events GROUP BY kind")
    assert dict(map(tuple, counts)) == {"KEY_CREATED": 4}
    await connection.close()


async def test_excess_privileges_are_revoked(roles: str) -> None:
    urls = url_as(roles, "tool_registry"), url_as(roles, "tool_registry_owner")
    await start("tool_registry", *urls)
    owner = await asyncpg.connect(urls[1])
    await owner.execute("GRANT ALL ON tool_registry.audit TO tool_registry")
    assert await start("tool_registry", urls[0], None) == ["database.append_only_unprotected"]
    assert await start("tool_registry", *urls) == []
    await owner.close()
    connection = await asyncpg.connect(urls[0])
    await refused(connection, "UPDATE tool_registry.audit SET verdict = ''")
    await connection.close()


async def test_services_work_with_a_single_role_and_warn_about_its_privileges(url: str) -> None:
    for owner_url in (None, url):
        assert await start("tool_registry", url, owner_url) == ["database.append_only_unprotected"]


async def test_a_role_that_owns_nothing_can_start_on_an_existing_schema(roles: str) -> None:
    service, owner = url_as(roles, "notifier"), url_as(roles, "notifier_owner")
    await raises(
        StartError,
        start("notifier", service, None),
        match=r"schema notifier: permission denied .*PAWL_DATABASE_OWNER_URL",
    )
    await start("notifier", service, owner)
    await start("notifier", service, None)
