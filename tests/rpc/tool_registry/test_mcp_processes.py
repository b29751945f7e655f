"""The registry's child programs stay within their limits and leave no processes behind (TOOL-3)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Collection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil
import pytest

from pawl.tool.v1 import source_pb2
from pawl.tool_registry.sources.mcp.permission import Programs
from pawl.tool_registry.sources.mcp.program import ProgramProblem, running
from pawl.tool_registry.sources.mcp.rules import ProgramRule
from pawl.tool_registry.sources.mcp.sandbox import Order
from pawl.tool_registry.sources.mcp.syscall_filter import syscall_filter
from tests.fakes.mcp_program import READABLE
from tests.poll import until
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.mcp_world import FakeServer, McpRegistry, failure, mcp_registry
from tests.rpc.tool_registry.registry import content, refusal

MIB = 1024 * 1024
ROOT = Path(__file__).parents[3]
# add_key, request_key and keyctl
KEYRING_CALLS = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}
# A minimal registry: it starts a program, reports it and is killed.
KEEPER = """
import asyncio, sys
from pawl.tool_registry.sources.mcp.program import running
from pawl.tool_registry.sources.mcp.sandbox import Order

async def main():
    order = Order(command=sys.argv[1:], environment={})
    async with running(order, name="t", secrets=()) as program:
        print((await program.stdout.readline()).decode(), flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""
FAMILY = (
    "sleep 1000 & setsid sleep 1000 & (setsid sleep 1000 &) ; echo $HOME; trap '' TERM; while true; do sleep 1; done"
)
WAYS_TO_A_SOCKET = {
    "a stream": """
import socket, os
os.chdir("mine")
try:
    socket.socket(socket.AF_UNIX).connect("s")
    print("reached")
except OSError as error:
    print(error.strerror)
""",
    "a datagram of a pair": """
import socket, os
os.chdir("mine")
try:
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"hello", "d")
    print("reached")
except OSError as error:
    print(error.strerror)
""",
    "a pair made raw, turned to another address": """
import socket, os
os.chdir("mine")
try:
    socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW | socket.SOCK_CLOEXEC)[0].connect("d")
    print("reached")
except OSError as error:
    print(error.strerror)
""",
    "a ring": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
made = libc.syscall(425, 8, ctypes.create_string_buffer(120))
print("reached" if made >= 0 else os.strerror(ctypes.get_errno()))
""",
}
USUAL = """
import asyncio, multiprocessing, socket, subprocess
socket.create_connection(("127.0.0.1", %d)).close()
socket.socketpair()
for one in multiprocessing.Pipe():
    one.close()
assert subprocess.run(["echo", "1"], capture_output=True).stdout == b"1\\n"
asyncio.run(asyncio.sleep(0))
print("ok")
"""
OTHERS = """
import ctypes, os, resource, sys
libc = ctypes.CDLL(None, use_errno=True)

def set_io(kind, who):
    number = {"x86_64": 251, "aarch64": 30}[os.uname().machine]
    if libc.syscall(number, kind, who, 3 << 13) != 0:
        raise OSError(ctypes.get_errno(), "")

def attempts(process):
    limit = (resource.RLIMIT_CPU, (1000, 1000))
    yield "limit", lambda: resource.prlimit(process, *limit)
    yield "priority", lambda: os.setpriority(os.PRIO_PROCESS, process, 19)
    yield "scheduler", lambda: os.sched_setscheduler(process, os.SCHED_BATCH, os.sched_param(0))
    yield "parameter", lambda: os.sched_setparam(process, os.sched_param(0))
    yield "processors", lambda: os.sched_setaffinity(process, os.sched_getaffinity(0))
    yield "input and output", lambda: set_io(1, process)
    if process:
        yield "priority of a group", lambda: os.setpriority(os.PRIO_PGRP, process, 19)

for name, attempt in attempts(int(sys.argv[1])):
    try:
        attempt()
        print(name)
    except PermissionError:
        pass
"""
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits on memory and processes are those of Linux")


@pytest.fixture
async def mcp(database_url: str, tmp_path: Path) -> AsyncIterator[McpRegistry]:
    async with mcp_registry(database_url, tmp_path) as made:
        yield made


async def gone(processes: Collection[psutil.Process]) -> None:
    await until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes))


async def exit_reason(*command: str, **limits: int) -> str:
    order = Order(command=command, environment={}, reads_all=True, **limits)  # type: ignore[arg-type]
    async with running(order, name="t", secrets=()) as program:
        await program.stdout.read()
        return await program.end_reason()


async def test_a_killed_registry_leaves_no_program_processes() -> None:
    keeper = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KEEPER, "sh", "-c", FAMILY, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert keeper.stdout is not None
    home = Path((await keeper.stdout.readline()).decode().strip())
    family = psutil.Process(keeper.pid).children(recursive=True)
    assert len(family) >= 4
    assert home.is_dir()
    keeper.kill()
    await keeper.wait()
    await gone(family)

    await until(lambda: not home.exists())


async def test_removed_source_leaves_no_process(mcp: McpRegistry, tmp_path: Path) -> None:
    server = FakeServer(tmp_path / "fake", ["spawn"])
    await mcp.add(server.config())
    assert content(await mcp.run("fake.spawn")) == "spawned"
    ids = [int(line.split()[1]) for line in server.log() if line.startswith(("started", "child"))][1:]
    processes = [psutil.Process(process) for process in ids]
    assert len(processes) == 3
    await mcp.remove()
    await gone(processes)


@ON_LINUX
async def test_program_cannot_allocate_beyond_its_memory_limit() -> None:
    assert "MemoryError" in await exit_reason(
        sys.executable, "-c", f"bytearray({300 * MIB})", memory_bytes_max=128 * MIB
    )


async def test_program_error_is_reported_without_runtime_output() -> None:
    output = "echo 'Error: no licence' >&2; echo '    at main.js:1' >&2; echo 'Node.js v24.19.0' >&2"
    assert "'Error: no licence'" in await exit_reason("sh", "-c", output)


@ON_LINUX
async def test_programs_above_the_total_memory_limit_are_killed() -> None:
    hog = f"{sys.executable} -c 'x = bytearray({60 * MIB}); import time; time.sleep(1000)' & "
    message = await exit_reason("sh", "-c", hog * 4 + "wait", memory_bytes_max=128 * MIB)
    assert "more than 134217728 bytes of memory" in message


@ON_LINUX
async def test_program_with_too_many_processes_is_killed() -> None:
    assert "more than 10 processes" in await exit_reason(
        "sh", "-c", "while true; do sleep 1000 & sleep 0.01; done", processes_max=10
    )


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    if not _has_landlock():
        pytest.skip("this kernel has no Landlock")
    for name in ("mine", "other", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "data" / "file")
    (tmp_path / "door").symlink_to(tmp_path / "data")
    return tmp_path


async def shell_output(folders: Path, *words: str, **order: Any) -> str:
    command = ("sh", "-c", 'cd "$1" && shift && "$@" 2>&1; true', "sh", str(folders), *words)
    private = (str(folders / "data"),)
    async with running(
        Order(command=command, environment={}, private=private, **order), name="t", secrets=()
    ) as program:
        return (await program.stdout.read()).decode()


@ON_LINUX
async def test_a_program_can_only_change_its_own_limits_and_priorities(folders: Path) -> None:
    """With a CPU limit of one second or the lowest priority, the registry would stop or stall for all stores."""
    own = ["limit", "priority", "scheduler", "parameter", "processors", "input and output"]
    assert (await shell_output(folders, sys.executable, "-I", "-c", OTHERS, "0", reads_all=True)).splitlines() == own
    other = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
    try:
        attempt = (sys.executable, "-I", "-c", OTHERS, str(other.pid))
        assert await shell_output(folders, *attempt, reads_all=True) == ""
        # A program of the same user is normally allowed to do this, so the attempt is realistic. Programs of the
        # superuser, who has lost some rights here, would be refused anyway.
        assert "limit" in (await shell_output(folders, *attempt, is_confined=False)).splitlines()
    finally:
        other.kill()
        await other.wait()


@ON_LINUX
async def test_a_program_can_read_granted_folders_but_never_private_ones(folders: Path) -> None:
    """OPS-1: the private folders contain the keys of the suite."""
    private, mine = ("data/file", "mine/link", "door/file", "mine/../data/file"), str(folders / "mine")
    rows: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
        ({"reads_all": True}, private, ("mine/file",)),
        ({"readable": (str(folders),)}, private, ("mine/file",)),
        ({"readable": ("/",)}, private, ("mine/file",)),
        ({"writable": (mine,)}, ("other/file", "data/file", "/etc/shadow"), ("mine/file",)),
    ]
    for order, refused, allowed in rows:
        for path in refused:
            assert "Permission denied" in await shell_output(folders, "cat", path, **order), (order, path)
        for path in allowed:
            assert await shell_output(folders, "cat", path, **order) == "mine", order
    assert await shell_output(folders, "cat", "data/file", is_confined=False) == "data", (
        "unless the deployment allows it"
    )
    for path in ("mine/new", "mine/file", "data/file"):
        assert "Permission denied" in await shell_output(folders, "dd", "if=/dev/null", f"of={path}", reads_all=True)
    assert (folders / "mine" / "file").read_text() == "mine"
    assert "Permission denied" not in await shell_output(folders, "sh", "-c", "echo 1 > $HOME/new", reads_all=True)


@ON_LINUX
async def test_invalid_grants_and_limits_are_explained(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for order, says in (
        ({"readable": ("data",)}, "is private to Pawl"),
        ({"readable": ("data/file",)}, "is private to Pawl"),
        ({"readable": ("door",)}, "is private to Pawl"),
        ({"writable": ("mine", "data")}, "is private to Pawl"),
        ({"writable": ("",)}, "cannot be writable"),
        ({"readable": ("absent",)}, "cannot be opened|cannot restrict"),
    ):
        absolute = {kind: tuple(str(folders / path) for path in paths) for kind, paths in order.items()}
        await raises(ProgramProblem, shell_output(folders, "true", **absolute), match=says)
    await raises(ProgramProblem, exit_reason("/no/such"), match=r"cannot start '/no/such'.*No such file")
    monkeypatch.setattr("pawl.tool_registry.sources.mcp.program.syscall_filter", lambda: syscall_filter("sparc"))
    await raises(
        ProgramProblem, shell_output(folders, "echo", "started", reads_all=True), match="cannot restrict its sockets"
    )
    assert await shell_output(folders, "echo", "started", is_confined=False) == "started\n"


@ON_LINUX
async def test_program_cannot_reach_server_sockets(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPS-1: some servers on the same machine accept any command without a key."""
    monkeypatch.chdir(folders / "mine")  # A socket path has at most 107 bytes
    python = (sys.executable, "-I", "-c")
    readable = tuple(dict.fromkeys((sys.prefix, sys.base_prefix)))
    with socket.socket(socket.AF_UNIX) as stream, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        stream.bind("s")
        stream.listen()
        datagrams.bind("d")
        datagrams.setblocking(False)
        for name, attempt in WAYS_TO_A_SOCKET.items():
            given: dict[str, Any] = {"reads_all": True}
            if name == "a stream":
                given = {"writable": (str(folders / "mine"),), "readable": readable}
            output = await shell_output(folders, *python, attempt, **given)
            assert output.endswith(("Permission denied\n", "Function not implemented\n")), (name, output)
            # A program of the same user is normally allowed to do this, so the attempt is realistic.
            assert await shell_output(folders, *python, attempt, is_confined=False) == "reached\n", name
    with socket.create_server(("127.0.0.1", 0)) as server:
        usual = USUAL % server.getsockname()[1]
        assert await shell_output(folders, *python, usual, reads_all=True) == "ok\n", "the network and pairs are open"


@ON_LINUX
async def test_program_cannot_read_other_processes_memory_environment_or_keyring(folders: Path) -> None:
    """OPS-1: memory, environment and keyring may hold database rows, keys and tickets of the registry's user."""
    memory = SharedMemory(create=True, size=16)
    try:
        for path in (f"/dev/shm/{memory.name}", f"/proc/{os.getpid()}/environ"):  # noqa: S108
            assert "ermission denied" in await shell_output(folders, "cat", path, reads_all=True), path
    finally:
        memory.close()
        memory.unlink()
    for number in KEYRING_CALLS[os.uname().machine]:
        attempt = f"import ctypes; print(ctypes.CDLL(None, use_errno=True).syscall({number}, 0, -4, 1)"
        assert (
            await shell_output(folders, sys.executable, "-I", "-c", f"{attempt}, ctypes.get_errno())", reads_all=True)
        ) == f"-1 {errno.EACCES}\n"


async def test_only_listed_programs_start_if_the_deployment_has_a_list(database_url: str, tmp_path: Path) -> None:
    """OPS-1: an operator of one store does not control the deployment."""
    server = FakeServer(tmp_path / "fake", ["echo", "read"])
    plain = server.config()
    rule = ProgramRule(command=plain.mcp_stdio.command, variables=["CITY"], paths=[*READABLE, str(server.folder)])
    longer = server.config()
    longer.mcp_stdio.command.append("--more")
    async with mcp_registry(database_url, tmp_path, programs=Programs(rules={"acme": [rule]})) as mcp:
        for refused in (
            server.config(environment={"LD_PRELOAD": "/opt/mine.so"}),
            longer,
            server.config(readable_paths=[*READABLE, "/etc"]),
            server.config(writable_paths=["/"]),
            source_pb2.SourceConfig(name="sh", mcp_stdio=source_pb2.McpStdioConfig(command=["sh", "-c", "id"])),
        ):
            assert await refusal(mcp.add(refused)) == "PERMISSION_DENIED"
        await mcp.add(server.config(environment={"CITY": "Oslo"}))
        assert content(await mcp.run("fake.echo", {"a": 1})) is not None
        assert "ermission" in failure(await mcp.run("fake.read", {"path": f"/proc/{os.getpid()}/environ"}, call="read"))
    async with mcp_registry(database_url, tmp_path, programs=Programs(rules={})) as mcp:
        assert "does not allow this command" in failure(await mcp.run("fake.echo", {"a": 1}, call="later"))
        assert "does not allow this command" in (await mcp.check()).source.problem
    assert server.starts == 2, "for the discovery and for the first user"


def _has_landlock() -> bool:
    probe = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from pawl.tool_registry.sources.mcp.sandbox import _landlock_abi; print(_landlock_abi())"
    )
    done = subprocess.run([sys.executable, "-c", probe, str(ROOT)], capture_output=True, text=True, check=True)
    return int(done.stdout) >= 3
