"""Small parts of the launcher: backoff, ports, logs, process records and output."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.replicas import Endpoints, Replica, read_endpoints
from pawl.launcher import logfile, orphans, postgres
from pawl.launcher.folder import DataFolder, SecretFiles, problem_of, remove_endpoints, write_endpoints
from pawl.launcher.logfile import LogFile
from pawl.launcher.nats import USERS, Nats, program
from pawl.launcher.ports import HOST, check_ports, free_port
from pawl.launcher.processes import next_delay
from pawl.launcher.up import commands
from tests.tables import for_each


def test_backoff_doubles_to_ten_seconds_and_resets_after_a_long_uptime() -> None:
    delays: list[float] = []
    for _ in range(8):
        delays.append(next_delay(delays[-1] if delays else None, alive_seconds=1))
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert next_delay(10.0, alive_seconds=30) == 0.2


def test_used_or_duplicate_ports_are_reported_with_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [server.getsockname()[1] for server in (one, other)]
        with pytest.raises(StartError, match=rf"Port {ports[0]} for nats is already in use\. .* --port NAME=NUMBER"):
            check_ports({"nats": ports[0], "model": 0, "postgres": 0})
        with pytest.raises(StartError) as caught:
            check_ports({"gateway": ports[0], "nats": ports[1], "model": free_port()})
    assert str(caught.value) == (
        f"Port {ports[0]} for gateway is already in use. Port {ports[1]} for nats is already in use."
        " Choose others with --port NAME=NUMBER; --port all=0 uses free ports."
    )
    check_ports({"gateway": ports[0], "nats": ports[1], "model": free_port()})
    with pytest.raises(StartError, match=rf"Port {ports[0]} for nats is also chosen for agent-loop"):
        check_ports({"agent-loop": ports[0], "nats": ports[0]})


def test_free_ports_are_unique_across_processes() -> None:
    """Suites that start at the same time choose all ports before their servers listen."""
    program = "from pawl.launcher.ports import free_port; print(*[free_port() for _ in range(200)]); input()"
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        theirs = other.stdout.readline().split()
        ours = [str(free_port()) for _ in range(200)]
        other.communicate("")
    assert len({*theirs, *ours}) == 400


def test_a_log_is_rotated_by_size_while_it_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "SIZE_MAX_BYTES", 10)
    log = LogFile(tmp_path / "x.log")
    with log.open() as writer:
        for generation in range(5):
            writer.write(f"line {generation} is long\n".encode())
            writer.flush()
            log.rotate()
        writer.write(b"short")
    rotated = {f"x.log.{number}": f"line {5 - number} is long\n" for number in (1, 2, 3)}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == rotated | {"x.log": "short"}


@for_each(
    ("content", "line"),
    [
        ("first\nPAWL_X is required\n\n", "PAWL_X is required"),
        ('{"event": "process.failed", "error": "no database"}\n', "no database"),
        ('{"event": "rpc.listening"}\n', "rpc.listening"),
        ("", "it did not write anything to {}"),
    ],
)
def test_the_last_line_of_a_log_is_shown_as_text(tmp_path: Path, content: str, line: str) -> None:
    path = tmp_path / "x.log"
    path.write_text(content)
    assert LogFile(path).last_line() == line.format(path)


def test_a_leftover_process_is_stopped_but_a_process_that_reused_its_pid_is_not(tmp_path: Path) -> None:
    program = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(600)"]
    with (
        subprocess.Popen(program, stdout=subprocess.PIPE) as left,
        subprocess.Popen(program, stdout=subprocess.PIPE) as other,
    ):
        for name, process in (("left", left), ("other", other)):
            orphans.note(tmp_path, name, process.pid)
        record = json.loads((tmp_path / "other.json").read_text())
        (tmp_path / "other.json").write_text(json.dumps(record | {"started": "before"}))
        (tmp_path / "gone.json").write_text(json.dumps({"pid": 99999999, "started": "1"}))
        (tmp_path / "broken.json").write_text("{")
        assert asyncio.run(orphans.stop_all(tmp_path)) == ["left"]
        assert (left.wait() != 0, other.poll()) == (True, None)
        other.kill()
    assert list(tmp_path.iterdir()) == []


def test_a_process_is_recognised_by_its_folder_or_command_line(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", tmp_path], stdin=subprocess.PIPE, cwd=tmp_path) as process:
        assert str(tmp_path) in orphans.command_line(process.pid)
        assert not Path("/proc/self").exists() or orphans.works_in(process.pid, tmp_path)
        assert not orphans.works_in(os.getpid(), tmp_path)
        process.kill()
    assert orphans.command_line(process.pid) == ""


def endpoints(data: Path) -> Endpoints:
    replica = Replica(grpc="127.0.0.1:7601", metrics="127.0.0.1:7611", pid=5, ready=True)
    return Endpoints(
        launcher_pid=os.getpid(),
        data=str(data),
        secrets=str(data / "secrets"),
        services={"agent-loop": [replica, Replica(grpc="127.0.0.1:9", metrics="", pid=None, ready=False)]},
        nats="nats://127.0.0.1:7621",
        postgres="127.0.0.1:7620",
        model_base_url="http://127.0.0.1:7622/v1",
    )


def test_endpoints_are_read_back_unchanged(tmp_path: Path) -> None:
    assert read_endpoints(tmp_path) is None
    written = endpoints(tmp_path)
    write_endpoints(written)
    assert read_endpoints(tmp_path) == written
    assert (written.addresses("agent-loop"), written.addresses("absent")) == (["127.0.0.1:7601", "127.0.0.1:9"], [])
    remove_endpoints(tmp_path)
    assert read_endpoints(tmp_path) is None


def test_the_output_says_first_whether_commands_need_a_key(tmp_path: Path) -> None:
    here = endpoints(tmp_path)
    assert commands(here)[0] == ("set your key first", "export PAWL_API_KEY=KEY")
    SecretFiles(Path(here.secrets)).put("local-key", "k")
    assert ("export" in str(commands(here)), commands(here)[-1][0]) == (False, "key for programs")


@for_each("name", ["é ü", "a#b%20", "quo'te\"", "日本"])
def test_nats_reads_its_configuration_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    Nats(folder=tmp_path / name, port=1, secrets=SecretFiles(tmp_path / "s")).prepare()
    subprocess.run([program(), "-t", "--config", str(tmp_path / name / "nats.conf")], check=True, timeout=60)


def test_every_nats_user_has_separate_rights_and_no_system_access(tmp_path: Path) -> None:
    config = Nats(folder=tmp_path, port=1, secrets=SecretFiles(tmp_path / "s")).config()
    users = {user["user"]: user for user in config["accounts"]["PAWL"]["users"]}
    assert (set(users), len({user["password"] for user in users.values()})) == (set(USERS), len(users))
    assert ("users" in config["accounts"]["SYS"], config["system_account"]) == (False, "SYS")
    assert not any("$SYS" in subject for rights in USERS.values() for subject in rights.publish + rights.subscribe)


PROGRAM = "from pawl.launcher.ports import free_port; print(free_port(), flush=True); input()"


def test_a_port_block_is_held_quietly_until_its_process_ends() -> None:
    """A process marks a block as taken by binding its first port."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))
        _, complaints = process.communicate("\n", timeout=60)
    assert complaints == ""


