"""`pawl complete`: a token that stands in the command is seen by everybody on the machine, so it can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pawl.client import AsyncClient
from tests.unit.cli.test_arguments import invoke

TOKEN = "cmp_abc"


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens that came to a suite."""
    tokens: list[str] = []

    async def complete_call(_: AsyncClient, token: str, *_result: Any, error: str) -> bool:
        tokens.append(token)
        return False

    monkeypatch.setattr(AsyncClient, "complete_call", complete_call)
    return tokens


def complete(token: str, standard_input: str = "") -> tuple[int, str]:
    return invoke("--address", "127.0.0.1:1", "complete", token, "--result", "1", input_text=standard_input)


def test_a_token_is_read_from_standard_input_or_a_file_or_stands_there(completed: list[str], tmp_path: Path) -> None:
    file = tmp_path / "order.token"
    file.write_text(f"{TOKEN}\n")
    for given, standard_input in (("-", f" {TOKEN}\r\nmore\n"), (f"@{file}", ""), (TOKEN, "")):
        assert complete(given, standard_input) == (0, "Completed.\n")
    assert completed == [TOKEN] * 3


def test_a_token_that_cannot_be_read_is_said_so(completed: list[str], tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.touch()
    assert complete("-") == (2, "There is nothing in standard input.\n")
    assert complete(f"@{file}") == (2, f"There is nothing in {file}.\n")
    code, output = complete(f"@{tmp_path}/absent")
    assert (code, "absent cannot be read: No such file or directory" in output) == (2, True)
    assert completed == []
