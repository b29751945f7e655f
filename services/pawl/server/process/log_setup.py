"""Structured logs with structlog. Each entry is one line of JSON or, on a terminal, of coloured text."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any, Final, Literal

import msgspec

from pawl.chassis.process import logs
from pawl.chassis.process.imports import without

# structlog would load rich for tracebacks that are not used here.
with without("rich"):
    import structlog

Format = Literal["json", "console", "auto"]

# Libraries that log every connection and request at INFO.
_VERBOSE: Final = ("asyncio", "asyncpg", "grpc", "httpcore2", "httpx2", "nats", "openai", "uvicorn")


def configure(*, service: str, instance_id: str, level: str, log_format: Format) -> None:
    """Send all logs of this process, including logs from libraries, to standard error.

    Call once, at process start. `auto` means `console` on a terminal and `json` elsewhere.
    """
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    number = logging.getLevelNamesMapping()[level.upper()]
    shared = _shared(service, instance_id)
    structlog.configure(
        processors=[
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.StackInfoRenderer(),
            *_renderers(as_json=as_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=(
            structlog.BytesLoggerFactory(sys.stderr.buffer) if as_json else structlog.WriteLoggerFactory(sys.stderr)
        ),
        cache_logger_on_first_use=True,
    )
    _route_libraries(shared, number, as_json=as_json)
    logs.route(to_structlog)


def bind(**ids: str) -> None:
    """Add fields to all later log lines of this task, and of tasks that it starts."""
    structlog.contextvars.bind_contextvars(**ids)


def to_structlog(name: str, level: str, event: str, fields: dict[str, Any]) -> None:
    """Write a line of `logs` with structlog."""
    getattr(_logger(name), level)(event, **fields)


@functools.cache
def _logger(name: str) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger


def _shared(service: str, instance_id: str) -> list[structlog.types.Processor]:
    def add_process(_: object, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        # Not bound: gRPC starts its tasks outside of our context.
        event["service"] = service
        event["instance"] = instance_id
        return event

    return [
        structlog.contextvars.merge_contextvars,
        add_process,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _renderers(*, as_json: bool) -> list[structlog.types.Processor]:
    if not as_json:
        return [_console()]
    encode = msgspec.json.Encoder(enc_hook=repr).encode
    return [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(serializer=lambda event, **_: encode(event)),
    ]


def _console() -> structlog.dev.ConsoleRenderer:
    # The default formatter prints local variables, which may hold secrets.
    return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)


def _route_libraries(shared: list[structlog.types.Processor], level: int, *, as_json: bool) -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *([structlog.processors.format_exc_info, structlog.processors.JSONRenderer()] if as_json else [_console()]),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.captureWarnings(capture=True)
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    # It logs a traceback whenever the database is unavailable; `server.db.database` logs one line instead.
    logging.getLogger("asyncpg.pool").setLevel(max(level, logging.ERROR))
