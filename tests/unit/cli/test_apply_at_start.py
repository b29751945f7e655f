"""PAWL_APPLY: the set of files that a suite applies when it starts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from pawl.chassis.process.start import StartError
from pawl.cli.declared import applying, commands
from pawl.cli.declared.applying import ApplyError, FileSet
from pawl.cli.declared.rules import Key
from pawl.errors import Conflict
from pawl.launcher.options import ApplyOptions, SuiteOptions, read_options


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SuiteOptions:
    """Options with a set of one agent. No client connects, and retries do not wait."""
    monkeypatch.setattr(commands, "AsyncClient", lambda **given: nullcontext())
    monkeypatch.setattr(commands, "ask", AsyncMock())
    monkeypatch.setattr(commands, "_RETRY_SECONDS", 0.0)
    (tmp_path / "agents").mkdir()
    (tmp_path / "pawl.yaml").write_text("name: shop\n")
    (tmp_path / "agents" / "clerk.yaml").write_text("name: clerk\n")
    return SuiteOptions(data=tmp_path, apply=ApplyOptions(folder=tmp_path))


async def test_the_set_is_reapplied_until_what_it_names_exists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: SuiteOptions
) -> None:
    tries = iter(["refused", "taken", "warned", "saved"])

    async def apply(_target: object, wanted: FileSet) -> AsyncIterator[str]:
        assert list(wanted.asked) == [Key("agent", "clerk")]
        if (now := next(tries)) == "refused":
            raise ApplyError("There is no tool 'late'.", may_pass=True)
        if now == "taken":
            raise Conflict("another process is applying the set 'shop'")
        yield "clerk: version 1" if now == "warned" else "clerk: version 2"
        if now == "warned":
            yield "  warning: late_* matches no available tool"

    monkeypatch.setattr(applying, "apply", apply)
    await commands.apply_at_start(options)
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("PAWL_APPLY: ").split("'")[0] for line in lines] == [
        "There is no tool ",
        "Another process is applying the set ",
        "clerk: version 1",
        "  warning: late_* matches no available tool",
        "clerk: version 2",
    ]


async def test_a_warning_that_cannot_pass_is_not_retried(
    monkeypatch: pytest.MonkeyPatch, options: SuiteOptions
) -> None:
    tries = iter(["once"])

    async def apply(_target: object, _wanted: FileSet) -> AsyncIterator[str]:
        yield f"clerk: applied {next(tries)}"
        yield "  warning: no file declares agent old; --prune deletes them"

    monkeypatch.setattr(applying, "apply", apply)
    await commands.apply_at_start(options)


async def test_invalid_files_are_reported_once_at_the_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    await commands.apply_at_start(SuiteOptions(data=tmp_path, apply=ApplyOptions(folder=tmp_path / "none")))
    assert "cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("text", [",store=a", "f,stor=a", "f,user="])
def test_an_invalid_pawl_apply_is_refused(text: str) -> None:
    with pytest.raises(StartError, match="PAWL_APPLY must be FOLDER"):
        read_options({"PAWL_APPLY": text})


def test_pawl_apply_names_folder_store_and_user() -> None:
    assert read_options({"PAWL_APPLY": "shop,store=acme,user=ann"}).apply == ApplyOptions(
        folder=Path("shop"), store="acme", user="ann"
    )
