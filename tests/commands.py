"""Runs commands of `pawl`, each in its own process.

Imports and the command tree dominate a short command, so one process loads both and forks each command.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LOADED: Final = multiprocessing.get_context("forkserver")
_LOADED.set_forkserver_preload(["tests.commands_loaded"])
_SECONDS_MAX: Final = 240.0
# The capacity of a pipe without a reader
_KEYBOARD_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    code: int
    output: str
    errors: str


def pawl(*arguments: str, environment: Mapping[str, str], keyboard: str = "") -> Done:
    """Run a command without a terminal, in exactly this environment.

    Raises:
        TimeoutError: the command did not end in time and was killed.
    """
    assert len(keyboard.encode()) <= _KEYBOARD_BYTES_MAX
    with tempfile.TemporaryDirectory(prefix="pawl-command-") as name:
        folder = Path(name)
        process = _LOADED.Process(target=_run, args=(arguments, dict(environment), keyboard, folder))
        process.start()
        try:
            process.join(_SECONDS_MAX)
            if process.exitcode is None:
                process.kill()
                process.join()
                raise TimeoutError(f"pawl {' '.join(arguments)}: {_written(folder)}")
            code = process.exitcode
        finally:
            process.close()
        output, errors = _written(folder)
    return Done(code=code, output=output, errors=errors)


def _written(folder: Path) -> tuple[str, str]:
    output, errors = (
        path.read_text(encoding="utf-8") if path.exists() else "" for path in (folder / "output", folder / "errors")
    )
    return output, errors


def _run(arguments: tuple[str, ...], environment: dict[str, str], keyboard: str, folder: Path) -> None:
    """Run `pawl` as in a new interpreter."""
    os.environ.clear()
    os.environ.update(environment)
    reading, writing = os.pipe()
    os.write(writing, keyboard.encode())
    os.close(writing)
    written = [os.open(folder / name, os.O_WRONLY | os.O_CREAT) for name in ("output", "errors")]
    for standard, descriptor in enumerate((reading, *written)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    # For as long as the process lives.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = ["pawl", *arguments]

    from pawl.cli.__main__ import main  # noqa: PLC0415  # in this process only, and loaded

    main()
