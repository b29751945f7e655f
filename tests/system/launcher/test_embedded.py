"""The embedded servers: real PostgreSQL and NATS, private, durable, and back after anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import httpx2
import nats
import nats.js.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client

from pawl.chassis.bus import flush
from pawl.chassis.start import StartError
from pawl.launcher import Suite, SuiteOptions
from pawl.launcher.nats import LIFECYCLE_STREAM

pytestmark = pytest.mark.asyncio(loop_scope="module")

EMBEDDED = {"database_url": None, "nats_url": None, "stages": ()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite() -> AsyncIterator[Suite]:
    """One suite for all tests that leave it running."""
    with tempfile.TemporaryDirectory(prefix="pawl-suite-") as folder:
        async with Suite(SuiteOptions(data=Path(folder) / "data", stages=(), scripted_model=False)) as suite:
            yield suite


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def query(suite: Suite, sql: str) -> object:
    connection = await asyncpg.connect(suite.database_url)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


async def dial(suite: Suite) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection to NATS."""
    address = urlsplit(suite.nats_url())
    return await asyncio.open_connection(address.hostname, address.port)


async def connect(suite: Suite, user: str, problems: list[Exception] | None = None) -> Client:
    async def note(error: Exception) -> None:
        if problems is not None:
            problems.append(error)

    return await nats.connect(suite.nats_url(user), error_cb=note, allow_reconnect=False)


async def test_postgres_is_durable_and_local(suite: Suite) -> None:
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


async def test_postgres_wants_the_password_and_the_role_is_no_superuser(suite: Suite) -> None:
    """I22"""
    host, port = (suite.endpoints.postgres or "").split(":")
    for user in ("pawl", "postgres"):
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(host=host, port=int(port), user=user, password="guess", database="pawl")
    assert await query(suite, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
    await query(suite, "CREATE SCHEMA anything")


async def test_acknowledged_rows_survive_kill_9_and_restart(suite: Suite) -> None:
    """I1"""
    await query(suite, "CREATE TABLE kept (n int)")
    await query(suite, "INSERT INTO kept VALUES (7)")
    suite.kill("postgres")
    await suite.wait_ready("postgres")
    assert await query(suite, "SELECT n FROM kept") == 7
    await suite.restart_postgres()
    assert await query(suite, "SELECT n FROM kept") == 7


async def test_a_suite_started_again_has_its_data_and_its_secrets(options: Callable[..., SuiteOptions]) -> None:
    async with Suite(options(**EMBEDDED)) as suite:
        await query(suite, "CREATE TABLE kept (n int)")
        password = suite.nats_url().split("@")[0]
        # As after a crash of the machine: the number in the note now belongs to somebody else.
        note = suite.folder.postgres / "postmaster.pid"
        text = note.read_text().split("\n", 1)[1]
    note.write_text(f"{os.getpid()}\n{text}")
    async with Suite(options(**EMBEDDED)) as suite:
        assert await query(suite, "SELECT count(*) FROM kept") == 0
        assert suite.nats_url().split("@")[0] == password


async def test_a_cluster_of_another_postgres_is_refused_and_left_alone(options: Callable[..., SuiteOptions]) -> None:
    """I23"""
    async with Suite(options(**EMBEDDED)) as suite:
        version = suite.folder.postgres / "PG_VERSION"
    version.write_text("16\n")
    with pytest.raises(StartError, match="was made by PostgreSQL 16, and this Pawl embeds 18"):
        await Suite(options(**EMBEDDED)).start()
    assert version.read_text() == "16\n"


async def test_lost_secrets_are_told_apart_from_a_slow_start(options: Callable[..., SuiteOptions]) -> None:
    async with Suite(options(**EMBEDDED)) as suite:
        secret = suite.folder.path / "secrets" / "postgres-superuser"
    secret.unlink()
    with pytest.raises(StartError, match=r"does not take the password in .*postgres-superuser"):
        await Suite(options(**EMBEDDED)).start()


async def test_files_of_the_suite_are_private(suite: Suite) -> None:
    """I22"""
    open_to_others = []
    for root, folders, names in os.walk(suite.folder.path):
        for path in (Path(root, name) for name in (*folders, *names)):
            # What runs there makes and removes files meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if not path.is_symlink() and path.stat().st_mode & 0o077:
                    open_to_others.append(str(path))
    assert open_to_others == []
    # Started by root, PostgreSQL has an account of its own, which must be able to pass.
    assert suite.folder.path.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)


async def test_nats_lets_nobody_in_without_a_password(suite: Suite) -> None:
    reader, writer = await dial(suite)
    writer.write(b"CONNECT {}\r\nPING\r\n")
    assert b"-ERR 'Authorization Violation'" in await reader.read()
    writer.close()


