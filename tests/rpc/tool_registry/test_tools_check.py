"""`pawl tools check` as users run it: without a suite and without a model (TOOL-3)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

GOOD = '''
from typing import Annotated
from pawl.tools import Category, EffectClass, ToolContext, ToolError, tool

@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, preview=lambda amount, to: f"convert {amount}")
def convert(amount: float, context: ToolContext, to: Annotated[str, "for example EUR"] = "EUR") -> dict[str, object]:
    """Convert money."""
    context.progress(0.5, "half way")
    if amount < 0:
        raise ToolError("less than nothing")
    if amount == 0:
        raise ValueError("for the author only")
    return {"amount": amount, "to": to, "user": context.user_id, "key": context.secret("key") if amount == 7 else ""}
'''

TWINS = '''
from pawl.tools import ProcessLimits, tool

@tool
def convert(count: int = 3) -> int:
    """Convert again."""

def _made():
    @tool
    def inner() -> int:
        """Be within."""
        return 1
    return inner

made = _made()

@tool(process=ProcessLimits())
def apart() -> str:
    """Run apart."""
    print("seen")
    return "apart"
'''


# The tool blocks until the watchdog has noticed it.
ASYNC = '''
import threading
from pawl.tool_registry.sources.python import tool_loop
from pawl.tools import ToolContext, tool

seen = threading.Event()
see = tool_loop.ToolLoop._blocked
tool_loop.ToolLoop._blocked = lambda *given: (see(*given), seen.set())
tool_loop.BLOCKED_SECONDS = 0.05

@tool
async def order(context: ToolContext) -> str:
    """Order."""
    return await context.ask("Which colour?")

@tool
async def nap() -> None:
    """Block the event loop."""
    seen.wait(60)
'''


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    folder = tmp_path / "kit"
    folder.mkdir()
    (folder / "a_good.py").write_text(GOOD)
    return tmp_path


def check(
    folder: Path, *arguments: str, program: Sequence[str] = ("pawl.tool_registry.check",), **environment: str
) -> tuple[int, str, str]:
    """Run what `pawl tools check` runs, or the command itself, which takes longer."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAWL_")}
    done = subprocess.run(
        [sys.executable, "-m", *program, *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_loaded_tools_are_listed_with_warnings(kit: Path) -> None:
    code, output, _ = check(kit, program=("pawl.cli", "tools", "check"), PAWL_TOOLS="./kit")
    assert code == 0
    assert output.splitlines() == [
        "kit.a_good",
        "  convert  safe, read only",
        "    warning: parameter amount has no description (from Args: in the docstring, or a string in Annotated)",
        "1 tool, 0 errors, 1 warning",
    ]


def test_broken_modules_and_duplicate_names_are_errors(kit: Path) -> None:
    assert check(kit)[0] == 2, "no tool is named"
    modules = {
        "b_broken": "x = 1\nimport nothing_like_this\n",
        "c_twins": TWINS,
        "d_typo": 'from pawl.tools import tool\n\n@tool(effect="READONLY")\ndef look() -> str:\n    """Look."""\n',
        "_plain": 'def far() -> int:\n    """Be far."""\n    return 1\n',
        "e_near": "from pawl.tools import ProcessLimits, tool\n"
        "from . import _plain\n"
        "near = tool(process=ProcessLimits())(_plain.far)\n",
    }
    for name, content in modules.items():
        (kit / f"kit/{name}.py").write_text(content)
    code, output, _ = check(kit, "./kit")
    said = (
        "d_typo.py:3: ToolDefinitionError: look: Invalid enum value 'READONLY' - at `$.effect`",
        "    error: it must be a top-level name of its module pawl_tools_",
        f"  error: {kit}/kit/b_broken.py:2: ModuleNotFoundError: No module named 'nothing_like_this'",
        "    error: the name is taken by a tool in kit.a_good; the registry would skip this one",
        "  apart  sensitive, at most once, own process",
    )
    assert (code, [each for each in said if each not in output]) == (1, [])


def test_call_is_checked_and_run_like_one_from_the_model(kit: Path) -> None:
    secrets = kit / "secrets.json"
    secrets.write_text('{"acme": {"key": "hunter2"}}')
    given = ("./kit", "--call", "convert", "--args", '{"amount": "7"}', "--store", "acme", "--user", "ann")
    code, output, _ = check(kit, *given, PAWL_TOOL_SECRETS_FILE=str(secrets))
    assert code == 0
    lines = output.splitlines()[4:]
    assert lines[:-1] == [
        "",
        'arguments: {"amount":7,"to":"EUR"}',
        'note: Arguments were adjusted: amount: "7" was read as 7',
        "approval: not needed",
        "preview: convert 7.0",
        "progress: 50% half way",
        'result: {"amount":7.0,"key":"[secret]","to":"EUR","user":"ann"}',
    ]
    assert lines[-1].startswith("duration: ")


@pytest.mark.parametrize(
    ("name", "arguments", "code", "said", "logged"),
    [
        ("convert", '{"amonut": 1}', 1, "refused: INVALID_ARGUMENTS: ", ""),
        ("convert", '{"amount": 0}', 1, 'failed: {"error":"TOOL_ERROR: ValueError.', "ValueError: for the author only"),
        ("order", "{}", 1, "`pawl tools check` cannot answer questions; the tool asks: Which colour?", ""),
        ("apart", "{}", 0, 'seen\nresult: "apart"\n', ""),
        ("nap", "{}", 0, "warning: nap blocks the event loop of async tools", ""),
        ("konvert", "{}", 2, "", "there is no tool 'konvert'; did you mean 'convert'?\n"),
    ],
)
def test_call_prints_its_outcome(kit: Path, name: str, arguments: str, code: int, said: str, logged: str) -> None:  # noqa: PLR0917
    (kit / "twins.py").write_text(TWINS)
    (kit / "ask.py").write_text(ASYNC)
    entries = ["twins"] if name == "apart" else ["./kit", "./ask.py"]
    found, output, errors = check(kit, *entries, "--call", name, "--args", arguments)
    assert (found, all(line in output for line in said.splitlines()), logged in errors) == (code, True, True)
