"""Virtual environments of peers, created from their lock files on first use."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ENVIRONMENTS: Final = Path(__file__).parent.parent / ".bench"


class Unavailable(Exception):
    """Raised when a peer cannot be installed here. The message contains the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The program and the environment variables that run a peer."""

    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)


async def prepare(peer: Path) -> Environment:
    """Return the environment of the peer in this folder, reinstalling it if the lock file has changed.

    Raises:
        Unavailable: the peer cannot be installed.
    """
    folder = ENVIRONMENTS / peer.name
    lock = (peer / "requirements.txt").read_text(encoding="utf-8")
    package = peer / "package-lock.json"
    stamp = folder / "installed"
    wanted = lock + (package.read_text(encoding="utf-8") if package.exists() else "")
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        print(f"Installing {peer.name} for the comparison (only once) ...", file=sys.stderr)
        await _run(sys.executable, "-m", "venv", "--clear", str(folder))
        pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        await _run(*pip, "--require-hashes", "-r", str(peer / "requirements.txt"))
        if package.exists():
            for name in ("package.json", package.name):
                (folder / name).write_bytes((peer / name).read_bytes())
            await _run("npm", "ci", "--silent", "--prefix", str(folder))
        stamp.write_text(wanted, encoding="utf-8")
    server = folder / "node_modules" / ".bin" / "restate-server"
    return Environment(
        python=folder / "bin" / "python",
        variables={"RESTATE_SERVER": str(server)} if package.exists() else {},
    )


async def _run(*command: str) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except FileNotFoundError:
        raise Unavailable(f"{command[0]} is not installed on this machine") from None
    output, _ = await process.communicate()
    if process.returncode:
        raise Unavailable(output.decode(errors="replace").strip()[-500:])
