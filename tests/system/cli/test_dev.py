"""`pawl init` and `pawl dev`: a suite that follows the files of a product."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import commands
from tests.servers import open_folder
from tests.system.cli.conftest import CommandLine, shows, started

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
_PATIENCE_SECONDS = 240.0


@pytest.fixture
def product() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder / "shop"


def test_init_creates_a_product_and_dev_follows_its_changes(product: Path) -> None:
    line = CommandLine(product.parent / "data")
    done = commands.pawl("init", str(product), environment=line.environment())
    assert (done.code, "pawl.yaml" in done.output) == (0, True), done.errors
    assert commands.pawl("init", str(product), environment=line.environment()).code == 2
    with started(product.parent, line.environment(), "dev", str(product), "--no-open") as screen:
        shows(screen, "\nassistant: version 1")
        assert "12" in line.succeed("run", "--agent", "assistant", 'call check_stock with {"item": "mug"}')
        agent, tools = product / "agents" / "assistant.yaml", product / "tools" / "stock.py"
        agent.write_text(agent.read_text().replace("check_stock", "count_stock"))
        shows(screen, "assistant.yaml:5: tools.names: there is no tool 'count_stock'")
        tools.write_text(tools.read_text().replace("check_stock", "count_stock").replace("12", "13"))
        shows(screen, "\nassistant: version 2")
        assert "13" in line.succeed("run", "--agent", "assistant", 'call count_stock with {"item": "mug"}')
        tools.write_text("def broken(\n")
        shows(screen, "\n  tools.stock: error:")
