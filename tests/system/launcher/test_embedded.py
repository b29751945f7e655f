"""The embedded servers: real PostgreSQL and NATS, private, durable, and restarted after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import httpx2
import nats
import nats.js.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client

from pawl.chassis.process.start import StartError
from pawl.launcher import Suite, SuiteOptions
from pawl.launcher.folder import SecretFiles
from pawl.launcher.nats import LIFECYCLE_STREAM
from pawl.launcher.postgres import Postgres
from tests.poll import until
from tests.servers import open_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite() -> AsyncIterator[Suite]:
    """PostgreSQL, NATS and the scripted model, restarted after a crash."""
    with open_folder() as folder:
        options = SuiteOptions(data=folder / "data", stages=(), scripted_model=True)
        async with Suite(options) as suite:
            await query(suite, "CREATE TABLE before (password text)")
            await query(suite, "INSERT INTO before VALUES ($1)", password_of(suite))
        # By now another process has the recorded pid.
        (suite.folder.postgres / "postmaster.pid").write_text(f"{os.getpid()}\n{suite.folder.postgres}\n")
        async with Suite(options) as suite:
            yield suite


def password_of(suite: Suite) -> str:
    return suite.nats_url().split("@")[0].rpartition(":")[2]


async def query(suite: Suite, sql: str, *arguments: object) -> object:
    connection = await asyncpg.connect(suite.database_url)
    try:
        return await connection.fetchval(sql, *arguments)
    finally:
        await connection.close()


async def dial(suite: Suite) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(suite.nats_url())
    return await asyncio.open_connection(address.hostname, address.port)


async def connect(suite: Suite, user: str, problems: list[Exception] | None = None) -> Client:
    async def note(error: Exception) -> None:
        if problems is not None:
            problems.append(error)

    return await nats.connect(suite.nats_url(user), error_cb=note, allow_reconnect=False)


async def test_postgres_is_durable_and_only_reachable_locally(suite: Suite) -> None:
    expected = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "max_connections": "200",
        "listen_addresses": "127.0.0.1",
        "server_encoding": "UTF8",
        "password_encryption": "scram-sha-256",
    }
    assert {name: await query(suite, f"SHOW {name}") for name in expected} == expected
    assert not list(suite.folder.path.rglob(".s.PGSQL*"))


async def test_postgres_requires_a_password_and_its_role_is_not_a_superuser(suite: Suite) -> None:
    """I22: a guessed password is refused."""
    host, port = (suite.endpoints.postgres or "").split(":")
    for user in ("pawl", "postgres"):
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(host=host, port=int(port), user=user, password="guess", database="pawl")
    assert await query(suite, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
    await query(suite, "CREATE SCHEMA anything")


async def test_restarted_suite_keeps_data_secrets_and_model(suite: Suite) -> None:
    assert await query(suite, "SELECT password FROM before") == password_of(suite)
    async with httpx2.AsyncClient(timeout=60.0) as http:
        models = (await http.get(f"{suite.endpoints.model_base_url}/models")).json()
    assert models["data"][0]["id"] == "pawl-scripted"


async def test_a_cluster_with_another_version_or_other_secrets_is_refused_and_left_unchanged(
    suite: Suite, tmp_path: Path
) -> None:
    """I23: the error explains the difference."""
    _, _, port = (suite.endpoints.postgres or "").rpartition(":")
    secrets = SecretFiles(tmp_path / "secrets")
    other = Postgres(folder=tmp_path / "cluster", port=int(port), secrets=secrets, account=None)
    with pytest.raises(StartError, match=r"rejects the password in .*postgres-superuser"):
        await other.spec().probe()
    other.folder.mkdir()
    (other.folder / "PG_VERSION").write_text("16\n")
    with pytest.raises(StartError, match="was created by PostgreSQL 16, but this version of Pawl embeds 18"):
        await other.prepare()
    assert (other.folder / "PG_VERSION").read_text() == "16\n"


async def test_files_of_the_suite_are_readable_only_by_their_owner(suite: Suite) -> None:
    """I22: other users have no rights to any file or folder."""
    open_to_others = []
    for root, folders, names in os.walk(suite.folder.path):
        for path in (Path(root, name) for name in (*folders, *names)):
            # The running servers create and remove files during the walk.
            with contextlib.suppress(FileNotFoundError):
                if not path.is_symlink() and path.stat().st_mode & 0o077:
                    open_to_others.append(str(path))
    assert open_to_others == []
    # If root starts it, PostgreSQL has its own account, which needs access.
    assert suite.folder.path.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)


async def test_nats_requires_a_password(suite: Suite) -> None:
    reader, writer = await dial(suite)
    writer.write(b"CONNECT {}\r\nPING\r\n")
    assert b"-ERR 'Authorization Violation'" in await reader.read()
    writer.close()


async def test_each_nats_user_can_publish_only_to_its_services_subjects(suite: Suite) -> None:
    """I13: all other subjects are refused."""
    allowed = {
        "job_store": {"pawl.v1.s.run.r.events", "pawl.v1.s.lifecycle.completed", "pawl.internal.v1.work"},
        "agent_loop": {"pawl.internal.v1.work"},
        "notifier": {"pawl.v1.s.user.u.notifications"},
        "tool_registry": set(),
        "subscriber": set(),
    }
    subjects = sorted(set().union(*allowed.values()))
    never = [
        "$SYS.REQ.SERVER.PING",
        f"$JS.API.STREAM.DELETE.{LIFECYCLE_STREAM}",
        f"$JS.API.CONSUMER.CREATE.{LIFECYCLE_STREAM}.c",
    ]
    refused = {user: await refusals(suite, user, [*subjects, *never]) for user in allowed}
    assert {user: set(subjects) - refused[user] for user in allowed} == allowed
    for user in ("agent_loop", "tool_registry", "subscriber"):
        assert set(never) <= refused[user]
    assert {user for user in allowed if never[0] not in refused[user]} == set()
    assert {user for user in allowed if never[1] not in refused[user]} == {"job_store"}


async def refusals(suite: Suite, user: str, subjects: list[str]) -> set[str]:
    problems: list[Exception] = []
    client = await connect(suite, user, problems)
    for subject in [*subjects, "the.end"]:
        await client.publish(subject, b"x")
    await until(lambda: any("the.end" in str(problem) for problem in problems))
    await client.close()
    return {subject for subject in subjects if any(f'"{subject}"'.lower() in str(p).lower() for p in problems)}
