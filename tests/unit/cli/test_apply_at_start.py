"""PAWL_APPLY, `pawl init` and `pawl dev`: the set of files that a suite applies when it starts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import typer

from pawl.chassis.process.start import StartError
from pawl.cli import dev
from pawl.cli.declared import applying, commands
from pawl.cli.declared.applying import ApplyError, FileSet
from pawl.cli.declared.rules import Key
from pawl.errors import Conflict, PawlError
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


def with_apply(monkeypatch: pytest.MonkeyPatch, *tries: list[str] | PawlError | ApplyError) -> None:
    """Have each attempt to apply the set print these lines or fail with this error."""
    following = iter(tries)

    async def apply(_target: object, wanted: FileSet) -> AsyncIterator[str]:
        assert list(wanted.asked) == [Key("agent", "clerk")]
        found = next(following)
        if isinstance(found, Exception):
            raise found
        for line in found:
            yield line

    monkeypatch.setattr(applying, "apply", apply)


async def test_a_set_is_reapplied_until_the_resources_that_it_names_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: SuiteOptions
) -> None:
    refused = ApplyError("There is no tool 'late'.", may_pass=True)
    taken = Conflict("another process is applying the set 'shop'")
    warned = ["clerk: version 1", "  warning: late_* matches no available tool"]
    both = ["clerk: version 2", "  +options:", "boss: version 1", "  +options:"]
    with_apply(monkeypatch, refused, refused, taken, warned, both)
    await commands.apply_at_start(options)
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("PAWL_APPLY: ").split("'")[0] for line in lines] == [
        "There is no tool ",
        "Another process is applying the set ",
        "clerk: version 1",
        "  warning: late_* matches no available tool",
        *both,
    ]


async def test_a_permanent_warning_does_not_cause_a_retry(
    monkeypatch: pytest.MonkeyPatch, options: SuiteOptions
) -> None:
    with_apply(monkeypatch, ["clerk: applied", "  warning: no file declares agent old; --prune deletes them"])
    await commands.apply_at_start(options)


async def test_two_processes_cannot_apply_a_set_at_once(monkeypatch: pytest.MonkeyPatch, options: SuiteOptions) -> None:
    with_apply(monkeypatch, *[["clerk: unchanged"]] * 2)
    monkeypatch.setattr(commands, "ask", AsyncMock(side_effect=Conflict("another process is applying the set")))
    target: Any = None
    with pytest.raises(Conflict):
        _ = [line async for line in commands._leased(target, applying.read([options.data]))]
    for wanted in (applying.read([options.data], dry_run=True), applying.read([options.data / "agents"])):
        assert [line async for line in commands._leased(target, wanted)] == ["clerk: unchanged"], "it needs no lease"


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


def test_init_prints_a_command_that_the_shell_can_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "a b" / "c!"
    dev.init(folder)
    assert f"`cd '{folder}' && pawl dev`" in capsys.readouterr().out
    assert (folder / "pawl.yaml").read_text() == "name: c\n"


def test_dev_names_the_folder_that_has_no_product(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given: Any = SimpleNamespace(obj={"data": None})
    for folder, hint in ((Path("a b"), "`pawl init 'a b'`"), (Path(), "`pawl init`")):
        with pytest.raises(typer.Exit):
            dev.dev(given, folder)
        assert f"{tmp_path / folder} has no pawl.yaml. Create a product with {hint}." in capsys.readouterr().err


def test_dev_keeps_data_and_tools_in_the_folder_of_the_product(
    monkeypatch: pytest.MonkeyPatch, options: SuiteOptions
) -> None:
    assert options.apply is not None
    folder, started = options.apply.folder, list[SuiteOptions]()
    monkeypatch.delenv("PAWL_DATA", raising=False)
    monkeypatch.setattr(dev, "run_suite", lambda options, _: started.append(options))
    given: Any = SimpleNamespace(obj={"data": None})
    with pytest.raises(typer.Exit):
        dev.dev(given, folder)
    assert (started[0].data, started[0].environment["PAWL_TOOLS"]) == (folder / ".pawl", str(folder / "tools"))
    assert (folder / "tools").is_dir(), "tools that are added later are loaded"


async def test_dev_reports_on_terminal_and_console_when_errors_occur_and_when_they_are_fixed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: SuiteOptions
) -> None:
    suite: Any = SimpleNamespace(reload_tools=AsyncMock(), broken_tools=[], loaded_tools=["count"], options=options)
    suite.folder = SimpleNamespace(run=options.data)
    shown = options.data / "problems.json"
    await dev._reload_tools(suite)
    suite.broken_tools = ["tools.bad: error: x"]
    await dev._reload_tools(suite)
    done, stays = "Reloaded the tools: count.\n", "Their last good tools stay in use until the errors are fixed"
    assert capsys.readouterr().out == f"{done}{done}These files have errors. {stays}:\n  tools.bad: error: x\n"
    tries = iter([["clerk.yaml:1: bad", "clerk.yaml:2: worse"], []])

    async def apply(_target: object, _wanted: FileSet) -> AsyncIterator[str]:
        if problems := next(tries):
            raise ApplyError("\n".join(problems), may_pass=True)
        assert json.loads(shown.read_text()) == ["tools.bad: error: x", "clerk.yaml:1: bad", "clerk.yaml:2: worse"]
        yield "clerk: version 1"

    monkeypatch.setattr(applying, "apply", apply)
    await dev._apply(dev._Shown(suite))
    assert json.loads(shown.read_text()) == ["tools.bad: error: x"]
    assert capsys.readouterr().out.splitlines()[-2:] == ["clerk: version 1", "Fixed: the resources have no errors."]
