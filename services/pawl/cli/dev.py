"""Implements `pawl init` and `pawl dev`, which create a product's folder and run a suite that follows it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from pawl.chassis.process.start import StartError
from pawl.cli import wording
from pawl.cli.command import Flags, fail
from pawl.cli.declared.commands import apply_at_start
from pawl.cli.declared.files import SET_FILE
from pawl.cli.declared.rules import KINDS
from pawl.cli.declared.rules import folder as folder_of
from pawl.cli.failure import CommandError
from pawl.launcher.options import ApplyOptions, read_options
from pawl.launcher.suite import PROBLEMS_FILE, Suite
from pawl.launcher.up import up as run_suite

_POLL_SECONDS: Final = 0.25
_TOOLS: Final = "tools"
_PRODUCT: Final[Mapping[str, str]] = {
    SET_FILE: "name: {name}\n",
    "agents/assistant.yaml": """\
name: assistant
options:
  instructions: You help the customers of a small shop.
tools:
  names: [check_stock]
""",
    "tools/stock.py": '''\
from typing import Annotated

from pawl.tools import Category, EffectClass, ToolError, tool

STOCK = {{"mug": 12, "teapot": 3}}


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def check_stock(item: Annotated[str, "singular, for example mug"]) -> dict[str, int]:
    """Look up how many items are in stock."""
    if item not in STOCK:
        raise ToolError(f"There is no item {{item}}. Known items: {{', '.join(STOCK)}}.")
    return {{"in_stock": STOCK[item]}}
''',
    ".gitignore": ".pawl/\n__pycache__/\n",
}

Folder = Annotated[Path, typer.Argument(help="Folder of the product.", show_default="the current folder")]


def init(folder: Folder = Path()) -> None:
    """Create the folder of a small product: an agent and a tool.

    Existing files are never changed.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.resolve().name).strip("-")[:64] or "product"
    try:
        if taken := [path for path in _PRODUCT if (folder / path).exists()]:
            raise CommandError(f"{folder / taken[0]} already exists. Choose another folder.")
        for path, text in _PRODUCT.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text.format(name=name), encoding="utf-8")
            print(folder / path)
    except OSError as error:
        raise typer.Exit(fail(CommandError(f"{error.filename} cannot be written: {error.strerror}."), [])) from None
    except CommandError as error:
        raise typer.Exit(fail(error, [])) from None
    print(f"Start it with `{'' if folder == Path() else f'cd {shlex.quote(str(folder))} && '}pawl dev`.")


def dev(
    context: typer.Context,
    folder: Folder = Path(),
    *,
    port: Annotated[list[str] | None, typer.Option(help="name=number, as in `pawl up`. Repeatable.")] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the console.")] = False,
) -> None:
    """Start the suite for a product's folder, and reload the folder's changes.

    The folder contains pawl.yaml, resources in subfolders (see `pawl apply`), and
    Python tools in the subfolder tools. When a file changes, its tools or
    resources are reloaded. Errors are printed, and shown in the console. If a
    file has an error, its last working version stays in use until you fix it.
    Data is in the subfolder .pawl, unless --data or PAWL_DATA names another
    folder.
    """
    given: Flags = context.obj
    product = folder.resolve()
    try:
        if not (product / SET_FILE).is_file():
            create = "pawl init" if folder == Path() else f"pawl init {shlex.quote(str(folder))}"
            raise CommandError(f"{product} has no {SET_FILE}. Create a product with `{create}`.")
        (product / _TOOLS).mkdir(exist_ok=True)
        environment = {"PAWL_DATA": str(product / ".pawl"), **os.environ, "PAWL_TOOLS": str(product / _TOOLS)}
        read = read_options(environment, data=given["data"], ports=port or ())
    except OSError as error:
        raise typer.Exit(fail(CommandError(f"{error.filename} cannot be created: {error.strerror}."), [])) from None
    except (CommandError, StartError) as error:
        raise typer.Exit(fail(error, [])) from None
    options = replace(read, apply=ApplyOptions(folder=folder))

    async def follow(suite: Suite) -> None:
        if not no_open:
            _open_console(suite)
        await _follow(suite, folder)

    raise typer.Exit(run_suite(options, follow))


async def _follow(suite: Suite, folder: Path) -> None:
    """Reload tools and apply resources whenever their files change."""
    seen = await asyncio.to_thread(_changes, folder)
    _print_tools(suite, f"Loaded the tools from {folder / _TOOLS}")
    _print_watched(folder)
    shown = _Shown(suite)
    shown.show("")
    applying = asyncio.create_task(_apply(shown))
    try:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            found = await asyncio.to_thread(_changes, folder)
            if found == seen:
                continue
            applying.cancel()
            await asyncio.wait([applying])
            if found[0] != seen[0]:
                await _reload_tools(suite)
            # Also after tools change, because a resource may refer to a new one.
            applying = asyncio.create_task(_apply(shown))
            seen = found
    finally:
        applying.cancel()


class _Shown:
    """Shows in the console what is broken, and prints a message when the resources are valid again."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self._problem = ""

    def show(self, problem: str) -> None:
        """Show this problem with the resources below the problems with tools."""
        if self._problem and not problem:
            print("Fixed: the resources have no errors.", flush=True)
        self._problem = problem
        run = self.suite.folder.run
        lines = [*self.suite.broken_tools, *problem.splitlines()]
        part = run / f"{PROBLEMS_FILE}.part"
        part.write_text(json.dumps([wording.clean(line) for line in lines]), encoding="utf-8")
        part.replace(run / PROBLEMS_FILE)


async def _apply(shown: _Shown) -> None:
    await apply_at_start(shown.suite.options, prefix="", report=shown.show)


async def _reload_tools(suite: Suite) -> None:
    try:
        await suite.reload_tools()
    except StartError as error:
        print(error, file=sys.stderr, flush=True)
    else:
        _print_tools(suite, "Reloaded the tools")


def _print_watched(folder: Path) -> None:
    print(f"Watching {folder.resolve()}: {SET_FILE}, {_TOOLS}, {', '.join(map(folder_of, KINDS))}.", flush=True)


def _print_tools(suite: Suite, done: str) -> None:
    print(f"{done}: {', '.join(suite.loaded_tools) or 'none'}.", flush=True)
    if broken := suite.broken_tools:
        print("These files have errors. Their last good tools stay in use until the errors are fixed:", flush=True)
    for line in broken:
        print(f"  {wording.clean(line)}", flush=True)


def _changes(folder: Path) -> tuple[Mapping[Path, int], Mapping[Path, int]]:
    """Return the modification times of the tools' files and of the resources' files."""
    tools = list((folder / _TOOLS).rglob("*.py"))
    resources = [folder / SET_FILE, *(file for kind in KINDS for file in (folder / folder_of(kind)).glob("*"))]
    return _times(tools), _times(resources)


def _times(files: list[Path]) -> Mapping[Path, int]:
    found: dict[Path, int] = {}
    for file in files:
        try:
            found[file] = file.stat().st_mtime_ns
        except OSError:
            continue  # An editor is replacing the file.
    return found


def _open_console(suite: Suite) -> None:
    command = (sys.executable, "-m", "pawl.cli", "--data", str(suite.options.data), "console")
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
