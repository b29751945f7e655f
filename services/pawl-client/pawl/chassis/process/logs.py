"""Loggers for modules. Event names are dotted constants (`rpc.served`), and values are fields.

Lines go to the standard `logging` module, which programs that use `pawl.client` can configure. In services,
`pawl.server.process.log_setup` sends them to structlog. Argument values, message texts and secrets are never logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

# Writes a line, from the module's name, the level, the event and its fields.
Sink = Callable[[str, str, str, dict[str, Any]], None]


def _to_logging(name: str, level: str, event: str, fields: dict[str, Any]) -> None:
    error = fields.pop("exc_info", level == "exception")
    text = " ".join([event, *(f"{field}={value!r}" for field, value in fields.items())])
    getattr(logging.getLogger(name), level)("%s", text, exc_info=error)


_sink: Sink = _to_logging


def route(sink: Sink) -> None:
    """Send all later log lines of this process to `sink`."""
    global _sink  # noqa: PLW0603  # one per process, like the handlers of logging
    _sink = sink


class Logger:
    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, event: str, **fields: Any) -> None:
        _sink(self._name, "debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        _sink(self._name, "info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        _sink(self._name, "warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        _sink(self._name, "error", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        _sink(self._name, "exception", event, fields)

    def critical(self, event: str, **fields: Any) -> None:
        _sink(self._name, "critical", event, fields)


def get_logger(name: str) -> Logger:
    return Logger(name)
