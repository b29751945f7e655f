"""Runs pytest for CI and retries failed tests: `python -m tests.twice ARGUMENTS`, with pytest's arguments.

A test that passes alone is printed under "flaky" and does not fail CI. A test that fails twice does. Tests marked
`promise` are not retried. If a worker process crashed, all tests run again once.
"""

from __future__ import annotations

import datetime as dt
import enum
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# More failures than this have a common cause and are not retried
FAILURES_MAX = 20
KNOWN = Path(__file__).with_name("flaky.toml")
AGE_DAYS_MAX = 7

_RECORD = "TESTS_TWICE_RECORD"
_TESTS_FAILED = 1


class Verdict(enum.Enum):
    DONE = enum.auto()
    RETRY_FAILED = enum.auto()
    REPEAT = enum.auto()


def judge(exit_code: int, failures: dict[str, Any], *, crashed: bool) -> Verdict:
    if crashed:
        return Verdict.REPEAT
    if exit_code != _TESTS_FAILED or len(failures) > FAILURES_MAX or any(f["promise"] for f in failures.values()):
        return Verdict.DONE
    return Verdict.RETRY_FAILED


def known(today: dt.date) -> tuple[frozenset[str], list[str]]:
    tests = tomllib.loads(KNOWN.read_text(encoding="utf-8")).get("test", [])
    old = [test for test in tests if (today - test["since"]).days > AGE_DAYS_MAX]
    return frozenset(test["id"] for test in tests), [f"{test['id']} is flaky since {test['since']}" for test in old]


class Recorder:
    def __init__(self) -> None:
        self.failures: dict[str, Any] = {}
        self.crashed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")] or [
                report.longreprtext
            ]
            self.failures.setdefault(report.nodeid, {"promise": "promise" in report.keywords, "first": lines[0][:300]})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        self.crashed = self.crashed or error is not None

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[_RECORD]).write_text(json.dumps({"failures": self.failures, "crashed": self.crashed}))


def pytest_configure(config: pytest.Config) -> None:
    """Record results in the main process, to which the workers report."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def _run(arguments: Sequence[str]) -> tuple[int, dict[str, Any], bool]:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        command = [sys.executable, "-m", "pytest", "-p", "tests.twice", *arguments]
        done = subprocess.run(command, env=os.environ | {_RECORD: str(record)}, check=False)
        if not record.exists():
            return done.returncode, {}, False
        noted = json.loads(record.read_text())
        return done.returncode, noted["failures"], noted["crashed"]


def main(arguments: Sequence[str]) -> int:
    exit_code, failures, crashed = _run(arguments)
    verdict = judge(exit_code, failures, crashed=crashed)
    if verdict is Verdict.REPEAT:
        sys.stdout.write("A worker process crashed: all tests run once more.\n")
        exit_code, failures, crashed = _run(arguments)
        verdict = Verdict.DONE if crashed else judge(exit_code, failures, crashed=False)
    if verdict is Verdict.RETRY_FAILED:
        sys.stdout.write(f"{len(failures)} failed and run once more, alone.\n")
        sys.stdout.flush()
        exit_code, again, _ = _run(["-n", "0", *failures])
        _report({test: failure for test, failure in failures.items() if test not in again})
    return exit_code


def _report(flaky: dict[str, Any]) -> None:
    listed, warnings = known(dt.datetime.now(tz=dt.UTC).date())
    lines = [f"  {test}{'' if test in listed else ' (new)'}: {failure['first']}" for test, failure in flaky.items()]
    sys.stdout.write("\n".join(["flaky:", *(lines or ["  none"]), *(f"warning: {text}" for text in warnings), ""]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
