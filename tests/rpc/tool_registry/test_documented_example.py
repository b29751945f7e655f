"""The example of docs/tools.md works as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from services.tool_registry.adapters.modules import load_modules
from services.tool_registry.sdk import ToolContext
from tests.rpc.tool_registry.registry import content, outcome, running

PAGE = Path(__file__).parents[3] / "docs/tools.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that only this test can import."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("money_tools", "broken_tools"):
        sys.modules.pop(name, None)
    return tmp_path


async def test_the_module_of_the_page_is_a_tool(database_url: str, folder: Path) -> None:
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match is not None
    (folder / "money_tools.py").write_text(match[1])
    (module,) = load_modules(["money_tools"])
    tools = module.tools
    assert [tool.name for tool in tools] == ["convert_money"]
    assert await tools[0](amount=2, source="EUR", target="NOK", context=ToolContext()) == {"amount": 23.0}
    async with running(database_url, folder, tools) as registry:
        arguments = {"amount": "100", "source": "EUR", "target": "USD"}
        assert content(await registry.run("convert_money", arguments, call="a")) == {"amount": 110.0}
        failed = await registry.run("convert_money", arguments | {"target": "XYZ"}, call="b")
        assert outcome(failed) == "FAILED TOOL_ERROR"
        assert content(failed) == {"error": "unknown currency XYZ; known are EUR, NOK, USD"}


@pytest.mark.parametrize("code", ["import nothing_like_this", "1 / 0", "raise SystemExit", "def (", "x = 1"])
def test_a_broken_module_is_named_in_the_log_and_stops_nobody(
    folder: Path, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken_tools.py").write_text(code)
    assert [module.tools for module in load_modules(["broken_tools"]) if module.tools] == []
    assert "broken_tools" in capsys.readouterr().out
