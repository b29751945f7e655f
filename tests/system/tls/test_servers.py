"""Real NATS and PostgreSQL servers over TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme

from pawl.chassis.process.start import StartError
from pawl.chassis.rpc import tls
from pawl.server.bus.connection import Bus
from pawl.server.db.database import Database
from pawl.server.process.metrics import Metrics
from tests import certificates
from tests.certificates import Files
from tests.servers import NatsServer

# The message with which a PostgreSQL client requests TLS.
_SSL_REQUEST = bytes.fromhex("0000000804d2162f")


def bus_to(url: str, context: Callable[[], ssl.SSLContext] | None) -> Bus:
    return Bus(url, name="test", metrics=Metrics("test"), tls=context)


@pytest.fixture
def nats(tmp_path: Path, authority: trustme.CA) -> Iterator[NatsServer]:
    files = certificates.write(tmp_path, "nats", authority)
    settings = f'tls {{ cert_file: "{files.certificate}", key_file: "{files.key}", ca_file: "{files.authority}",'
    with NatsServer(tmp_path, f"{settings} verify: true }}") as server:
        yield server


async def test_bus_connects_over_tls_with_the_service_certificate(
    nats: NatsServer, tmp_path: Path, authority: trustme.CA
) -> None:
    own = certificates.write(tmp_path, "job-store", authority)
    context = tls.of_bus(own.authority, own.certificate, own.key)
    for url in (nats.url.replace("nats://", "tls://"), nats.url):
        async with bus_to(url, context) as bus:
            await bus.wait_connected()
            await bus.publish_all([("subject", b"data", {})])


async def _is_refused(url: str, context: Callable[[], ssl.SSLContext] | None) -> bool:
    async with bus_to(url, context) as bus:
        await bus._tried.wait()  # the end of the first attempt
        return not bus.connected


async def test_bus_trusts_only_the_configured_authority(
    nats: NatsServer, tmp_path: Path, authority: trustme.CA
) -> None:
    url = nats.url.replace("nats://", "tls://")
    foreign = certificates.write(tmp_path, "foreign", trustme.CA())
    own = certificates.write(tmp_path, "job-store", authority)
    contexts = (
        tls.of_bus(foreign.authority, own.certificate, own.key),
        tls.of_bus(own.authority, foreign.certificate, foreign.key),
        tls.of_bus(own.authority, None, None),
        None,
    )
    assert [await _is_refused(url, context) for context in contexts] == [True] * 4


async def test_bus_with_a_tls_url_never_uses_plain_text(nats_url: str, tmp_path: Path, authority: trustme.CA) -> None:
    """A greeting without TLS may come from an attacker, who would get the password."""
    own = certificates.write(tmp_path, "job-store", authority)
    assert await _is_refused(nats_url.replace("nats://", "tls://user:secret@"), tls.of_bus(own.authority, None, None))


@pytest.fixture
async def database(database_url: str, tmp_path: Path, authority: trustme.CA) -> AsyncIterator[tuple[str, Files]]:
    """The URL and certificates of a PostgreSQL behind a TLS proxy, because the bundled PostgreSQL has no TLS."""
    files = certificates.write(tmp_path, "postgres", authority, names=("127.0.0.1",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    (folder,) = parse_qs(urlsplit(database_url).query)["host"]
    (socket,) = Path(folder).glob(".s.PGSQL.*[0-9]")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            if await reader.readexactly(8) == _SSL_REQUEST:
                writer.write(b"S")
                await writer.start_tls(context)
                inner_reader, inner_writer = await asyncio.open_unix_connection(socket)
                await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield f"postgresql://postgres@127.0.0.1:{port}{urlsplit(database_url).path}", files


def _database(url: str, mode: str, roots: Path, *, start_timeout_seconds: float = 60) -> Database:
    found = f"{url}?sslmode={mode}&sslrootcert={roots}"
    return Database(found, application_name="test", start_timeout_seconds=start_timeout_seconds)


async def test_database_connection_uses_tls_and_checks_the_certificate(database: tuple[str, Files]) -> None:
    url, files = database
    async with _database(url, "verify-full", files.authority) as connected:
        assert await connected.fetchval("SELECT 1") == 1
        await connected.ping()


async def test_database_with_untrusted_certificate_is_refused_with_a_clear_error(
    database: tuple[str, Files], tmp_path: Path
) -> None:
    url, files = database
    foreign = certificates.write(tmp_path, "foreign", trustme.CA())
    for address, roots in ((url, foreign.authority), (url.replace("127.0.0.1", "localhost"), files.authority)):
        with pytest.raises(StartError, match="PAWL_DATABASE_URL: the database's certificate is not trusted"):
            await _database(address, "verify-full", roots).__aenter__()
    with pytest.raises(StartError, match="PAWL_DATABASE_URL: "):
        await _database(url, "verify-full", tmp_path / "missing", start_timeout_seconds=1).__aenter__()
