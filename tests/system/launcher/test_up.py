"""`pawl up` as a process of its own: signals, kill -9, and what it says when it cannot start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pawl.chassis.endpoints import Endpoints, read_endpoints
from pawl.launcher import orphans

PROGRAM = """
import sys
from pathlib import Path
from tests.system.launcher.stand_ins import stand_in
from pawl.launcher import SuiteOptions, read_options, up
import dataclasses, os
options = read_options(os.environ, data=Path(sys.argv[1]), ports=["all=0", *sys.argv[2:]])
sys.exit(up(dataclasses.replace(options, stages=((stand_in("first"),),))))
"""

SECONDS = 240.0


@contextlib.contextmanager
def launched(data: Path, *ports: str) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PAWL_", "OPENAI_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), environment.get("PYTHONPATH", "")])
    program = [sys.executable, "-c", PROGRAM, str(data), *ports]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_screen(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "nats sub" in line:
            return "".join(lines)
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


def children(data: Path) -> list[int]:
    """Every process the launcher of that folder has started."""
    names = ("first", "postgres", "nats", "model")
    return [
        int(text.split('"pid": ')[1].split(",")[0]) for n in names for text in [(data / f"run/{n}.json").read_text()]
    ]


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while any(orphans.started(pid) is not None for pid in pids):
        assert time.monotonic() < deadline, "a process lingers"
        time.sleep(0.02)


def read(data: Path) -> Endpoints:
    found = read_endpoints(data)
    assert found is not None
    return found


def test_ctrl_c_stops_everything_in_order(data: Path) -> None:
    """OPS-4"""
    with launched(data) as process:
        screen = wait_for_screen(process)
        assert read(data).addresses("first")[0] in screen
        pids = children(data)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert output == "Stopping.\n"
    wait_gone(pids)
    assert read_endpoints(data) is None
    assert not list((data / "run").glob("*.json"))
    assert "database system is shut down" in (data / "logs" / "postgres.log").read_text()


def test_a_signal_during_the_start_stops_what_was_started(data: Path) -> None:
    with launched(data) as process:
        while not (data / "run" / "nats.json").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
    assert not list((data / "run").glob("*.json"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the next start finds them")
def test_nothing_outlives_a_launcher_that_was_killed_and_the_next_one_starts(data: Path) -> None:
    """OPS-5"""
    with launched(data) as process:
        wait_for_screen(process)
        pids = children(data)
        process.kill()
        process.wait()
        wait_gone(pids)
    with launched(data) as process:
        wait_for_screen(process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0


def test_a_second_launcher_says_that_one_runs(data: Path) -> None:
    with launched(data) as first:
        wait_for_screen(first)
        with launched(data) as second:
            _, errors = second.communicate(timeout=SECONDS)
        assert second.returncode == 2
        assert errors.strip() == (
            f"Pawl already runs on {data} (process {first.pid}). Stop it, or choose another folder with --data."
        )
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=SECONDS)


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with launched(tmp_path / "data", f"nats={port}") as process:
            _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert errors.strip() == (
        f"Port {port} for nats is already in use. Choose another with --port nats=NUMBER; 0 takes a free one."
    )


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with launched(tmp_path / "file" / "data") as process:
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert "cannot be used: Not a directory" in errors
