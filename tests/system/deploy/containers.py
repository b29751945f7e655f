"""Starts the containers of docker-compose.yml as processes on this machine, without a container engine.

Each process gets exactly the command, environment and files that the compose file and the Dockerfile give its
container. Only addresses and paths are translated: ports to free ports on loopback, paths to a folder per container.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import yaml

from pawl.launcher.ports import free_port
from tests.poll import until

ROOT: Final = Path(__file__).parents[3]
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::([?-])([^}]*))?\}")
_ADDRESS: Final = re.compile(r"(?<![\w.])([a-z][a-z-]*|0\.0\.0\.0|127\.0\.0\.1):(\d{4})\b")
_PATH: Final = re.compile(r"(?<![\w.])/(etc|var|data|prometheus)\b")
_SECONDS_MAX: Final = 30.0


def fill_in(example: str, **values: str) -> dict[str, str]:
    """Return the variables of compose.env.example, with a made-up value for each empty password and key."""
    lines = [line.partition("=") for line in example.splitlines() if line and not line.startswith("#")]
    found = {name: value for name, _, value in lines}
    secrets = {
        name: hashlib.sha256(name.encode()).hexdigest()
        for name, value in found.items()
        if not value and name.endswith(("PASSWORD", "KEY"))
    }
    return found | secrets | values


class Containers:
    """The containers as processes. An async context manager, which stops those that it started."""

    def __init__(self, folder: Path, variables: dict[str, str], ports: dict[int, int]) -> None:
        """`ports` are local ports of servers that already run, by their ports in the containers."""
        self._folder = folder
        self._variables = variables
        self._ports = dict(ports)
        self._processes: list[asyncio.subprocess.Process] = []
        self.parts: dict[str, Any] = self._interpolated(
            yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        )
        self._image = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
        self._image_folder = folder / "image"
        for source, target in re.findall(r"^COPY (?!--from)(\S+) /opt/pawl/(\S+)$", self._image, re.MULTILINE):
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, self._image_folder / target, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / source, self._image_folder / target)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.wait(), _SECONDS_MAX)

    def port(self, port: int) -> int:
        """Return the local port for a port of a container."""
        return self._ports.setdefault(port, free_port())

    def write(self, path: str, text: str) -> None:
        """Write a file that the compose file mounts, as its first lines say."""
        (self._folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / path).write_text(text)

    def write_keys(self, callers: list[dict[str, Any]]) -> None:
        """Write the key files: those of callers, and the digests of the keys that services send."""
        named = {"agent-loop", "tool-registry", "notifier", "gateway", "mailbox"}
        keys = {name: self._variables[f"{name.upper().replace('-', '_')}_KEY"] for name in named}
        digests = {name: [hashlib.sha256(key.encode()).hexdigest()] for name, key in keys.items()}
        self.write("deploy/api-keys.json", json.dumps(callers))
        self.write("deploy/service-keys.json", json.dumps(digests))
        for name in ("gateway-keys", "mailbox-passwords", "mailbox-egress"):
            self.write(f"deploy/{name}.json", "{}")

    async def start(self, name: str, *program: str | Path) -> None:
        """Start a container and wait until its health check succeeds. `program` replaces the image's entry point."""
        part, root = self.parts[name], self._folder / name
        self._mount(part, root)
        arguments = [self._local(each, root) for each in part["command"]]
        with (self._folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(program or self._entry_point()),
                *arguments,
                cwd=root,
                env=self._environment(name),
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        await until(lambda: self._is_healthy(name, process))

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def _entry_point(self) -> list[str]:
        entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", self._image, re.MULTILINE)[0])
        return [sys.executable if word == "python" else word for word in entry]

    def _environment(self, name: str) -> dict[str, str]:
        image = dict(
            pair.split("=", 1) for line in re.findall(r"^ENV (.*)$", self._image, re.MULTILINE) for pair in line.split()
        )
        local = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self._image_folder)}
        given = {
            key: self._local(str(value), self._folder / name)
            for key, value in self.parts[name].get("environment", {}).items()
        }
        return image | local | given

    def _mount(self, part: dict[str, Any], root: Path) -> None:
        for volume in part.get("volumes", ()):
            source, target, *_ = volume.split(":")
            here = root / target.removeprefix("/")
            if not source.startswith("./"):
                # A named volume, or a folder of this machine, which a process sees anyway.
                here.mkdir(parents=True, exist_ok=True)
                continue
            given = self._folder / source
            text = (given if given.exists() else ROOT / source).read_text()
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_text(self._local(text, root))

    def _local(self, text: str, root: Path) -> str:
        text = _ADDRESS.sub(lambda match: f"127.0.0.1:{self.port(int(match[2]))}", text)
        return _PATH.sub(lambda match: f"{root}/{match[1]}", text)

    async def _is_healthy(self, name: str, process: asyncio.subprocess.Process) -> bool:
        assert process.returncode is None, self.log(name)
        check = self.parts[name].get("healthcheck", {}).get("test", ["CMD", "true"])[1:]
        done = await asyncio.create_subprocess_exec(
            *(sys.executable if word == "python" else self._local(word, self._folder / name) for word in check),
            cwd=self._image_folder,
            env=self._environment(name),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return await done.wait() == 0

    def _interpolated(self, value: Any) -> Any:
        match value:
            case dict():
                return {key: self._interpolated(each) for key, each in value.items()}
            case list():
                return [self._interpolated(each) for each in value]
            case str():
                return _VARIABLE.sub(self._value, value)
        return value

    def _value(self, match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        value = self._variables.get(name, "")
        assert value or operator != "?", f"{name}: {word}"
        return value or (word if operator == "-" else "")
