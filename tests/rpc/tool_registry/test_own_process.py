"""A tool with its own process cannot affect the registry or other calls (TOOL-9)."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pawl.chassis.ids import StoreId
from pawl.errors import DependencyUnavailable
from pawl.tool_registry.catalog.ports import TooCostly
from pawl.tool_registry.sources.process.helpers import Helpers
from pawl.tool_registry.sources.process.runner import ProcessRunner
from pawl.tool_registry.sources.python.modules import load_modules
from pawl.tool_registry.sources.python.runner import PythonRunner
from pawl.tools import Reversible, ToolContext, tool
from tests.poll import until
from tests.rpc.refusals import raises
from tests.rpc.tool_registry import process_tools
from tests.rpc.tool_registry.registry import Registry, content, error_of, outcome, running
from tests.rpc.tool_registry.world import is_gone

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="of Linux only")


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.setenv("PAWL_DATABASE_URL", "a secret of the registry")
    (module,) = load_modules(["tests.rpc.tool_registry.process_tools"])

    @tool(category=module.tools[0].definition.category)
    async def calm() -> str:
        """Run in the registry's process."""
        return "calm"

    secrets = {"acme": {"api_key": "hunter2-of-acme"}, "other": {"other_key": "hunter3-of-other"}}
    async with running(database_url, tmp_path, [calm, *module.tools], secrets=secrets) as registry:
        yield registry


async def pids(path: Path) -> list[int]:
    await until(path.exists)
    return [int(pid) for pid in path.read_text().split()]


async def test_a_tool_process_does_not_inherit_anything_from_the_registry(registry: Registry) -> None:
    responses = [response async for response in registry.stream("look_round", {"number": "7"}, traceparent="t")]
    assert responses[0].progress.message == "looking"
    found = content(responses[-1].result)
    pid = found.pop("pid")
    assert pid != os.getpid()
    assert found == {
        "number": 7,
        "leads_its_session": True,
        "settings": [],
        "sockets": 1,
        "cores": [0, 0],
        "key": "call",
        "user": "ann",
        "traceparent": "t",
        "deadline_is_ahead": True,
    }
    assert content(await registry.run("look_round", {"number": 8}, call="next"))["pid"] != pid
    assert is_gone(pid)


