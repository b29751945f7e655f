"""Implements `pawl notify` and `pawl notifications`: channels, preferences and the notification inbox."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, command, say, seconds_of, secret_of
from pawl.cli.contract import (
    Json,
    Option,
    Options,
    ask,
    choices,
    items,
    json_line,
    listing,
    number_of,
    shown,
    verb,
)
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1 import notify_pb2, preference_pb2

_KIND: Final = notify_pb2.NotificationKind.DESCRIPTOR
_Kinds: Any = Annotated[
    list[choices(_KIND)] | None, typer.Option("--kind", help="Send only this kind. Repeatable.")  # type: ignore[misc]
]
_PAGE: Final = 200
# Delivery type that is never resent, because `pawl notify code` sends a new code.
_CODE: Final = "channel.code"
_TEST_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.2
_WHERE: Final = "A URL or an e-mail address. - reads standard input, and @FILE reads a file."
_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY: Final = "|".join(_DAYS)
_QUIET: Final = re.compile(rf"(?:(?P<days>(?:{_DAY}|[,-])+) +)?(?P<start>\d\d:\d\d)-(?P<end>\d\d:\d\d)")
_RANGE: Final = re.compile(rf"({_DAY})(?:-({_DAY}))?")
_CHANNEL: Final = {"channel": "channel_id"}


def _url(channel: Any, typed: str) -> None:
    text = secret_of(typed)
    channel.url = f"mailto:{text}" if "@" in text and ":" not in text else text


def _created(answer: Any, _: Any) -> str:
    channel = answer.channel
    mail = f"Confirm with the code sent to its address: pawl notify confirm {channel.channel_id} CODE"
    test = f"Test it with: pawl notify test {channel.channel_id}"
    return f"Created {channel.channel_id}. {mail if channel.url.startswith('mailto:') else test}"


def _state(channel: pb.Channel) -> str:
    reason = f": {wording.one_line(channel.disable_reason, 200)}" if channel.disable_reason else ""
    return f"enabled{reason}" if channel.enabled else f"disabled{reason}"


def _options(prefix: str, kinds: str) -> Options:
    return {
        "--kind": f"{prefix}{kinds}",
        "--name": f"{prefix}name",
        "--after": f"{prefix}after_seconds",
    }


app = typer.Typer(help="Get notifications by webhook or e-mail.", no_args_is_help=True)
app.command("create")(
    verb(
        pb.CreateChannelRequest(),
        {"url": Option(path="channel.url", help=_WHERE, put=_url), **_options("channel.", "kinds")},
        "Create a channel. A webhook's secret is shown once, alone on standard output.",
        _created,
    )
)
app.command("list")(
    listing(
        pb.ListChannelsRequest(),
        {},
        "List your channels, oldest first.",
        {
            "channel": "channel_id",
            "state": _state,
            "kinds": lambda channel: wording.text_at(channel, "kinds") or "all",
            "name": "name",
            "url": "url",
        },
        none="You have no channels.",
    )
)
app.command("get")(verb(pb.GetChannelRequest(), _CHANNEL, "Show a channel.", shown))
app.command("update")(
    verb(
        pb.UpdateChannelRequest(),
        {
            **_CHANNEL,
            "--url": Option(path="url", help=_WHERE, put=_url),
            **_options("", "kinds.kinds"),
            "--all-kinds": Option(path="kinds.kinds", help="Send notifications of all kinds.", constant=()),
            "--enable/--disable": "enabled",
        },
        "Update a channel. Only the given options change.",
        "Updated {channel_id}.",
    )
)
app.command("delete")(
    verb(
        pb.DeleteChannelRequest(),
        _CHANNEL,
        "Delete a channel, its secret and its deliveries.",
        "Deleted {channel_id}.",
        confirmation="Delete the channel {channel_id}?",
    )
)
app.command("confirm")(
    verb(
        pb.ConfirmChannelRequest(),
        {**_CHANNEL, "code": "code"},
        "Confirm an e-mail channel's address, which enables it.",
        "Confirmed {channel_id}.",
    )
)
app.command("code")(
    verb(
        pb.SendChannelCodeRequest(),
        _CHANNEL,
        "Send a new code to an e-mail channel's address.",
        "A code is on its way. Confirm it with: pawl notify confirm {channel_id} CODE",
    )
)
app.command("rotate")(
    verb(
        pb.RotateChannelSecretRequest(),
        _CHANNEL,
        "Rotate a channel's secret and print the new one. The old one stays valid for a day.",
        "New secret of {channel_id}:",
    )
)


@app.command()
@command(service="notifications")
async def test(
    target: AsyncClient,
    console: Console,
    channel_id: Annotated[str, typer.Argument(help="The channel.", show_default=False)],
) -> int:
    """Send a test notification and report the outcome."""
    sent = (await target.notify_channels.TestChannel(pb.TestChannelRequest(channel_id=channel_id))).delivery
    request = pb.ListDeliveriesRequest(channel_id=channel_id)
    try:
        async with asyncio.timeout(_TEST_SECONDS):
            while sent.state == pb.CHANNEL_DELIVERY_STATE_WAITING:
                await asyncio.sleep(_POLL_SECONDS)
                listed = (await target.notify_channels.ListDeliveries(request)).deliveries
                sent = next((each for each in listed if each.delivery_id == sent.delivery_id), sent)
    except TimeoutError:
        raise CommandError(f"No outcome yet. Check `pawl notify deliveries {channel_id}`.") from None
    if sent.state == pb.CHANNEL_DELIVERY_STATE_DELIVERED:
        say(console, f"Delivered in {sent.latency_milliseconds} ms: status {sent.status}.", "green")
        return 0
    say(console, f"Not delivered: {wording.sentence(wording.one_line(sent.last_error, 500))}", "red")
    return EXIT_UNSUCCESSFUL


async def _in_all(target: AsyncClient, request: Any) -> str:
    counts = (await ask(target, request)).counts
    total = ", ".join(f"{each.count} {wording.text_at(each, 'state')}" for each in counts)
    return f"Total: {total or 'none'}."


app.command("deliveries")(
    listing(
        pb.ListDeliveriesRequest(),
        {
            "channel": Option(path="channel_id", help="The channel; default: all.", is_optional=True),
            "--state": Option(path="states", help="Only those in this state. Repeatable."),
        },
        "List deliveries, newest first. Covers one channel or all, with totals by state.",
        {
            "channel": "channel_id",
            "delivery": "delivery_id",
            "created": "create_time",
            "type": "type",
            "state": "state",
            "tries": "tries",
            "status": lambda each: str(each.status or ""),
            "ms": lambda each: str(each.latency_milliseconds) if each.HasField("try_time") else "",
            "next try": "next_try_time",
            "error": "last_error",
        },
        none="There are no deliveries.",
        count=50,
        footer=_in_all,
    )
)


@app.command()
@command(service="notifications")
async def resend(
    target: AsyncClient,
    console: Console,
    delivery_id: Annotated[list[str] | None, typer.Argument(help="Ids of deliveries.", show_default=False)] = None,
    *,
    dead: Annotated[bool, typer.Option("--dead", help="Resend all dead deliveries.")] = False,
    channel: Annotated[
        str | None, typer.Option("--channel", help="With --dead: only deliveries of this channel.")
    ] = None,
) -> None:
    """Resend deliveries under the same ids."""
    if dead is bool(delivery_id):
        raise CommandError("Specify delivery ids or --dead.")
    if channel == "":
        raise CommandError("the value must not be empty. Omit the option to include all.", parameter="channel")
    ids = list(delivery_id or [])
    if dead:
        of_dead = pb.ListDeliveriesRequest(channel_id=channel or "", states=[pb.CHANNEL_DELIVERY_STATE_DEAD])
        ids = [each.delivery_id for each in await items(target, of_dead) if each.type != _CODE]
    for first in range(0, len(ids), _PAGE):
        some = pb.ResendDeliveriesRequest(delivery_ids=ids[first : first + _PAGE])
        await target.notify_channels.ResendDeliveries(some)
    shown_ids = ids[0] if len(ids) == 1 else f"{len(ids)} deliveries"
    say(console, f"Resending {shown_ids}." if ids else "There are no dead deliveries.", "green")


@app.command()
@command(service="notifications")
async def preferences(
    target: AsyncClient,
    console: Console,
    *,
    kind: _Kinds = None,
    all_kinds: Annotated[bool, typer.Option("--all-kinds", help="Send all kinds.")] = False,
    quiet: Annotated[
        list[str] | None,
        typer.Option(
            "--quiet", help="Send nothing during these hours: 22:00-07:00, or 'sat,sun 00:00-00:00'. Repeatable."
        ),
    ] = None,
    no_quiet: Annotated[bool, typer.Option("--no-quiet", help="Remove the quiet hours.")] = False,
    zone: Annotated[
        str | None, typer.Option("--zone", help="Time zone of --quiet, like Europe/Berlin. Default: UTC.")
    ] = None,
    json: Json = False,
) -> None:
    """Show or change which notifications are sent.

    The inbox always contains all of them.
    """
    if (kind and all_kinds) or (quiet and no_quiet):
        raise CommandError("--kind cannot be combined with --all-kinds, nor --quiet with --no-quiet.")
    hours = list(map(_quiet_hours, quiet or []))
    found = (await target.preferences.GetPreferences(preference_pb2.GetPreferencesRequest())).preferences
    change = preference_pb2.UpdatePreferencesRequest()
    if kind or all_kinds:
        change.kinds.kinds[:] = [number_of(_KIND, each) for each in kind or []]  # type: ignore[misc]
        change.kinds.SetInParent()
    if quiet or no_quiet or zone is not None:
        time_zone = found.quiet.time_zone if zone is None else zone
        hours = hours if quiet or no_quiet else list(found.quiet.hours)
        change.quiet.CopyFrom(preference_pb2.QuietTimes(hours=hours, time_zone=time_zone))
    if change != preference_pb2.UpdatePreferencesRequest():
        found = (await target.preferences.UpdatePreferences(change)).preferences
    say(console, json_line(found) if json else _lines(found))


def _quiet_hours(text: str) -> preference_pb2.QuietHours:
    match = _QUIET.fullmatch(text.strip().lower())
    if match is None:
        raise CommandError(
            f"{text!r} is not valid: quiet hours look like 22:00-07:00 or 'mon-fri 22:00-07:00'.", parameter="quiet"
        )
    days: list[preference_pb2.Weekday.ValueType] = []
    for part in (match["days"] or "").split(",") if match["days"] else ():
        span = _RANGE.fullmatch(part)
        if span is None:
            raise CommandError(f"{part!r} is not valid: days look like mon or mon-fri.", parameter="quiet")
        first = _DAYS.index(span[1])
        count = (_DAYS.index(span[2] or span[1]) - first) % 7 + 1
        days += [preference_pb2.Weekday.values()[(first + number) % 7 + 1] for number in range(count)]
    return preference_pb2.QuietHours(start=match["start"], end=match["end"], days=dict.fromkeys(days))


def _lines(found: preference_pb2.Preferences) -> list[str]:
    days = [",".join(_DAYS[day - 1] for day in hours.days) for hours in found.quiet.hours]
    zone = found.quiet.time_zone or "UTC"
    quiet = [f"{day} {hours.start}-{hours.end}".strip() for day, hours in zip(days, found.quiet.hours, strict=True)]
    return [
        f"kinds: {wording.text_at(found, 'kinds') or 'all'}",
        *(f"quiet: {each} ({zone})" for each in quiet),
        *(f"muted: {_mute_text(muted)}" for muted in found.mutes),
    ]


def _mute_text(muted: preference_pb2.Mute) -> str:
    until = f" until {wording.time_text(muted.until_time)}" if muted.HasField("until_time") else ""
    return f"{muted.conversation_id}{until}"


async def _exists(target: AsyncClient, request: Any) -> None:
    await target.get_conversation(request.mute.conversation_id)


app.command("mute")(
    verb(
        preference_pb2.MuteConversationRequest(),
        {
            "conversation": "mute.conversation_id",
            "--for": Option(
                path="mute.until_time",
                help="How long: 30m, 2h, 7d. Default: until unmuted.",
                put=lambda muted, lasts: muted.until_time.FromDatetime(
                    datetime.now(UTC) + timedelta(seconds=seconds_of(lasts, "until_time"))
                ),
            ),
        },
        "Mute a conversation. Its notifications still appear in your inbox.",
        lambda _, request: f"Muted {_mute_text(request.mute)}.",
        before=_exists,
    )
)
app.command("unmute")(
    verb(
        preference_pb2.UnmuteConversationRequest(),
        {"conversation": "conversation_id"},
        "Unmute a conversation.",
        "Unmuted {conversation_id}.",
    )
)


@command(service="notifications")
async def notifications(
    target: AsyncClient,
    console: Console,
    *,
    unread: Annotated[bool, typer.Option("--unread", help="Only unread ones.")] = False,
    read: Annotated[bool, typer.Option("--read", help="Mark the listed notifications as read.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new ones.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", help="Maximum number of notifications.", min=1, max=200)] = 20,
    json: Json = False,
) -> None:
    """List your notifications, newest last."""
    request = notify_pb2.ListNotificationsRequest(page_size=count, only_unread=unread)
    listed = (await target.notifier.ListNotifications(request)).notifications[::-1]
    for notification in listed:
        say(console, json_line(notification) if json else _notification_lines(notification))
    if read and listed:
        ids = [notification.notification_id for notification in listed]
        acknowledge = notify_pb2.AcknowledgeNotificationsRequest(notification_ids=ids)
        await target.notifier.AcknowledgeNotifications(acknowledge)
    if not listed:
        say(Console(stderr=True), "You have no unread notifications." if unread else "You have no notifications.")
    if not follow:
        return
    last = listed[-1].number if listed else 0
    async for response in target.notifier.Subscribe(notify_pb2.SubscribeRequest(after_number=last, only_new=last == 0)):
        if response.HasField("notification"):
            say(console, json_line(response.notification) if json else _notification_lines(response.notification))


def _notification_lines(notification: notify_pb2.Notification) -> list[str]:
    mark = " " if notification.HasField("read_time") else "*"
    title = wording.one_line(notification.title, 200)
    time = wording.time_text(notification.create_time)
    lines = [f"{mark} {notification.number:>4}  {time}  {notification.run_id or notification.channel_id}  {title}"]
    if notification.call_id:
        lines.append(f"         decide with: pawl approve {notification.run_id} {notification.call_id}")
    return lines
