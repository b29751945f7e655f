"""Processes start together, restart when they die, and stop in reverse order."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.replicas import read_endpoints
from pawl.launcher import Suite, SuiteOptions, orphans, plan, processes
from pawl.launcher.services import ServiceSpec
from pawl.launcher.up import run_until_signal
from tests import certificates
from tests.poll import until
from tests.tables import for_each

Options = Callable[..., SuiteOptions]

PROGRAM = str(Path(__file__).with_name("stand_in.py"))


def stand_in(name: str) -> ServiceSpec:
    return ServiceSpec(name=name, command=(sys.executable, "-I", "-S", PROGRAM), role="tool_registry")


@pytest.fixture
def options(tmp_path: Path) -> Options:
    bare: dict[str, Any] = {
        "stages": ((stand_in("first"),), (stand_in("second"),)),
        "ready_seconds": 120.0,
        "database_url": "postgresql://nowhere",
        "nats_url": "nats://nowhere",
        "scripted_model": False,
    }
    return lambda **more: SuiteOptions(data=tmp_path / "data", **bare | more)


def given(suite: Suite, name: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((suite.folder.run / f"{name}.environment").read_text())
    return found


def alive(*pids: int | None) -> bool:
    return any(pid is not None and orphans.started(pid) is not None for pid in pids)


def stopped(suite: Suite) -> list[str]:
    return (suite.folder.run / "stopped").read_text().split()


async def test_processes_get_peers_and_secrets_and_stop_in_reverse_order(
    options: Options,
) -> None:
    chosen = options(replicas={"first": 2}, environment={"PAWL_LOG_LEVEL": "debug", "PAWL_SERVICE_KEY": "x"})
    async with Suite(chosen) as suite:
        environment = given(suite, "second")
        addresses = suite.endpoints.addresses("first")
        assert (environment["PAWL_FIRST_ADDRESS"].split(","), len(set(addresses))) == (addresses, 2)
        assert environment["PAWL_LOG_LEVEL"] == "debug"
        assert not {"PAWL_SERVICE_KEY", "PAWL_SECOND_ADDRESS"} & environment.keys()
        assert "PAWL_FIRST_ADDRESS" not in given(suite, "first")
        secrets = {
            name: Path(environment[f"PAWL_{name}_FILE"]).read_text()
            for name in ("DATABASE_URL", "NATS_URL", "SERVICE_KEY")
        }
        assert len(secrets.pop("SERVICE_KEY")) > 32
        assert secrets == {"DATABASE_URL": "postgresql://nowhere\n", "NATS_URL": "nats://nowhere\n"}
        assert read_endpoints(suite.folder.path) == suite.endpoints
        assert suite.endpoints.services["first"][0].ready
        await suite.stop_process("first")
        found: Any = read_endpoints(suite.folder.path)
        assert (found.services["first"][0].pid, found.services["first"][0].grpc) == (None, addresses[0])
        await suite.start_process("first")
        pids = [suite.pid("first"), suite.pid("first", 1), suite.pid("second")]
        assert None not in pids
    assert (stopped(suite), alive(*pids)) == (["first", "second", "first-1", "first"], False)
    assert read_endpoints(suite.folder.path) is None
    await suite.stop()


async def test_services_start_together(options: Options) -> None:
    """The first service becomes ready only once the second one runs, which has the first one's address by then."""
    async with Suite(options(service_environment={"first": {"STAND_IN": "waiting"}})) as suite:
        assert given(suite, "second")["PAWL_FIRST_ADDRESS"] == suite.endpoints.addresses("first")[0]


@for_each(("fault", "seconds"), [("late", 3600.0), ("alone", 0.0)])
async def test_a_starting_http_service_waits_some_time_for_its_dependencies(
    options: Options, monkeypatch: pytest.MonkeyPatch, fault: str, seconds: float
) -> None:
    monkeypatch.setattr(plan, "_DEPENDENCIES_SECONDS", seconds)
    async with Suite(options(service_environment={"second": {"STAND_IN": fault}})) as suite:
        assert (suite.folder.run / "second.well").exists() is (fault == "late")
        (suite.folder.run / "second.well").unlink(missing_ok=True)


