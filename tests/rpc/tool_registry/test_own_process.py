"""Tools with a process of their own: whatever they do there, nobody else notices. TOOL-9."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pawl.tool_registry.adapters.process.runner import ProcessRunner
from pawl.tool_registry.adapters.python.modules import load_modules
from pawl.tool_registry.adapters.python.runner import PythonRunner
from pawl.tools import Reversible, ToolContext, tool
from tests.poll import until
from tests.rpc.tool_registry import process_tools
from tests.rpc.tool_registry.registry import Registry, content, outcome, running
from tests.rpc.tool_registry.world import is_gone

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="of Linux only")


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.setenv("PAWL_DATABASE_URL", "a secret of the registry")
    (module,) = load_modules(["tests.rpc.tool_registry.process_tools"])

    @tool(category=module.tools[0].definition.category)
    async def calm() -> str:
        """Be a tool of the registry's own process."""
        return "calm"

    secrets = {"acme": {"api_key": "hunter2-of-acme"}, "other": {"other_key": "hunter3-of-other"}}
    async with running(database_url, tmp_path, [calm, *module.tools], secrets=secrets) as registry:
        yield registry


async def pids(path: Path) -> list[int]:
    async def is_written() -> bool:
        return path.exists()

    await until(is_written)
    return [int(pid) for pid in path.read_text().split()]


async def test_a_call_runs_in_a_process_that_has_nothing_of_the_registry(registry: Registry) -> None:
    responses = [response async for response in registry.stream("look_round", {"number": "7"})]
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
        "deadline_is_ahead": True,
    }
    again = content(await registry.run("look_round", {"number": 8}, call="next"))
    assert again["pid"] != pid
    assert is_gone(pid)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        pytest.param("eat", "misbehave used more than 64 MiB of memory", marks=linux_only),
        pytest.param("share", "misbehave used more than 64 MiB of memory", marks=linux_only),
        pytest.param("threads", "TOOL_ERROR: RuntimeError.", marks=linux_only),
        ("burn", "misbehave used more than 1 s of processor time"),
        ("burn and ignore", "misbehave was killed by signal 9 (SIGKILL)"),
        ("segfault", "misbehave was killed by signal 11 (SIGSEGV)"),
        ("abort", "misbehave was killed by signal 6 (SIGABRT)"),
        ("leave", "misbehave ended its process with exit code 3 before it returned"),
        ("exit", "TOOL_ERROR: SystemExit."),
        ("raise", "TOOL_ERROR: ValueError."),
        ("tell", "ask again tomorrow"),
        ("kill guard", "misbehave lost its process before it returned"),
        ("garble", "misbehave wrote into the channel of its process"),
        ("object", "misbehave returned what cannot be passed on: object is not JSON"),
        ("nan", "misbehave returned what cannot be passed on: "),
    ],
)
async def test_whatever_a_tool_does_to_its_process_is_its_result(registry: Registry, way: str, said: str) -> None:
    failed = await registry.run("misbehave", {"way": way})
    assert outcome(failed) == "FAILED TOOL_ERROR"
    assert content(failed)["error"].startswith(said)
    assert "password" not in str(content(failed))
    assert content(await registry.run("calm", call="after")) == "calm"


@pytest.mark.parametrize(("way", "count"), [("large", 1024 * 1024 + 2), ("larger", 20 * 1024 * 1024 + 2)])
async def test_a_result_has_the_limit_of_every_other(registry: Registry, way: str, count: int) -> None:
    failed = await registry.run("misbehave", {"way": way})
    assert outcome(failed) == "FAILED RESULT_TOO_LARGE"
    assert content(failed)["error"] == f"misbehave returned {count} bytes, the limit is 1048576: ask for less"


@pytest.mark.parametrize(("fails", "result"), [(False, "said"), (True, {"error": "it was ?"})])
async def test_what_a_tool_says_does_not_end_its_process(registry: Registry, fails: bool, result: Any) -> None:
    """Nobody would know of a call that it has had its effect."""
    assert content(await registry.run("say_half_a_character", {"fails": fails})) == result


async def test_a_tool_that_may_have_had_its_effect_is_said_to(registry: Registry) -> None:
    failed = await registry.run("pay_and_crash")
    assert content(failed)["error"].endswith("exit code 1 before it returned; it may have had its effect all the same")


