"""Record test coverage, then plant faults and count those that the tests find."""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import coverage

from tests.mutation import faults

_ROOT = Path(__file__).parents[2]
_SERVICES = ("agent_loop", "gateway", "job_store", "notifier", "tool_registry")
_RUN_SECONDS_MAX = 600
# A fault that makes a test hang counts as found.
_TEST_SECONDS_MAX = 150
_TESTS_MAX = 1000
# Limit for the tests of one fault, by their recorded durations. Slower tests are skipped unless there is no other.
_TESTS_SECONDS_MAX = 150


def record(folder: Path, arguments: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "coverage.ini"
    settings.write_text(
        f"[run]\nbranch = true\nparallel = true\nsource = {_ROOT / 'services'}\n"
        f"data_file = {folder / 'parts' / 'data'}\n"
        "context = ${PYTEST_CURRENT_TEST-}\nsigterm = true\npatch =\n  _exit\n  fork\n"
        "disable_warnings = no-data-collected,module-not-measured,no-sysmon\n"
    )
    (folder / "parts").mkdir(exist_ok=True)
    command = [
        *_pytest(
            "-p",
            "tests.mutation.plugin",
            "-n",
            "3",
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "-m",
            "not long",
            *arguments,
        )
    ]
    environment = os.environ | {"COVERAGE_PROCESS_START": str(settings)}
    subprocess.run([*command, f"--junitxml={folder / 'junit.xml'}"], cwd=_ROOT, env=environment, check=False)
    whole = coverage.Coverage(config_file=str(settings))
    whole.combine()
    whole.save()
    whole.report(file=sys.stdout, skip_covered=True)


def run(folder: Path, seed: int, each: int) -> None:
    """Plant `each` faults in every service, one at a time, and write which tests found them."""
    data = coverage.CoverageData(str(folder / "parts" / "data"))
    data.read()
    seconds = _durations(folder / "junit.xml")
    results = folder / "faults.jsonl"
    done = [json.loads(line)["fault"] for line in results.read_text().splitlines()] if results.exists() else []
    for path, fault in _drawn(seed, each):
        name = [str(path.relative_to(_ROOT)), fault.line, fault.start, fault.kind]
        if name in done:
            continue
        tests = _tests_of(data, seconds, path, fault.line)
        started = time.monotonic()
        outcome, by = _outcome(path, fault, tests)
        took = round(time.monotonic() - started, 1)
        row = {"fault": name, "outcome": outcome, "tests": len(tests), "seconds": took, "by": by}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        sys.stdout.write(f"{' '.join(map(str, name))}: {outcome} ({took} s, {by})\n")
        sys.stdout.flush()
    _report(results)


def _durations(report: Path) -> dict[str, float]:
    """Return the duration of each test in seconds, by class and name, as JUnit writes them."""
    cases = ET.parse(report).iter("testcase")  # noqa: S314  # pytest wrote it
    return {f"{case.get('classname')}::{case.get('name')}": float(case.get("time", "0")) for case in cases}


def _drawn(seed: int, each: int) -> Iterator[tuple[Path, faults.Fault]]:
    for service in _SERVICES:
        every = [
            (path, fault)
            for path in sorted((_ROOT / "services" / "pawl" / service).rglob("*.py"))
            for fault in faults.possible(path.read_text())
        ]
        by_kind: Mapping[str, list[tuple[Path, faults.Fault]]] = {kind: [] for kind in faults.KINDS}
        for path, fault in every:
            by_kind[fault.kind].append((path, fault))
        chooser = random.Random(f"{seed} {service}")
        for position in range(each):
            yield chooser.choice(by_kind[faults.KINDS[position % len(faults.KINDS)]])


def _tests_of(data: coverage.CoverageData, seconds: Mapping[str, float], path: Path, line: int) -> list[str]:
    """Return the tests that ran the line, fastest first, within _TESTS_MAX and _TESTS_SECONDS_MAX.

    If a process started by a test ran the line, return the file of the test, or its folder if a fixture started it.
    """
    costs: dict[str, float] = {}
    for context in data.contexts_by_lineno(str(path)).get(line, []):
        file, _, name = context.partition("::")
        if context.endswith((" (setup)", " (teardown)")):
            costs[str(Path(file).parent)] = 1_000_000.0
        elif context.endswith(" (call)"):
            costs[file] = 1_000.0
        elif context:
            costs[context] = seconds.get(f"{file.removesuffix('.py').replace('/', '.')}::{name}", 0.0)
    chosen: list[str] = []
    total = 0.0
    for test, cost in sorted(costs.items(), key=lambda item: (item[1], item[0])):
        total += min(cost, _TESTS_SECONDS_MAX)
        if chosen and (total > _TESTS_SECONDS_MAX or len(chosen) == _TESTS_MAX):
            break
        chosen.append(test)
    return chosen


def _outcome(path: Path, fault: faults.Fault, tests: Sequence[str]) -> tuple[str, str]:
    if not tests:
        return "not covered", ""
    source = path.read_text()
    path.write_text(faults.plant(source, fault))
    try:
        return _play(tests)
    finally:
        path.write_text(source)


def _play(tests: Sequence[str]) -> tuple[str, str]:
    arguments = Path(tempfile.gettempdir(), "pawl-mutation-tests")
    arguments.write_text("\n".join(tests))
    command = _pytest("--maxfail=1", f"--timeout={_TEST_SECONDS_MAX}", "-q", "-m", "not long", f"@{arguments}")
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            told, _ = process.communicate(timeout=_RUN_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "out of time", ""
    if process.returncode == 0:
        return "survived", ""
    failed = [line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "found", failed[0][:200] if failed else f"exit code {process.returncode}"


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments]


def _report(results: Path) -> None:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in results.read_text().splitlines():
        row = json.loads(line)
        counts[row["fault"][0].split("/")[2]][row["outcome"]] += 1
    for service, counter in sorted(counts.items()):
        sys.stdout.write(f"{service}: {dict(counter)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("step", choices=["record", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=20)
    given, rest = parser.parse_known_args()
    if given.step == "record":
        record(given.folder.resolve(), rest)
    else:
        run(given.folder.resolve(), given.seed, given.each)


main()
