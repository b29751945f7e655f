"""The start command of the MCP server in this folder, with its readable and writable folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from pawl.tool.v1 import source_pb2

ROOT: Final = Path(__file__).parents[2]
FAKE: Final = ROOT / "tests" / "fakes" / "mcp_server.py"
# The folders of the server itself: tests, environment and Python
READABLE: Final = (str(ROOT), sys.prefix, sys.base_prefix)


def command(folder: Path) -> list[str]:
    return [sys.executable, "-I", str(FAKE), str(folder)]


def stdio_config(folder: Path, **more: Any) -> source_pb2.McpStdioConfig:
    """Return the configuration of a source that starts the server, which writes only into its folder."""
    paths = {"readable_paths": READABLE, "writable_paths": [str(folder)]}
    return source_pb2.McpStdioConfig(command=command(folder), **(paths | more))


def flags(folder: Path) -> list[str]:
    """Return the arguments of `pawl sources add-mcp` for the same source."""
    return [*(f"--read={path}" for path in READABLE), f"--write={folder}", "--", *command(folder)]
