"""Fixtures for all tests: real servers, started once a session, and the seams for time and ids."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from pawl.chassis.ids import IdSource
from tests import servers
from tests.fakes.manual_clock import ManualClock

_TESTS = Path(__file__).parent

# A slow machine is no reason for a test to fail.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


_LONG_FIRST = ("system", "chaos", "ledger", "simulation", "leaks", "rpc")
"""Folders of slow tests. They start first, so that quick tests keep all cores busy to the end."""
_SHARING = ("tests/system/suite/", "tests/system/console/", "tests/system/cli/")
"""Folders whose tests share one suite of processes."""
_PROMISE = re.compile(r"\bI([1-9]|1\d|2[0-3])\b|\bOPS-1\b")
"""Ids of promises, of which I13 is tenancy, and of the requirement of roles, in the docstring of a test."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort slow tests to the front and mark tests of promises."""
    items.sort(key=_turn)
    for item in items:
        if _PROMISE.search(getattr(getattr(item, "function", None), "__doc__", None) or ""):
            item.add_marker("promise")


def _turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(_TESTS).parts[0]
    return _LONG_FIRST.index(folder) if folder in _LONG_FIRST else len(_LONG_FIRST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFixture:
    """Give each file to one worker, and each folder that shares a suite."""
    return ByFixture(config, log)


class ByFixture(LoadFileScheduling):
    """Distributes tests so that each expensive fixture is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in _SHARING if file.startswith(folder)), file)


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
