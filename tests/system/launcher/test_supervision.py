"""Processes are started in order, started again when they die, and stopped in the reverse order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pawl.chassis.endpoints import read_endpoints
from pawl.chassis.start import StartError
from pawl.launcher import Suite, SuiteOptions, orphans

Options = Callable[..., SuiteOptions]


def given(suite: Suite, name: str) -> dict[str, str]:
    """The environment that a stand-in got."""
    found: dict[str, str] = json.loads((suite.folder.run / f"{name}.environment").read_text())
    return found


def content(path: str) -> str:
    return Path(path).read_text()


def alive(pid: int | None) -> bool:
    return pid is not None and orphans.started(pid) is not None


async def test_each_process_is_told_where_to_listen_whom_to_call_and_where_its_secrets_are(options: Options) -> None:
    async with Suite(
        options(replicas={"first": 2}, environment={"PAWL_LOG_LEVEL": "debug", "PAWL_INSTANCE_ID": "x"})
    ) as suite:
        environment = given(suite, "second")
        assert environment["PAWL_FIRST_ADDRESS"].split(",") == suite.endpoints.addresses("first")
        assert len(set(suite.endpoints.addresses("first"))) == 2
        assert environment["PAWL_LOG_LEVEL"] == "debug"
        assert "PAWL_INSTANCE_ID" not in environment
        assert "PAWL_SECOND_ADDRESS" not in environment
        assert content(environment["PAWL_DATABASE_URL_FILE"]) == "postgresql://nowhere\n"
        assert content(environment["PAWL_NATS_URL_FILE"]) == "nats://nowhere\n"
        assert len(content(environment["PAWL_SERVICE_KEY_FILE"])) > 32
        assert "PAWL_FIRST_ADDRESS" not in given(suite, "first")


async def test_each_suite_makes_a_key_of_its_own_and_keeps_it(options: Options) -> None:
    """OPS-1: also at home, so that what runs in a sandbox on this machine cannot call."""
    keys = []
    for _ in range(2):
        async with Suite(options()) as suite:
            path = Path(given(suite, "first")["PAWL_LOCAL_KEY_FILE"])
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert path.read_text().strip() == suite.local_key
            assert len(suite.local_key) > 32
            keys.append(suite.local_key)
    assert keys[0] == keys[1]


async def test_a_suite_with_keys_of_its_users_has_no_local_one(options: Options, tmp_path: Path) -> None:
    async with Suite(options()) as suite:
        path = suite.folder.path / "secrets" / "local-key"
        assert path.exists()
    async with Suite(options(environment={"PAWL_API_KEYS_FILE": str(tmp_path / "keys.json")})) as suite:
        assert "PAWL_LOCAL_KEY_FILE" not in given(suite, "first")
        assert not path.exists()


async def test_endpoints_follow_what_happens(options: Options) -> None:
    async with Suite(options()) as suite:
        data = suite.folder.path
        assert read_endpoints(data) == suite.endpoints
        assert suite.endpoints.services["first"][0].ready
        await suite.stop_process("first")
        found = read_endpoints(data)
        assert found is not None
        assert found.services["first"][0].pid is None
        assert found.services["first"][0].grpc == suite.endpoints.addresses("first")[0]
    assert read_endpoints(data) is None


async def test_a_process_that_dies_is_started_again_on_the_same_address(options: Options) -> None:
    """OPS-5"""
    async with Suite(options()) as suite:
        address, pid = suite.endpoints.addresses("second"), suite.pid("second")
        suite.kill("second")
        await suite.wait_ready("second")
        assert suite.pid("second") != pid
        assert suite.endpoints.addresses("second") == address
        assert suite.process("second").restarts == 1
        assert suite.pid("first") is not None
        assert suite.process("first").restarts == 0


async def test_a_process_that_was_stopped_on_purpose_stays_down(options: Options) -> None:
    async with Suite(options()) as suite:
        await asyncio.gather(*(suite.stop_process("second") for _ in range(3)))
        assert suite.pid("second") is None
        assert suite.process("second").restarts == 0
        await suite.start_process("second")
        assert alive(suite.pid("second"))


async def test_the_stop_goes_in_the_reverse_order(options: Options) -> None:
    async with Suite(options()) as suite:
        pids = [suite.pid("first"), suite.pid("second")]
    assert (suite.folder.run / "stopped").read_text().split() == ["second", "first"]
    assert not any(alive(pid) for pid in pids)
    await suite.stop()


async def test_a_process_that_does_not_stop_is_killed(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Suite(options(service_environment={"second": {"STAND_IN": "stubborn"}})) as suite:
        process, pid = suite.process("second"), suite.pid("second")
        object.__setattr__(process.spec, "grace_seconds", 0.1)
        await suite.stop_process("second")
        assert not alive(pid)


async def test_a_frozen_process_can_be_stopped(options: Options) -> None:
    async with Suite(options()) as suite:
        suite.kill("second", number=signal.SIGSTOP)
        await suite.stop_process("second")
    assert (suite.folder.run / "stopped").read_text().split() == ["second", "first"]


async def test_what_cannot_work_as_told_ends_the_start_with_its_own_words(options: Options) -> None:
    suite = Suite(options(service_environment={"second": {"STAND_IN": "usage"}}))
    with pytest.raises(StartError, match=r"^second cannot start: PAWL_NONSENSE: is required$"):
        await suite.start()
    assert (suite.folder.run / "stopped").read_text().split() == ["first"]


async def test_tools_that_could_not_be_loaded_are_told_for_the_newest_start_only(options: Options) -> None:
    broken = {"STAND_IN": "broken"}
    async with Suite(options(service_environment={"first": broken, "second": broken})) as suite:
        assert suite.broken_tools == ["shop: error: shop.py:1: SyntaxError"]
    async with Suite(options()) as suite:
        assert suite.broken_tools == []


async def test_what_does_not_become_ready_ends_the_start(options: Options) -> None:
    suite = Suite(
        options(ready_seconds=0.5, stages=options().stages[1:], service_environment={"second": {"STAND_IN": "mute"}})
    )
    with pytest.raises(StartError, match=r"^second was not ready within 0\.5 seconds\. .*second\.log"):
        await suite.start()
    assert suite.pid("second") is None


async def test_a_start_that_is_cancelled_leaves_nothing_behind(options: Options) -> None:
    suite = Suite(options(service_environment={"second": {"STAND_IN": "mute"}}))
    starting = asyncio.create_task(suite.start())
    while not (suite.folder.run / "second.environment").exists():
        await asyncio.sleep(0.01)
    pids = [suite.pid("first"), suite.pid("second")]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(alive(pid) for pid in pids)


async def test_a_folder_serves_one_suite_at_a_time(options: Options) -> None:
    async with Suite(options(stages=())):
        with pytest.raises(StartError, match=rf"already runs on .*data \(process {os.getpid()}\)"):
            await Suite(options(stages=())).start()
    async with Suite(options(stages=())):
        pass
