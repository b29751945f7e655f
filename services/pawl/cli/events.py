"""`pawl events`: what Pawl publishes on NATS, read."""

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
    subject: Annotated[str, typer.Option(help="Only these subjects; `*` and `>` as on NATS.")] = _ALL,
    past: Annotated[
        bool, typer.Option("--past", help="The life cycle of runs that is kept, from the first event, then leave.")
    ] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Leave after so many; 0 for never.")] = 0,
    json: EventJson = False,
) -> None:
    """Print what Pawl publishes on NATS, as it comes: events, the life cycle of runs, notifications.

    It reads as the user `subscriber` of the suite in the data folder, or of PAWL_NATS_URL. docs/reference/nats.md has
    subjects, headers and types.
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
    """Return if a subject is one of NATS.

    Raises:
        CommandError: it is none.
    """
    *first, last = subject.split(".")
    if ">" in first or not all(each and not re.search(r"\s", each) for each in (*first, last)):
        raise CommandError(f"{subject!r} is no subject of NATS like {_ALL} or pawl.v1.*.run.*.events.")


def url_of(data: Path, environment: Mapping[str, str]) -> str:
    """Return how to connect: PAWL_NATS_URL, else as the subscriber of the suite in a data folder.

    Raises:
        CommandError: there is neither.
    """
    if given := environment.get("PAWL_NATS_URL"):
        return given
    try:
        return (data / "secrets" / "nats-subscriber.url").read_text(encoding="utf-8").strip()
    except OSError:
        message = (
            f"No Pawl suite with a NATS of its own runs on {data}. Start one with `pawl up`, or set PAWL_NATS_URL."
        )
        raise CommandError(message) from None


def line(message: Any, *, as_json: bool) -> str:
    """Return a message of NATS as one line: for programs subject, headers and payload as protobuf defines its JSON."""
    payload = decoded(message.subject, message.data or b"")
    if as_json:
        shown = {"subject": message.subject, "headers": dict(message.headers or {}), "payload": payload}
        return json_module.dumps(shown, ensure_ascii=False)
    found = payload.get("events", [payload]) if payload else []
    return " ".join(filter(None, [message.subject, *map(_told, found)]))


def _told(payload: Mapping[str, Any]) -> str:
    """Return what happened, and of a fire what became of it."""
    what = str(payload.get("type") or payload.get("title") or "")
    if "starter_fired" not in payload:
        return what
    fired = payload["starter_fired"]
    fire = fired.get("fire", {})
    outcome = str(fire.get("outcome", "")).removeprefix("SCHEDULE_FIRE_OUTCOME_").lower()
    return " ".join(filter(None, [what, fired.get("name"), outcome, fire.get("run_id")]))


def decoded(subject: str, data: bytes) -> dict[str, Any] | None:
    """Return the payload of a subject as JSON; None if it is of no type that is known."""
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
    import nats  # noqa: PLC0415  # takes half a second, and only here

    try:
        return await nats.connect(url, connect_timeout=_CONNECT_SECONDS, max_reconnect_attempts=0, error_cb=_be_silent)
    except (nats.errors.Error, OSError, TimeoutError):
        raise CommandError("NATS cannot be reached.") from None


async def _be_silent(_error: Exception) -> None:
    """Say nothing: an error that matters ends the reading, and is said then."""


async def _live(connection: Any, subject: str) -> AsyncGenerator[Any, None]:
    from pawl.chassis.bus.connection import flush  # noqa: PLC0415  # takes NATS with it

    subscription = await connection.subscribe(subject, pending_msgs_limit=_PENDING_MAX)
    await flush(connection)
    async for message in subscription.messages:
        yield message
    raise CommandError("NATS has gone.")


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
            raise CommandError("The life cycle cannot be read: NATS does not answer, or does not allow it.") from None
        yield message
        seq = message.seq + 1
