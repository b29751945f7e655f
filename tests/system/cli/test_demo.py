"""The main job, as `make demo` runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.long
def test_the_demo_plays_the_main_job_and_finds_all_of_it_in_the_ledger() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pawl.cli", "demo"], capture_output=True, text=True, timeout=140, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All of it happened." in done.stdout
    assert done.stderr == ""