@linux_only
async def test_after_a_timeout_nothing_of_a_tool_runs(registry: Registry, tmp_path: Path) -> None:
    """It holds the interpreter, so it cannot even be asked to stop; and it has children that hide."""
    path = tmp_path / "pids"
    await registry.run("undo", call="first")  # Now a process is ready.
    asked = asyncio.ensure_future(registry.run("linger", {"path": str(path)}, timeout_seconds=5))
    assert content(await registry.run("calm", call="meanwhile")) == "calm"
    failed = await asked
    assert outcome(failed) == "FAILED TOOL_TIMEOUT"
    left = [pid for pid in await pids(path) if not is_gone(pid)]
    assert not left


@linux_only
async def test_after_a_cancel_nothing_of_a_tool_runs(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    asked = asyncio.ensure_future(registry.run("linger", {"path": str(path)}))
    started = await pids(path)
    assert b"tool_processes_busy 1.0" in registry.metrics.text()
    answer = await registry.cancel()
    assert answer.stopped
    assert outcome(await asked) == "CANCELLED CANCELLED"
    assert [pid for pid in started if not is_gone(pid)] == []
    assert b"tool_processes_busy 0.0" in registry.metrics.text()


async def test_a_cancelled_tool_can_tidy_up(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    asked = asyncio.ensure_future(registry.run("tidy_up", {"path": str(path)}))
    await pids(path)
    assert (await registry.cancel()).stopped
    assert outcome(await asked) == "CANCELLED CANCELLED"
    assert (tmp_path / "pids.end").read_text() == "tidied"


async def test_secrets_are_asked_for_by_name_and_taken_out_of_the_result(registry: Registry) -> None:
    """TOOL-4: only those of the call's store."""
    assert content(await registry.run("tell_secret", {"name": "api_key"})) == "it is [secret]"
    failed = await registry.run("tell_secret", {"name": "other_key"}, call="b")
    assert content(failed) == {"error": "no secret named 'other_key' is configured"}


async def test_calls_beyond_the_limit_of_processes_wait(registry: Registry, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two", "three")]
    asked = [asyncio.ensure_future(registry.run("tidy_up", {"path": str(path)}, call=path.name)) for path in paths[:2]]
    for path in paths[:2]:
        await pids(path)
    waiting = asyncio.ensure_future(registry.run("tidy_up", {"path": str(paths[2])}, call="three"))

    async def runs() -> bool:
        return registry.executor.running_count == 3

    await until(runs)
    assert not paths[2].exists()
    await registry.cancel("one")
    await pids(paths[2])
    for call in ("two", "three"):
        await registry.cancel(call)
    await asyncio.gather(*asked, waiting)


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of tools, forgotten afterwards."""
    before = set(sys.modules)
    yield tmp_path / "kit"
    for name in set(sys.modules) - before:
        del sys.modules[name]


async def test_a_tool_of_a_folder_is_found_by_its_process(kit: Path) -> None:
    kit.mkdir()
    (kit / "_shared.py").write_text("WORD = 'shared'\n")
    (kit / "email.py").write_text(
        "from pawl.tools import ProcessLimits, tool\n"
        "from . import _shared\n"
        "@tool(process=ProcessLimits())\n"
        "def word() -> str:\n"
        '    """Say the word."""\n'
        "    return _shared.WORD\n"
    )
    (module,) = load_modules([str(kit)])
    async with ProcessRunner(PythonRunner(threads_max=1), processes_max=1) as runner:
        assert await runner.start(module.tools[0], {}, ToolContext()).result() == "shared"


async def test_what_takes_the_effect_back_comes_along() -> None:
    async with ProcessRunner(PythonRunner(threads_max=1), processes_max=1) as runner:
        value: Any = await runner.start(process_tools.undo, {}, ToolContext()).result()
    assert isinstance(value, Reversible)
    assert (value.value, value.inverse.tool_name, value.inverse.arguments) == ("done", "redo", {"n": 1})


async def test_a_process_that_waits_ready_ends_with_the_runner() -> None:
    before = set(psutil.Process().children(recursive=True))
    async with ProcessRunner(PythonRunner(threads_max=1), processes_max=1) as runner:
        await runner.start(process_tools.undo, {}, ToolContext()).result()
        assert set(psutil.Process().children(recursive=True)) - before
    assert set(psutil.Process().children(recursive=True)) - before == set()