async def test_a_suite_keeps_a_local_key_until_users_have_keys(options: Options, tmp_path: Path) -> None:
    """OPS-1: even on one machine, sandboxed programs cannot call the services."""
    keys = set()
    for _ in range(2):
        async with Suite(options(stages=(options().stages[0],))) as suite:
            path = Path(given(suite, "first")["PAWL_LOCAL_KEY_FILE"])
            assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
            assert path.read_text().strip() == suite.local_key
            keys.add(suite.local_key)
    assert [len(key) > 32 for key in keys] == [True], "one key, kept over the restart"
    async with Suite(options(environment={"PAWL_API_KEYS_FILE": str(tmp_path / "keys.json")})) as suite:
        assert "PAWL_LOCAL_KEY_FILE" not in given(suite, "first")
        assert not path.exists()


async def test_a_crashed_process_restarts_at_its_address_but_a_stopped_one_does_not(
    options: Options,
) -> None:
    """OPS-5: other processes are not restarted."""
    async with Suite(options()) as suite:
        address, pid = suite.endpoints.addresses("second"), suite.pid("second")
        suite.kill("second")
        await suite.wait_ready("second")
        assert (suite.pid("second") == pid, suite.endpoints.addresses("second")) == (False, address)
        assert [suite.process(name).restarts for name in ("first", "second")] == [0, 1]
        await asyncio.gather(*(suite.stop_process("second") for _ in range(3)))
        assert (suite.pid("second"), suite.process("second").restarts) == (None, 1)
        await suite.start_process("second")
        assert alive(suite.pid("second"))


async def test_a_process_that_does_not_stop_is_killed(options: Options) -> None:
    async with Suite(options(service_environment={"second": {"STAND_IN": "stubborn"}})) as suite:
        process, pid = suite.process("second"), suite.pid("second")
        object.__setattr__(process.spec, "grace_seconds", 0.1)
        suite.kill("first", number=signal.SIGSTOP)
        await suite.stop_process("second")
        assert not alive(pid)
    assert stopped(suite) == ["first"]


async def test_an_unresponsive_process_is_restarted(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process speaks HTTPS, as the gateway may, and freezes once it is ready."""
    files = certificates.write(tmp_path, "first", trustme.CA())
    monkeypatch.setattr(processes, "_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(processes, "SILENT_SECONDS_MAX", 2.0)
    async with Suite(options(environment=files.environment)) as suite:
        await suite.stop_process("first")
        await suite.start_process("first")
        frozen = suite.pid("first")
        suite.kill("first", number=signal.SIGSTOP)
        await until(lambda: suite.process("first").restarts == 1)
        await suite.wait_ready("first")
        assert not alive(frozen)


async def test_a_failed_start_gives_a_reason_and_leaves_no_process(options: Options) -> None:
    for fault, more, reason in (
        ("usage", {}, r"^second cannot start: PAWL_NONSENSE is required$"),
        (
            "mute",
            {"ready_seconds": 0.5, "stages": options().stages[1:]},
            r"^second was not ready within 0\.5 seconds\. .*second\.log",
        ),
    ):
        suite = Suite(options(service_environment={"second": {"STAND_IN": fault}}, **more))
        with pytest.raises(StartError, match=reason):
            await suite.start()
        assert not list(suite.folder.run.glob("*.json")), fault
    suite = Suite(options(service_environment={"second": {"STAND_IN": "mute"}}))
    (suite.folder.run / "second.environment").unlink(missing_ok=True)
    starting = asyncio.create_task(suite.start())
    while not (suite.folder.run / "second.environment").exists():
        await asyncio.sleep(0.01)
    pids = [suite.pid("first"), suite.pid("second")]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive(*pids), "after a cancelled start"


async def test_broken_tools_are_reported_for_the_latest_start_only(options: Options) -> None:
    broken = {"STAND_IN": "broken"}
    error = "shop: error: shop.py:1: SyntaxError"
    for environment, tools in (({"first": broken, "second": broken}, [error]), ({}, [])):
        async with Suite(options(service_environment=environment)) as suite:
            assert suite.broken_tools == tools


async def test_a_suite_with_a_deleted_data_folder_stops_with_a_clear_error(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run_until_signal.__globals__, "_POLL_SECONDS", 0.05)
    suite = Suite(options())
    ready = asyncio.Event()

    async def note(_: Suite) -> None:
        ready.set()

    running = asyncio.create_task(run_until_signal(suite, note))
    await asyncio.wait_for(ready.wait(), 120)
    pids = [suite.pid(name) for name in ("first", "second")]
    shutil.rmtree(suite.folder.path)
    suite.kill("first")
    with pytest.raises(StartError, match=r"data folder .* is no longer usable"):
        await asyncio.wait_for(running, 120)
    assert not alive(*pids)
