"""`pawl notify preferences`, `mute` and `unmute`: what of your notifications is sent, and when."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.channels import Kinds, app, numbers
from pawl.cli.command import command, seconds_of
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1 import preference_pb2 as pb

_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY: Final = "|".join(_DAYS)
_QUIET: Final = re.compile(rf"(?:(?P<days>(?:{_DAY}|[,-])+) +)?(?P<start>\d\d:\d\d)-(?P<end>\d\d:\d\d)")
_RANGE: Final = re.compile(rf"({_DAY})(?:-({_DAY}))?")

ConversationId = Annotated[str, typer.Argument(help="Id of the conversation.", show_default=False)]


@app.command()
@command(asks="notifications")
async def preferences(
    target: AsyncClient,
    console: Console,
    *,
    kind: Kinds = None,
    all_kinds: Annotated[bool, typer.Option("--all-kinds", help="Send all kinds.")] = False,
    quiet: Annotated[
        list[str] | None,
        typer.Option("--quiet", help="Send nothing then: 22:00-07:00, or 'sat,sun 00:00-00:00'. Repeatable."),
    ] = None,
    no_quiet: Annotated[bool, typer.Option("--no-quiet", help="Have no quiet hours.")] = False,
    zone: Annotated[str | None, typer.Option("--zone", help="Zone of --quiet, like Europe/Berlin; else UTC.")] = None,
) -> None:
    """Show what of your notifications is sent, or change it; what is not named stays. The inbox tells everything."""
    if (kind and all_kinds) or (quiet and no_quiet):
        raise CommandError("Give --kind or --all-kinds, and --quiet or --no-quiet, not both.")
    hours = list(map(_quiet_hours, quiet or []))
    found = (await target.preferences.GetPreferences(pb.GetPreferencesRequest())).preferences
    change = pb.UpdatePreferencesRequest()
    if kind or all_kinds:
        change.kinds.kinds[:] = numbers(kind or [])
        change.kinds.SetInParent()
    if quiet or no_quiet or zone is not None:
        kept = found.quiet.time_zone if zone is None else zone
        change.quiet.CopyFrom(pb.QuietTimes(hours=hours if quiet or no_quiet else found.quiet.hours, time_zone=kept))
    if change != pb.UpdatePreferencesRequest():
        found = (await target.preferences.UpdatePreferences(change)).preferences
    for line in _lines(found):
        console.print(line, markup=False, soft_wrap=True)


@app.command()
@command(asks="notifications")
async def mute(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId,
    *,
    lasts: Annotated[str | None, typer.Option("--for", help="How long: 30m, 2h, 7d; for good if not given.")] = None,
) -> None:
    """Have nothing of a conversation be sent. Your inbox still tells it."""
    muted = pb.Mute(conversation_id=conversation_id)
    if lasts is not None:
        muted.until_time.FromDatetime(datetime.now(UTC) + timedelta(seconds=seconds_of(lasts, "lasts")))
    await target.get_conversation(conversation_id)
    await target.preferences.MuteConversation(pb.MuteConversationRequest(mute=muted))
    console.print(f"Muted {_mute_text(muted)}.", style="green", markup=False)


@app.command()
@command(asks="notifications")
async def unmute(target: AsyncClient, console: Console, conversation_id: ConversationId) -> None:
    """End the mute of a conversation."""
    found = (await target.preferences.GetPreferences(pb.GetPreferencesRequest())).preferences
    if not any(muted.conversation_id == conversation_id for muted in found.mutes):  # One that is muted may be gone.
        await target.get_conversation(conversation_id)
    await target.preferences.UnmuteConversation(pb.UnmuteConversationRequest(conversation_id=conversation_id))
    console.print(f"{conversation_id} is not muted.", style="green", markup=False)


def _quiet_hours(text: str) -> pb.QuietHours:
    match = _QUIET.fullmatch(text.strip().lower())
    if match is None:
        raise CommandError(f"{text!r} are no quiet hours like 22:00-07:00 or 'mon-fri 22:00-07:00'.", parameter="quiet")
    days: list[pb.Weekday.ValueType] = []
    for part in (match["days"] or "").split(",") if match["days"] else ():
        span = _RANGE.fullmatch(part)
        if span is None:
            raise CommandError(f"{part!r} are no days like mon, or mon-fri.", parameter="quiet")
        first = _DAYS.index(span[1])
        count = (_DAYS.index(span[2] or span[1]) - first) % 7 + 1
        days += [pb.Weekday.values()[(first + number) % 7 + 1] for number in range(count)]
    return pb.QuietHours(start=match["start"], end=match["end"], days=dict.fromkeys(days))


def _lines(found: pb.Preferences) -> list[str]:
    kinds = ", ".join(wording.value_name(notify_pb2.NotificationKind, kind) for kind in found.kinds)
    lines = [f"kinds: {kinds or 'all'}"]
    lines += [f"quiet: {_quiet_text(hours)} ({found.quiet.time_zone or 'UTC'})" for hours in found.quiet.hours]
    return lines + [f"muted: {_mute_text(muted)}" for muted in found.mutes]


def _quiet_text(hours: pb.QuietHours) -> str:
    days = ",".join(wording.value_name(pb.Weekday, day)[:3] for day in hours.days)
    return f"{days} {hours.start}-{hours.end}".strip()


def _mute_text(muted: pb.Mute) -> str:
    until = f" until {wording.time_text(muted.until_time)}" if muted.HasField("until_time") else ""
    return f"{muted.conversation_id}{until}"
