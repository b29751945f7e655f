"""Where the flags may stand that say which suite to talk to, and as whom."""

from __future__ import annotations

import pytest

from pawl.cli.__main__ import flags_first


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["tools"], ["tools"]),
        (["tools", "--data", "folder"], ["--data", "folder", "tools"]),
        (["--data", "folder", "tools"], ["--data", "folder", "tools"]),
        (["run", "--store=one", "hello", "--user", "ann"], ["--store=one", "--user", "ann", "run", "hello"]),
        (["run", "--key-in-clear", "hello"], ["--key-in-clear", "run", "hello"]),
        (["run", "--", "--data"], ["run", "--", "--data"]),
        (["run", "--json", "hello"], ["run", "--json", "hello"]),
    ],
)
def test_flags_may_stand_before_or_behind_the_command(given: list[str], read: list[str]) -> None:
    assert flags_first(given) == read