async def test_each_nats_user_publishes_what_its_service_does_and_nothing_else(suite: Suite) -> None:
    """I13"""
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
    """Which of the subjects a user may not publish on."""
    problems: list[Exception] = []
    client = await connect(suite, user, problems)
    for subject in [*subjects, "the.end"]:
        await client.publish(subject, b"x")
    await until(lambda: any("the.end" in str(problem) for problem in problems))
    await client.close()
    return {subject for subject in subjects if any(f'"{subject}"'.lower() in str(p).lower() for p in problems)}


async def test_a_subscriber_hears_what_the_ledger_says_and_reads_the_past(suite: Suite) -> None:
    """NOTE-2"""
    await suite.wipe_nats()
    subscriber, ledger = await connect(suite, "subscriber"), await connect(suite, "job_store")
    await ledger.jetstream().add_stream(name=LIFECYCLE_STREAM, subjects=["pawl.v1.*.lifecycle.>"])
    heard = await subscriber.subscribe("pawl.v1.>")
    await flush(subscriber)
    await ledger.jetstream().publish("pawl.v1.s.lifecycle.completed", b"done", headers={"Nats-Msg-Id": "evt_1"})
    assert (await heard.next_msg(timeout=60)).data == b"done"
    past = await subscriber.jetstream().get_msg(LIFECYCLE_STREAM, seq=1)
    assert (past.data, past.headers) == (b"done", {"Nats-Msg-Id": "evt_1"})
    await subscriber.close()
    await ledger.close()


async def test_the_notifier_can_keep_a_durable_consumer(suite: Suite) -> None:
    """NOTE-1"""
    await suite.wipe_nats()
    ledger, notifier = await connect(suite, "job_store"), await connect(suite, "notifier")
    await ledger.jetstream().add_stream(name=LIFECYCLE_STREAM, subjects=["pawl.v1.*.lifecycle.>"])
    await ledger.jetstream().publish("pawl.v1.s.lifecycle.completed", b"done")
    pulling = await notifier.jetstream().pull_subscribe(
        "pawl.v1.*.lifecycle.>", durable="notifier", stream=LIFECYCLE_STREAM
    )
    [message] = await pulling.fetch(1, timeout=60)
    await message.ack_sync()
    await notifier.close()
    await ledger.close()


async def test_nats_keeps_its_stream_over_a_restart_and_loses_it_when_wiped(suite: Suite) -> None:
    await suite.wipe_nats()
    url = suite.nats_url("job_store")
    ledger = await connect(suite, "job_store")
    await ledger.jetstream().add_stream(name=LIFECYCLE_STREAM, subjects=["pawl.v1.*.lifecycle.>"])
    await ledger.close()
    await suite.stop_nats()
    with pytest.raises(ConnectionRefusedError):
        await dial(suite)
    await suite.start_nats()
    assert suite.nats_url("job_store") == url
    ledger = await connect(suite, "job_store")
    assert (await ledger.jetstream().stream_info(LIFECYCLE_STREAM)).state.messages == 0
    await ledger.close()
    await suite.wipe_nats()
    ledger = await connect(suite, "job_store")
    with pytest.raises(nats.js.errors.NotFoundError):
        await ledger.jetstream().stream_info(LIFECYCLE_STREAM)
    await ledger.close()


async def test_the_model_is_the_scripted_one_unless_told_otherwise(
    options: Callable[..., SuiteOptions], tmp_path: Path
) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"otherwise": "error"}')
    arguments = ("--script", str(script))
    async with Suite(options(stages=(), scripted_model=True, model_arguments=arguments)) as suite:
        base_url = suite.endpoints.model_base_url
        assert base_url is not None
        async with httpx2.AsyncClient(timeout=60.0) as http:
            assert (await http.get(f"{base_url}/models")).json()["data"][0]["id"] == "pawl-scripted"
        suite.kill("model")
        await suite.wait_ready("model")
        assert suite.endpoints.model_base_url == base_url
    async with Suite(options(stages=())) as suite:
        assert suite.endpoints.model_base_url is None


async def test_several_suites_run_side_by_side(data: Path) -> None:
    first, second = (
        Suite(SuiteOptions(data=data.with_name(name), stages=(), scripted_model=False)) for name in ("one", "two")
    )
    await asyncio.gather(first.start(), second.start())
    try:
        assert first.database_url != second.database_url
        assert await query(first, "SELECT 1") == await query(second, "SELECT 1")
    finally:
        await asyncio.gather(first.stop(), second.stop())
