"""docs/design/architecture.md names the functions that a request passes; real processes pass them in this order."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pawl.client import AsyncClient
from pawl.event.v1 import run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY

pytestmark = pytest.mark.long

_PAGE = Path("docs/design/architecture.md")
_TRACED = Path(__file__).with_name("traced")
_SERVICES = ("agent-loop", "job-store", "tool-registry", "notifier")


def _documented() -> list[str]:
    section = _PAGE.read_text().partition("<!-- path: start -->")[2].partition("<!-- path: end -->")[0]
    return re.findall(r"^\d+\. `([\w.]+:[\w.]+)`", section, re.MULTILINE)


def _calls(folder: Path) -> Iterator[tuple[int, str]]:
    for file in folder.glob("*.calls"):
        for line in file.read_text().splitlines():
            time, _, name = line.partition(" ")
            yield int(time), name


def _reached(path: list[str], calls: list[tuple[int, str]]) -> list[str]:
    """Return the steps of the path up to the first that no call reaches in order."""
    reached: list[str] = []
    for _, name in sorted(calls):
        if len(reached) < len(path) and name == path[len(reached)]:
            reached.append(name)
    return reached


async def test_a_run_takes_the_documented_path() -> None:
    path = _documented()
    assert path
    with tempfile.TemporaryDirectory(prefix="pawl-path-") as name:
        folder = Path(name)
        # PostgreSQL's account passes here.
        folder.chmod(0o711)
        environment = {
            "PYTHONPATH": str(_TRACED),
            "TRACED_FOLDER": name,
            "TRACED_FUNCTIONS": " ".join(path),
        }
        options = SuiteOptions(
            data=folder / "data",
            local_key=LOCAL_KEY,
            service_environment=dict.fromkeys(_SERVICES, environment),
        )
        async with Suite(options), AsyncClient(data=options.data, environment={}) as pawl:
            run = await pawl.start("what is 17 * 23")
            assert (await pawl.result(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
        # Stopping the suite has delivered what was in the outbox.
        calls = list(_calls(folder))
    assert _reached(path, calls) == path
