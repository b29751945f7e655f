"""Logs as a process writes them: configuring is for a whole process, so each test has one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import asyncio, logging, warnings
from pawl.chassis import logs
log = logs.get_logger("early")
logs.configure(service="test", instance_id="i-1", level="info", log_format="{log_format}")
{body}
"""


def run(body: str, log_format: str = "json") -> str:
    program = PROGRAM.format(body=body, log_format=log_format)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def lines(body: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(body).splitlines()]


def test_each_line_is_one_json_object_with_the_process_and_bound_ids() -> None:
    (line,) = lines("logs.bind(run='run_1'); log.info('run.claimed', epoch=7, what=2+1j)")
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "run.claimed",
        "epoch": 7,
        "what": "(2+1j)",
        "run": "run_1",
        "service": "test",
        "instance": "i-1",
        "level": "info",
        "module": "early",
    }


def test_ids_are_bound_for_a_task_and_not_for_its_neighbours() -> None:
    first, second = lines("""
async def work(run):
    logs.bind(run=run)
    await asyncio.sleep(0)
    log.info("run.worked")
async def main():
    await asyncio.gather(work("a"), work("b"))
asyncio.run(main())
""")
    assert (first["run"], second["run"]) == ("a", "b")


def test_libraries_write_the_same_form() -> None:
    first, second = lines("logging.getLogger('lib').warning('late by %d s', 3); warnings.warn('old')")
    assert (first["event"], first["logger"], first["level"]) == ("late by 3 s", "lib", "warning")
    assert "old" in second["event"]


def test_libraries_that_tell_each_request_are_heard_from_warnings_on() -> None:
    assert lines("logging.getLogger('httpx2').info('GET /'); log.debug('hidden')") == []


def test_a_database_that_is_away_is_not_told_twice() -> None:
    assert lines("logging.getLogger('asyncpg.pool').warning('Failed to restore')") == []


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    """I22."""
    text = run(
        """
def sign(key):
    raise ValueError("bad")
try:
    sign("hunter" + str(1 + 1))
except ValueError:
    log.exception("sign.failed")
    logging.getLogger("lib").exception("failed")
""",
        log_format,
    )
    assert text.count("ValueError: bad") == 2
    assert "hunter2" not in text
