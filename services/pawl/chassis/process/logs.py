"""Writes structured logs: one JSON object per line, or colours on a terminal.

Event names are dotted constants (`rpc.served`); ids are fields, bound once by `bind`. Argument values, message texts
and secrets are never logged.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    import structlog

# structlog is imported with the first line or setting. Most commands log nothing, and it doubles their start.

Format = Literal["json", "console", "auto"]


def configure(*, service: str, instance_id: str, level: str, log_format: Format) -> None:
    """Send all logs of this process, including those of libraries, to standard error.

    Call once, at process start. `auto` means `console` on a terminal and `json` elsewhere.
    """
    from pawl.chassis.process import log_setup  # noqa: PLC0415

    log_setup.configure(service=service, instance_id=instance_id, level=level, log_format=log_format)


def bind(**ids: str) -> None:
    """Add fields to all later log lines of this task and of tasks it starts."""
    from structlog.contextvars import bind_contextvars  # noqa: PLC0415

    bind_contextvars(**ids)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return the logger of a module; safe to call at import."""
    return cast("structlog.typing.FilteringBoundLogger", _Logger(name))


class _Logger:
    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _logger(self) -> Any:
        from pawl.chassis.process.log_setup import new_logger  # noqa: PLC0415

        return new_logger(self._name)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._logger, method)
