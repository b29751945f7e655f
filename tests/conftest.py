"""Fixtures for all tests: real servers, started once a session, and the seams for time and ids."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import structlog
from hypothesis import HealthCheck, settings

from pawl.chassis.ids import IdSource
from tests import servers
from tests.fakes.manual_clock import ManualClock

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

_TESTS = Path(__file__).parent

# A slow machine is no reason for a test to fail.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


_LONG_FIRST = ("system", "chaos", "ledger", "simulation", "leaks", "rpc")
"""Folders of slow tests, which begin first: so that the small ones fill all cores to the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long to the front."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(_TESTS).parts[0]
    return _LONG_FIRST.index(folder) if folder in _LONG_FIRST else len(_LONG_FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Give each folder of tests/system to one worker: its files share one suite. Other files go one by one."""
    if config.getoption("dist") not in {"loadfile", "loadgroup"}:
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415  # only where there is xdist

    class FolderScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return file.rpartition("/")[0] if file.startswith("tests/system/") else file

    return FolderScheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def plain_logs() -> None:
    """Show logs with failed tests, without colours and drawings."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.stdlib.add_log_level, renderer],
        cache_logger_on_first_use=False,
    )


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still until the test moves it."""
    return ManualClock()


@pytest.fixture
def ids(clock: ManualClock) -> IdSource:
    """A source of ids on the test's clock."""
    return IdSource(clock)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a real PostgreSQL; a test uses `database_url`, which is its own."""
    with tempfile.TemporaryDirectory(prefix="pawl-postgres-") as folder, servers.postgres(Path(folder)) as url:
        yield url


@pytest.fixture
async def database_url(postgres_url: str) -> AsyncIterator[str]:
    """The URL of an empty database that only this test uses."""
    name = f"test_{os.urandom(6).hex()}"
    admin = await asyncpg.connect(postgres_url)
    try:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        yield urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await admin.close()


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """The URL of a real nats-server with JetStream; a test uses subjects of its own."""
    with tempfile.TemporaryDirectory(prefix="pawl-nats-") as folder, servers.NatsServer(Path(folder)) as server:
        yield server.url
