"""Modules of tools, named in PAWL_TOOLS."""

from __future__ import annotations

import importlib
from typing import Any

from services.chassis import logs
from services.tool_registry.sdk import Tool

_log = logs.get_logger(__name__)


def tools_of_module(name: str) -> list[Tool[..., Any]]:
    """Import a module and return its tools, by name; none, and a line in the log, if it is broken.

    Any error of the module's own code is caught: one broken module does not stop
    the others.
    """
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the author's code
        _log.error("tool.module_broken", tool_module=name, error=f"{type(error).__name__}: {error}")
        return []
    found = {id(value): value for value in vars(module).values() if isinstance(value, Tool)}
    if not found:
        _log.warning("tool.module_empty", tool_module=name)
    return sorted(found.values(), key=lambda tool: tool.name)