@linux_only
async def test_cancelled_tool_leaves_no_processes(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    asked = asyncio.ensure_future(registry.run("linger", {"path": str(path)}))
    started = await pids(path)
    assert b"tool_processes_busy 1.0" in registry.metrics.text()
    assert (await registry.cancel()).stopped
    assert (outcome(await asked), [pid for pid in started if not is_gone(pid)]) == ("CANCELLED CANCELLED", [])
    assert b"tool_processes_busy 0.0" in registry.metrics.text()


async def test_calls_above_the_process_limit_wait(registry: Registry, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two", "three")]
    asked = [asyncio.ensure_future(registry.run("tidy_up", {"path": str(path)}, call=path.name)) for path in paths[:2]]
    for path in paths[:2]:
        await pids(path)
    waiting = asyncio.ensure_future(registry.run("tidy_up", {"path": str(paths[2])}, call="three"))

    await until(lambda: registry.executor.running_count == 3)
    assert not paths[2].exists()
    assert (await registry.cancel("one")).stopped
    assert (tmp_path / "one.end").read_text() == "tidied", "a cancelled tool can tidy up"
    await pids(paths[2])
    for call in ("two", "three"):
        await registry.cancel(call)
    await asyncio.gather(*asked, waiting)


async def test_process_crash_becomes_the_result_of_the_call(registry: Registry) -> None:
    """TOOL-4: the tool only gets secrets of its call's store, and they are removed from the result."""
    rows = {
        "burn": "misbehave used more than 1 s of CPU time",
        "burn and ignore": "misbehave was killed by signal 9 (SIGKILL)",
        "segfault": "misbehave was killed by signal 11 (SIGSEGV)",
        "leave": "misbehave ended its process with exit code 3 before it returned",
        "exit": "TOOL_ERROR: SystemExit.",
        "raise": "TOOL_ERROR: ValueError.",
        "tell": "ask again tomorrow",
        "kill guard": "misbehave lost its process before it returned",
        "garble": "misbehave wrote to its process's channel to the registry",
        "object": "misbehave returned a value that cannot be passed on: object is not JSON",
        "nan": "misbehave returned a value that cannot be passed on: ",
    }
    if sys.platform == "linux":
        rows |= dict.fromkeys(("eat", "share"), "misbehave used more than 64 MiB of memory")
        rows["threads"] = "TOOL_ERROR: RuntimeError."
    for number, (way, said) in enumerate(rows.items()):
        error = error_of(await registry.run("misbehave", {"way": way}, call=f"c{number}"))
        assert (error.startswith(said), "password" in error) == (True, False), way
    assert content(await registry.run("calm", call="after")) == "calm"
    large = await registry.run("misbehave", {"way": "larger"}, call="large")
    assert outcome(large) == "FAILED RESULT_TOO_LARGE"
    assert content(large)["error"].endswith("over the limit of 1048576: request less data")
    error = error_of(await registry.run("pay_and_crash"))
    assert error.endswith("exit code 1 before it returned; it may still have taken effect")
    for fails, result in ((False, "said"), (True, {"error": "it was \ufffd"})):
        said_so = await registry.run("say_half_a_character", {"fails": fails}, call=f"half{fails}")
        assert content(said_so) == result, "output of a tool does not end its process"
    assert content(await registry.run("tell_secret", {"name": "api_key"})) == "it is [secret]"
    failed = await registry.run("tell_secret", {"name": "other_key"}, call="b")
    assert content(failed) == {"error": "no secret named 'other_key' is configured"}


async def test_an_undo_is_returned_and_idle_processes_end_with_their_runner() -> None:
    before = set(psutil.Process().children(recursive=True))
    async with ProcessRunner(PythonRunner(threads_max=1), processes_max=1) as runner:
        value: Any = await runner.start(process_tools.undo, {}, ToolContext()).result()
        assert set(psutil.Process().children(recursive=True)) - before
    assert set(psutil.Process().children(recursive=True)) - before == set()
    assert isinstance(value, Reversible)
    assert (value.value, value.inverse.tool_name, value.inverse.arguments) == ("done", "redo", {"n": 1})


ACME = StoreId("acme")

# The factorial of this number takes longer than any timeout
ENDLESS = 10**8


@pytest.fixture
async def helpers() -> AsyncIterator[Helpers]:
    async with Helpers(processes_max=2) as helpers:
        yield helpers


async def test_a_helper_over_its_limit_is_killed_and_another_one_continues(helpers: Helpers) -> None:
    await raises(TooCostly, helpers.run(ACME, math.factorial, ENDLESS, cpu_seconds=0.2))
    await raises(TooCostly, helpers.run(ACME, bytearray, 2**40, cpu_seconds=5))
    await raises(ValueError, helpers.run(ACME, math.sqrt, -1, cpu_seconds=5), match="math domain error")
    assert await helpers.run(ACME, math.factorial, 5, cpu_seconds=5) == 120


async def test_externally_killed_helper_is_replaced_transparently(helpers: Helpers) -> None:
    """A machine that runs out of memory kills processes too, and then the job is not at fault."""
    os.kill(await helpers.run(ACME, os.getpid, cpu_seconds=5), signal.SIGKILL)
    assert await helpers.run(ACME, math.factorial, 5, cpu_seconds=5) == 120
    await raises(TooCostly, helpers.run(ACME, os.abort, cpu_seconds=5))


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
async def test_failed_helper_start_is_a_temporary_error(
    executable: str, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        await raises(DependencyUnavailable, helpers.run(ACME, math.factorial, 5, cpu_seconds=5))
    assert await helpers.run(ACME, math.factorial, 5, cpu_seconds=5) == 120


async def test_store_does_not_wait_for_other_stores_jobs(helpers: Helpers) -> None:
    """A store uses one helper process at a time, and one always stays free for other stores."""
    waiting = [
        asyncio.ensure_future(helpers.run(StoreId(store), math.factorial, ENDLESS, cpu_seconds=600))
        for store in ("slow", "slow", "slower", "acme")
    ]
    await helpers.run(StoreId("other"), math.factorial, 5, cpu_seconds=1)
    for store in ("acme", "slow"):  # Even the store's own pages and documents do not delay its calls
        assert await helpers.run(StoreId(store), math.factorial, 5, cpu_seconds=1) == 120
    assert not any(each.done() for each in waiting)
