"""Implements `pawl events`, which prints what Pawl publishes on NATS."""

from __future__ import annotations

import json as json_module
import os
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message
from rich.console import Console

from pawl.cli.command import command
from pawl.cli.failure import CommandError
from pawl.cli.runs import EventJson
from pawl.client import AsyncClient
from pawl.event.v1 import event_pb2
from pawl.notify.v1 import channel_pb2, notify_pb2

_ALL: Final = "pawl.v1.>"
_STREAM: Final = "PAWL_LIFECYCLE"
_LIFECYCLE: Final = "pawl.v1.*.lifecycle.*"
_CONNECT_SECONDS: Final = 5.0
_PENDING_MAX: Final = 10_000


@command()
async def events(
    target: AsyncClient,
    _console: Console,
    *,
    subject: Annotated[str, typer.Option(help="Only these subjects, with the NATS wildcards `*` and `>`.")] = _ALL,
    past: Annotated[bool, typer.Option("--past", help="Print the runs' stored lifecycle events, then exit.")] = False,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="Exit after this many messages; 0 means never.")
    ] = 0,
    json: EventJson = False,
) -> None:
    """Print messages from NATS as they arrive.

    These are events, the run lifecycle and notifications. Connects as the user `subscriber` to the suite in the data
    folder, or to PAWL_NATS_URL. docs/reference/nats.md lists the subjects, headers and types.
    """
    check_subject(subject)
    connection = await _connection(url_of(target.data, os.environ))
    try:
        left = count
        async with aclosing(_past(connection, subject) if past else _live(connection, subject)) as messages:
            async for message in messages:
                print(line(message, as_json=json), flush=True)
                left -= 1
                if left == 0:
                    break
    finally:
        await connection.close()


def check_subject(subject: str) -> None:
    """Validate a NATS subject.

    Raises:
        CommandError: The subject is invalid.
    """
    *first, last = subject.split(".")
    if ">" in first or not all(each and not re.search(r"\s", each) for each in (*first, last)):
        raise CommandError(f"{subject!r} is not a NATS subject like {_ALL} or pawl.v1.*.run.*.events.")


def url_of(data: Path, environment: Mapping[str, str]) -> str:
    """Return PAWL_NATS_URL, or the subscriber URL of the suite in the data folder.

    Raises:
        CommandError: Neither is available.
    """
    if given := environment.get("PAWL_NATS_URL"):
        return given
    try:
        return (data / "secrets" / "nats-subscriber.url").read_text(encoding="utf-8").strip()
    except OSError:
        message = (
            f"No Pawl suite with its own NATS is running in {data}. Start one with `pawl up`, or set PAWL_NATS_URL."
        )
        raise CommandError(message) from None


def line(message: Any, *, as_json: bool) -> str:
    """Return a message as one line, or as JSON with subject, headers and payload."""
    payload = decoded(message.subject, message.data or b"")
    if as_json:
        shown = {"subject": message.subject, "headers": dict(message.headers or {}), "payload": payload}
        return json_module.dumps(shown, ensure_ascii=False)
    found = payload.get("events", [payload]) if payload else []
    return " ".join(filter(None, [message.subject, *map(_summary, found)]))


def _summary(payload: Mapping[str, Any]) -> str:
    what = str(payload.get("type") or payload.get("title") or "")
    if "starter_fired" not in payload:
        return what
    fired = payload["starter_fired"]
    fire = fired.get("fire", {})
    outcome = str(fire.get("outcome", "")).removeprefix("SCHEDULE_FIRE_OUTCOME_").lower()
    return " ".join(filter(None, [what, fired.get("name"), outcome, fire.get("run_id")]))


def decoded(subject: str, data: bytes) -> dict[str, Any] | None:
    """Decode a subject's payload. Return None if its type is unknown or it is malformed."""
    kind: type[Message]
    match subject.split("."):
        case [_, _, _, "run", _, "events"]:
            kind = event_pb2.RunEvents
        case [_, _, _, "lifecycle", _]:
            kind = event_pb2.RunEvent
        case [_, _, _, "user", _, "notifications"]:
            kind = notify_pb2.Notification
        case [_, _, _, "user", _, "channels"]:
            kind = channel_pb2.ChannelEvent
        case _:
            return None
    try:
        return MessageToDict(kind.FromString(data), preserving_proto_field_name=True)
    except DecodeError:
        return None


async def _connection(url: str) -> Any:
    import nats  # noqa: PLC0415  # the import takes half a second

    try:
        return await nats.connect(url, connect_timeout=_CONNECT_SECONDS, max_reconnect_attempts=0, error_cb=_be_silent)
    except (nats.errors.Error, OSError, TimeoutError):
        raise CommandError("Cannot connect to NATS.") from None


async def _be_silent(_error: Exception) -> None:
    """Ignore connection errors. An error that matters ends the subscription, and is reported then."""


async def _live(connection: Any, subject: str) -> AsyncGenerator[Any, None]:
    from pawl.server.bus.connection import flush  # noqa: PLC0415  # imports NATS

    subscription = await connection.subscribe(subject, pending_msgs_limit=_PENDING_MAX)
    await flush(connection)
    async for message in subscription.messages:
        yield message
    raise CommandError("The connection to NATS was lost.")


async def _past(connection: Any, subject: str) -> AsyncGenerator[Any, None]:
    import nats.errors  # noqa: PLC0415
    from nats.js.errors import NotFoundError  # noqa: PLC0415

    stream, seq = connection.jetstream(), 1
    wanted = _LIFECYCLE if subject == _ALL else subject
    while True:
        try:
            message = await stream.get_msg(_STREAM, seq=seq, subject=wanted, next=True)
        except NotFoundError:
            return
        except (nats.errors.Error, TimeoutError):
            raise CommandError("Cannot read lifecycle events: NATS does not respond or denies access.") from None
        yield message
        seq = message.seq + 1
