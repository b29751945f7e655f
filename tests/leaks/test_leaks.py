"""The short form: two cycles after the first, and 160 runs with 160 cancelled streams. `make leaks` plays the long
form.
"""

from __future__ import annotations

import asyncio
import sys

import pytest


@pytest.mark.long
async def test_services_do_not_leak() -> None:
    """I19: tasks, file descriptors, threads and memory do not grow, measured in a separate process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.leaks", "--cycles", "2", "--runs", "160", "--streams", "160"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
