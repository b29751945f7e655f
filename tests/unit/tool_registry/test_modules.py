"""Modules, packages and folders of tools (TOOL-3)."""

from __future__ import annotations

import asyncio
import email
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pawl.tool_registry.sources.python.modules import DeploymentTools, ToolModule, folder_of, load_modules

TOOL = '''
from pawl.tools import tool
{before}

@tool
def {name}() -> str:
    """Say it."""
    return {value}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, name: str = "", *, before: str = "", value: str = "'said'") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TOOL.format(name=name, before=before, value=value) if name else before)


def loaded(*entries: str) -> dict[str, list[str]]:
    return {module.name: [tool.name for tool in module.tools] for module in load_modules(entries) if module.tools}


def broken(*entries: str) -> list[ToolModule]:
    return [module for module in load_modules(entries) if module.error]


def test_a_package_provides_the_tools_in_all_its_modules(folder: Path) -> None:
    write(folder / "pack/__init__.py")
    write(folder / "pack/money.py", "convert")
    write(folder / "pack/deep/__init__.py", "here")
    write(folder / "pack/deep/below.py", "there")
    write(folder / "pack/_hidden.py", "hidden")
    expected = {"pack.deep": ["here"], "pack.deep.below": ["there"], "pack.money": ["convert"]}
    assert loaded("pack") == expected


def test_folders_and_single_files_can_be_loaded(folder: Path) -> None:
    write(folder / "plain/money.py", "convert")
    write(folder / "plain/pack/__init__.py", "packed")
    write(folder / "plain/_shared.py", "hidden")
    write(folder / "other/single.py", "single")
    write(folder / "other/left.py", "left")
    assert loaded("plain", "./other/single.py") == {
        "plain.money": ["convert"],
        "plain.pack": ["packed"],
        "single": ["single"],
    }


def test_modules_of_a_folder_share_code_by_relative_imports(folder: Path) -> None:
    write(folder / "kit/_shared.py", before="WORD = 'shared'")
    write(folder / "kit/user.py", "share", before="from . import _shared", value="_shared.WORD")
    (module,) = load_modules(["./kit"])
    assert module.tools[0]() == "shared"


def test_a_module_of_a_folder_does_not_shadow_an_installed_one(folder: Path) -> None:
    """Even after the folder is loaded, imports of `email` get the standard library's module."""
    write(folder / "kit/email.py", "send")
    write(folder / "kit/user.py", "kind", before="from email import message", value="message.__name__")
    modules = {module.name: module for module in load_modules(["./kit"])}
    assert modules["kit.user"].tools[0]() == "email.message"
    assert sys.modules["email"] is email
    imported = modules["kit.email"].tools[0].function.__module__
    assert folder_of(imported) == (folder / "kit").resolve()
    assert folder_of("email") is None


@pytest.mark.parametrize("entry", ["pack", "./pack"])
def test_a_broken_module_is_reported_and_does_not_block_its_package(folder: Path, entry: str) -> None:
    write(folder / "pack/__init__.py")
    write(folder / "pack/a_typo.py", before="x = 1\ndef (:\n")
    write(folder / "pack/b_crash.py", before="\n\nprint(1 / 0)\n")
    write(folder / "pack/c_needs.py", before="import nothing_like_this\n")
    write(folder / "pack/d_works.py", "works")
    write(folder / "pack/e_refused.py", "no_text", before="def helper(): pass")
    refused = (folder / "pack/e_refused.py").read_text().replace('    """Say it."""\n', "")
    (folder / "pack/e_refused.py").write_text(refused)
    errors = [module.error for module in broken(entry)]
    assert errors[0].startswith(f"{folder}/pack/a_typo.py:2: SyntaxError: ")
    assert errors[1] == f"{folder}/pack/b_crash.py:3: ZeroDivisionError: division by zero"
    assert errors[2] == f"{folder}/pack/c_needs.py:1: ModuleNotFoundError: No module named 'nothing_like_this'"
    assert errors[3].startswith(f"{folder}/pack/e_refused.py:5: ToolDefinitionError: no_text: description")
    assert [tool.name for module in load_modules([entry]) for tool in module.tools] == ["works"]


def test_a_folder_with_a_broken_init_still_loads_its_modules(folder: Path) -> None:
    write(folder / "kit/__init__.py", before="import nothing_like_this")
    write(folder / "kit/works.py", "works")
    modules = list(load_modules(["./kit"]))
    assert [(module.name, bool(module.error)) for module in modules] == [("kit", True), ("kit.works", False)]
    assert modules[0].error.startswith(f"{folder}/kit/__init__.py:1: ModuleNotFoundError")


@pytest.mark.parametrize("entry", ["missing_module", "./missing", "./missing.py", "a..b"])
def test_a_missing_module_is_named(folder: Path, entry: str) -> None:
    (module,) = broken(entry)
    assert module.name == entry


def test_a_tool_imported_by_another_module_is_registered_once(folder: Path) -> None:
    write(folder / "pack/__init__.py", before="from pack.money import convert")
    write(folder / "pack/money.py", "convert")
    assert loaded("pack", "pack.money") == {"pack": ["convert"]}


class LoadedTools:
    """Stands in for the catalog."""

    def __init__(self) -> None:
        self.sources: dict[str, list[Any]] = {}
        self.has_changed = asyncio.Event()

    def forget(self, prefix: str) -> None:
        assert all(source.startswith(prefix) for source in self.sources)
        self.sources.clear()

    async def load(self, source: str, tools: Any) -> None:
        self.sources[source] = [tool() for tool in tools]
        self.has_changed.set()


async def test_changed_files_of_a_folder_are_imported_again_after_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a file keeps its size and the second of its last change, by which bytecode is checked."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write(folder / "kit/_shared.py", before="WORD = 'one'")
    write(folder / "kit/user.py", "share", before="from . import _shared", value="_shared.WORD")
    catalog: Any = LoadedTools()
    tools = DeploymentTools(catalog, ["./kit"])
    await tools.load()
    assert catalog.sources == {"module:kit.user": ["one"]}
    reloading = asyncio.create_task(tools.reload_forever())
    for word in ("two", "six"):
        catalog.has_changed.clear()
        write(folder / "kit/_shared.py", before=f"WORD = '{word}'")
        if word == "two":
            write(folder / "kit/other.py", "other")
        os.utime(folder / "kit/_shared.py", (2e9, 2e9))
        os.kill(os.getpid(), signal.SIGUSR1)
        await catalog.has_changed.wait()
        await asyncio.sleep(0)
        assert catalog.sources == {"module:kit.other": ["said"], "module:kit.user": [word]}
    reloading.cancel()
    await asyncio.wait([reloading])
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
