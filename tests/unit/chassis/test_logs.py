"""Logs as a process writes them: configuring is for a whole process, so each test has one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

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


def test_each_line_is_one_json_object_with_the_process_and_the_ids_bound_in_its_task() -> None:
    first, second, late, old = lines("""
async def work(run):
    logs.bind(run=run)
    await asyncio.sleep(0)
    log.info("run.claimed", epoch=7, what=2+1j)
async def main():
    await asyncio.gather(work("a"), work("b"))
asyncio.run(main())
logging.getLogger("lib").warning("late by %d s", 3)
warnings.warn("old")
logging.getLogger("httpx2").info("GET /")
log.debug("hidden")
logging.getLogger("asyncpg.pool").warning("Failed to restore")
""")
    assert first.pop("timestamp").endswith("Z")
    process = {"service": "test", "instance": "i-1", "level": "info", "module": "early"}
    assert first == {"event": "run.claimed", "epoch": 7, "what": "(2+1j)", "run": "a"} | process
    assert second["run"] == "b"
    assert (late["event"], late["logger"], late["level"]) == ("late by 3 s", "lib", "warning")
    assert "old" in old["event"]


def test_a_traceback_shows_no_local_variables() -> None:
    """I22."""
    body = """
def sign(key):
    raise ValueError("bad")
try:
    sign("hunter" + str(1 + 1))
except ValueError:
    log.exception("sign.failed")
    logging.getLogger("lib").exception("failed")
"""
    for log_format in ("json", "console"):
        text = run(body, log_format)
        assert (text.count("ValueError: bad"), "hunter2" in text) == (2, False), log_format
