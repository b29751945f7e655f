"""Validates the configuration of MCP sources (see the messages in pawl.tool.v1.SourceConfig)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final, TypeAlias

from pawl.errors import InvalidField
from pawl.server.egress.policy import EgressRefused, read_target
from pawl.tool.v1.source_pb2 import McpHttpConfig, McpStdioConfig, SourceConfig
from pawl.tool_registry.sources.http.rules.binding import check_headers
from pawl.tools.rules.definition import require

COMMAND_MAX: Final = 64
_TEXT_CHARACTERS_MAX: Final = 8192
_ENTRIES_MAX: Final = 100
_MEMORY_BYTES_MIN: Final = 32 * 1024 * 1024
_PROCESSES_MAX: Final = 1000


McpServer: TypeAlias = McpStdioConfig | McpHttpConfig


def read_config(config: SourceConfig) -> McpServer:
    """Return the server described by a configuration.

    Raises:
        InvalidField: The configuration is invalid.
    """
    if config.HasField("mcp_stdio"):
        _check_stdio(config.mcp_stdio)
        return config.mcp_stdio
    _check_http(config.mcp_http)
    return config.mcp_http


def secrets_of(server: McpServer) -> Mapping[str, str]:
    """Return the names of a server's secrets, keyed by the variable or header that carries each of them."""
    return server.secret_environment if isinstance(server, McpStdioConfig) else server.secret_headers


def _check_stdio(config: McpStdioConfig) -> None:
    where = "config.mcp_stdio"
    require(1 <= len(config.command) <= COMMAND_MAX, f"{where}.command", f"must have between 1 and {COMMAND_MAX} items")
    require(
        all(map(_is_argument, config.command)),
        f"{where}.command",
        f"items must have at most {_TEXT_CHARACTERS_MAX} characters, none of them NUL",
    )
    require(bool(config.command[0].strip()), f"{where}.command", "must start with a program")
    for field, names in (("environment", config.environment), ("secret_environment", config.secret_environment)):
        require(len(names) <= _ENTRIES_MAX, f"{where}.{field}", f"must have at most {_ENTRIES_MAX} variables")
        require(
            all(_is_variable(name, value) for name, value in names.items()),
            f"{where}.{field}",
            "has a variable whose name or value is not allowed",
        )
    for field, paths in (("readable_paths", config.readable_paths), ("writable_paths", config.writable_paths)):
        require(len(paths) <= _ENTRIES_MAX, f"{where}.{field}", f"must have at most {_ENTRIES_MAX} paths")
        holds = all(_is_argument(path) and _is_absolute(path) for path in paths)
        require(holds, f"{where}.{field}", "must contain only absolute paths without ..")
    memory, processes = config.memory_bytes_max, config.processes_max
    require(
        not memory or memory >= _MEMORY_BYTES_MIN, f"{where}.memory_bytes_max", f"must be at least {_MEMORY_BYTES_MIN}"
    )
    require(memory < 2**62, f"{where}.memory_bytes_max", "must be less than 2^62")
    require(processes <= _PROCESSES_MAX, f"{where}.processes_max", f"must be at most {_PROCESSES_MAX}")


def _check_http(config: McpHttpConfig) -> None:
    where = "config.mcp_http"
    require(
        len(config.url) <= _TEXT_CHARACTERS_MAX, f"{where}.url", f"must be at most {_TEXT_CHARACTERS_MAX} characters"
    )
    try:
        read_target(config.url)
    except EgressRefused as refused:
        raise InvalidField(f"{where}.url: {refused}", field=f"{where}.url") from None
    check_headers(where, config.headers, config.secret_headers)


def _is_argument(text: str) -> bool:
    return "\0" not in text and len(text) <= _TEXT_CHARACTERS_MAX


def _is_variable(name: str, value: str) -> bool:
    return bool(name) and "=" not in name and _is_argument(name) and _is_argument(value)


def _is_absolute(path: str) -> bool:
    return PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts
