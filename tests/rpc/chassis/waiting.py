"""Waiting for what another process does."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path


async def wait_for_file(path: Path, process: subprocess.Popen[str]) -> None:
    """Return when `process` has written `path`; fail if it ended instead."""
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        await asyncio.sleep(0.02)
