"""`pawl init` and `pawl dev`: a suite that follows the files of a product."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import commands
from tests.system.cli.conftest import CommandLine

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
_PATIENCE_SECONDS = 240.0


@pytest.fixture
def product() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pawl-dev-") as folder:
        yield Path(folder) / "shop"


def _until(screen: Path, text: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while text not in screen.read_text():
        assert time.monotonic() < deadline, screen.read_text()
        time.sleep(0.1)


def test_init_creates_a_product_and_dev_follows_its_changes(product: Path) -> None:
    line = CommandLine(product.parent / "data")
    done = commands.pawl("init", str(product), environment=line.environment())
    assert (done.code, "pawl.yaml" in done.output) == (0, True), done.errors
    assert commands.pawl("init", str(product), environment=line.environment()).code == 2
    screen = product.parent / "screen"
    with screen.open("wb") as output:
        suite = subprocess.Popen(
            [sys.executable, "-m", "pawl.cli", "dev", str(product), "--no-open", "--port", "all=0"],
            env=line.environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        _until(screen, "\nassistant: version 1")
        assert "12" in line.succeed("run", "--agent", "assistant", 'call check_stock with {"item": "mug"}')
        agent, tools = product / "agents" / "assistant.yaml", product / "tools" / "stock.py"
        agent.write_text(agent.read_text().replace("check_stock", "count_stock"))
        _until(screen, "assistant.yaml:5: tools.names: there is no tool 'count_stock'")
        tools.write_text(tools.read_text().replace("check_stock", "count_stock").replace("12", "13"))
        _until(screen, "\nassistant: version 2")
        assert "13" in line.succeed("run", "--agent", "assistant", 'call count_stock with {"item": "mug"}')
        tools.write_text("def broken(\n")
        _until(screen, "except:\n  tools.stock: error:")
    finally:
        suite.send_signal(signal.SIGINT)
        assert suite.wait(120) == 0
