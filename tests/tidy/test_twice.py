"""CI retries a failed test once, within limits."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import twice
from tests.tidy import tree

KNOWN_MAX = 5
FLAKY = """
import pathlib
import pytest

def test_passes_alone():
    seen = pathlib.Path(__file__).with_name("seen")
    try:
        assert seen.exists(), "the first time"
    finally:
        seen.touch()
"""
OTHERS = {
    "a flaky test": ("", 0, "flaky:\n  ", "AssertionError: the first time"),
    "a flaky test that a promise depends on": (
        "\n@pytest.mark.promise\ndef test_promise():\n    assert 0\n",
        1,
        "",
        "",
    ),
    "a test that fails twice": ("\ndef test_broken():\n    assert 0, 'always'\n", 1, "run once more", "always"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_ci_accepts_failed_tests_only_if_they_pass_alone(case: str, tmp_path: Path) -> None:
    others, exit_code, *texts = OTHERS[case]
    (tmp_path / "test_it.py").write_text(FLAKY + others)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = promise: never forgiven\n")
    command = [
        sys.executable,
        "-m",
        "tests.twice",
        "-q",
        "-c",
        str(tmp_path / "pytest.ini"),
        str(tmp_path / "test_it.py"),
    ]
    environment = os.environ | {"PYTHONPATH": str(tree.ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, done.stdout
    assert all(text in done.stdout for text in texts), done.stdout
    assert ("run once more" in done.stdout) == ("promise" not in case)


def test_crashed_worker_or_many_failures_are_not_retried() -> None:
    failure = {"promise": False, "first": ""}
    few, many = ({str(number): failure for number in range(count)} for count in (20, 21))
    cases = ((1, few, False), (1, many, False), (2, few, False), (1, few, True))
    verdicts = [twice.judge(code, failures, crashed=crashed).name for code, failures, crashed in cases]
    assert verdicts == ["RETRY_FAILED", "DONE", "DONE", "REPEAT"]


def test_at_most_five_tests_are_known_to_be_flaky() -> None:
    tests, _ = twice.known(dt.date.max)
    assert len(tests) <= KNOWN_MAX
    assert all((tree.ROOT / test.partition("::")[0]).is_file() for test in tests)
