"""Fixtures for all tests: real servers, started once per session, and fake time and ids."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import structlog
import trustme
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from pawl.chassis.ids import IdSource
from pawl.chassis.process import logs
from pawl.server.process import log_setup
from tests import servers
from tests.fakes.manual_clock import ManualClock

_TESTS = Path(__file__).parent

# A slow machine must not fail a test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


# Folders of slow tests. They start first, so that quick tests keep all cores busy to the end.
_LONG_FIRST = ("system/suite", "system/cli", "chaos", "simulation", "system", "ledger", "leaks", "rpc")
# Ids that mark the docstrings of promises: I1 to I23, except I13 (tenancy), and the requirement on roles.
_PROMISE = re.compile(r"\bI([1-9]|1\d|2[0-3])\b|\bOPS-1\b")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort slow tests to the front, and mark tests whose docstring names a promise."""
    items.sort(key=_turn)
    for item in items:
        if _PROMISE.search(getattr(getattr(item, "function", None), "__doc__", None) or ""):
            item.add_marker("promise")


# A file with long tests that share nothing.
_SHARE_NOTHING = "tests/system/docs/test_blocks.py"
# Folders whose files share a suite of processes. Each goes to one worker, or every worker would start a suite.
_SHARE_A_SUITE = tuple(f"tests/system/{name}/" for name in ("access", "cli", "console", "suite"))


class _FolderScheduling(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_SHARE_NOTHING):
            return nodeid
        return next((folder for folder in _SHARE_A_SUITE if nodeid.startswith(folder)), super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Run all files of a shared suite in one worker, and distribute other files, and pages of docs/, one by one."""
    return _FolderScheduling(config, log) if config.getoption("dist") == "loadfile" else None


_FAILURES_MAX = 5
_failures: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the failures of tests that share a suite."""
    if report.failed:
        _failures[report.nodeid.partition("::")[0].rpartition("/")[0]] += 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail immediately if a shared suite is broken, because each test would wait a long time for it."""
    folder = item.nodeid.partition("::")[0].rpartition("/")[0]
    if f"{folder}/" in _SHARE_A_SUITE and _failures[folder] >= _FAILURES_MAX:
        pytest.fail(f"{_failures[folder]} tests of {folder} failed before this one: see those", pytrace=False)


def _turn(item: pytest.Item) -> int:
    path = str(item.path.relative_to(_TESTS))
    return next((turn for turn, folder in enumerate(_LONG_FIRST) if path.startswith(folder)), len(_LONG_FIRST))


@pytest.fixture(autouse=True, scope="session")
def plain_logs() -> None:
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.stdlib.add_log_level, renderer],
        cache_logger_on_first_use=False,
    )
    logs.route(log_setup.to_structlog)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ids(clock: ManualClock) -> IdSource:
    return IdSource(clock)


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a real PostgreSQL server. Tests use `database_url`, a database of their own."""
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
    """The URL of a real nats-server with JetStream. Each test uses its own subjects."""
    with tempfile.TemporaryDirectory(prefix="pawl-nats-") as folder, servers.NatsServer(Path(folder)) as server:
        yield server.url
