"""`pawl up` as a process: signals, kill -9, and its start-up errors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pawl.chassis.rpc.replicas import read_endpoints
from pawl.launcher import orphans
from tests.poll import wait_until
from tests.servers import open_folder

PROGRAM = """
import dataclasses, os, sys
from pathlib import Path
from pawl.launcher import read_options, up
options = read_options(os.environ, data=Path(sys.argv[1]), ports=["all=0"])
sys.exit(up(dataclasses.replace(options, stages=())))
"""
SECONDS = 240.0


@pytest.fixture
def data() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder / "data"


@contextlib.contextmanager
def launched(data: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PAWL_", "OPENAI_"))}
    program = [sys.executable, "-c", PROGRAM, str(data)]
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
        if "Ctrl-C" in line:
            return "".join(lines)
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


def children(data: Path) -> list[int]:
    texts = [(data / f"run/{name}.json").read_text() for name in ("postgres", "nats", "model")]
    return [int(text.split('"pid": ')[1].split(",")[0]) for text in texts]


def note_of_nats(data: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (data / "run" / "nats.json").read_text()
    return ""


def wait_exit(pids: list[int]) -> None:
    wait_until(lambda: all(orphans.started(pid) is None for pid in pids), lambda: "a process lingers")


def test_a_second_launcher_is_refused_and_ctrl_c_stops_everything_in_order(data: Path) -> None:
    """OPS-4: no record of a process remains."""
    with launched(data) as process:
        screen = wait_for_screen(process)
        found = read_endpoints(data)
        assert found is not None
        assert (found.nats or "").rpartition(":")[2] in screen
        with launched(data) as second:
            _, errors = second.communicate(timeout=SECONDS)
        assert (second.returncode, errors.strip()) == (
            2,
            (
                f"Pawl is already running in {data} (process {process.pid})."
                " Stop it, or choose another folder with --data."
            ),
        )
        pids = children(data)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=SECONDS)
        assert (process.returncode, output) == (0, "Stopping.\n"), errors
    wait_exit(pids)
    assert read_endpoints(data) is None
    assert not list((data / "run").glob("*.json"))
    assert "database system is shut down" in (data / "logs" / "postgres.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="otherwise the next start finds them")
def test_a_killed_launcher_leaves_no_process_and_the_next_one_can_be_stopped_during_its_start(
    data: Path,
) -> None:
    """OPS-5: the next launcher starts the servers again."""
    with launched(data) as process:
        wait_for_screen(process)
        pids = children(data)
        process.kill()
        process.wait()
        wait_exit(pids)
    left = note_of_nats(data)
    with launched(data) as process:
        wait_until(lambda: process.poll() is not None or note_of_nats(data) not in {"", left})
        assert process.poll() is None, "the next launcher ended"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
    assert not list((data / "run").glob("*.json"))