# The data folder: private secrets, one launcher at a time, and clear errors.


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_secret_is_created_once(tmp_path: Path) -> None:
    first, again, other = (SecretFiles(tmp_path / "secrets").get(name) for name in ("key", "key", "other"))
    assert (len(first) >= 32, first == again, first == other) == (True, True, False)


def test_secret_file_permissions_are_restored(tmp_path: Path) -> None:
    """I22: reading a secret restores its permissions."""
    folder = tmp_path / "secrets"
    secrets = SecretFiles(folder)
    for _ in range(2):
        SecretFiles(folder).get("key")
        assert (mode(folder), mode(secrets.path("key"))) == (0o700, 0o600)
        folder.chmod(0o755)
        secrets.path("key").chmod(0o644)


def test_a_replaced_secret_is_private_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    secrets = SecretFiles(tmp_path)
    for value in "ab":
        secrets.put("url", value)
    assert (secrets.get("url"), mode(secrets.path("url"))) == ("b", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["url"]


def test_two_launchers_cannot_lock_one_folder(tmp_path: Path) -> None:
    first, second = DataFolder(tmp_path), DataFolder(tmp_path)
    first.open()
    with pytest.raises(StartError, match=rf"is already running in .* \(process {os.getpid()}\)"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_a_stale_lock_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("99999999\n")
    folder = DataFolder(tmp_path)
    folder.open()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    folder.close()


def test_a_folder_from_another_version_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    """I23: a folder of the current version can be opened repeatedly."""
    (tmp_path / "VERSION").write_text("7\n")
    with pytest.raises(StartError, match="has data version 7, but this version of Pawl reads version 1"):
        DataFolder(tmp_path).open()
    assert (tmp_path / "VERSION").read_text() == "7\n"
    (tmp_path / "VERSION").write_text("1\n")
    folder = DataFolder(tmp_path)
    for _ in range(2):
        folder.open()
        for _ in range(2):
            folder.close()


@for_each(
    ("file", "folder", "says"),
    [
        ("photos/holiday.jpg", "photos", "is not empty and is not a Pawl data folder"),
        ("file", "file/data", "cannot be used: Not a directory"),
    ],
)
def test_an_unusable_folder_is_refused_and_left_unchanged(tmp_path: Path, file: str, folder: str, says: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    before = [(path, mode(path)) for path in (tmp_path / file).parent.rglob("*")]
    with pytest.raises(StartError, match=says):
        DataFolder(tmp_path / folder).open()
    assert [(path, mode(path)) for path in (tmp_path / file).parent.rglob("*")] == before


def test_a_full_disk_and_a_missing_folder_give_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem_of(tmp_path) == ""
    assert "is no longer usable (No such file or directory)" in problem_of(tmp_path / "gone")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 * 2**20))
    assert problem_of(tmp_path).startswith(f"The disk with the data folder {tmp_path} is full (5 MiB free)")


def test_concurrent_launchers_create_the_account_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second account would have another uid, which could not read the first launcher's clusters."""
    made: list[str] = []
    both_look = threading.Barrier(2)
    thread_state = threading.local()

    def own_account() -> pwd.struct_passwd | None:
        found = pwd.getpwuid(os.getuid()) if made else None
        if not getattr(thread_state, "first", False):
            thread_state.first = True
            both_look.wait(timeout=60)
        return found

    def run(arguments: list[str], **_: Any) -> None:
        made.append(arguments[-1])

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/sbin/useradd")
    monkeypatch.setattr(postgres, "_own_account", own_account)
    monkeypatch.setattr(subprocess, "run", run)
    with ThreadPoolExecutor(2) as launchers:
        accounts = {found.result() for found in [launchers.submit(postgres.database_account) for _ in range(2)]}
    assert (made, len(accounts)) == (["pgserver"], 1)
