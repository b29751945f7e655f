"""`pawl notify`: the channels by which you are told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, is_sure, narrows, new_request_id, seconds_of, secret_of
from pawl.cli.failure import CommandError
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1 import notify_pb2

app = typer.Typer(
    help="Be told by webhook (signed requests to your URL) or e-mail.",
    no_args_is_help=True,
)

_PREFIX: Final = "NOTIFICATION_KIND_"
_STATE: Final = "CHANNEL_DELIVERY_STATE_"
_PAGE: Final = 200
_CODE: Final = "channel.code"
"""The type of a delivery that is not sent again: `pawl notify code` has another one sent."""
_TEST_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.2
_WHERE: Final = "A URL or an e-mail address; - reads it from standard input, @FILE from a file."


class NotificationKind(StrEnum):
    """The kinds of notifications."""

    RUN_COMPLETED = "run-completed"
    RUN_FAILED = "run-failed"
    RUN_CANCELLED = "run-cancelled"
    RUN_EXPIRED = "run-expired"
    INPUT_NEEDED = "input-needed"
    ATTENTION_NEEDED = "attention-needed"
    APPROVAL_NEEDED = "approval-needed"
    CHANNEL_DISABLED = "channel-disabled"
    JOB_ENDED = "job-ended"


class DeliveryState(StrEnum):
    """The states of deliveries."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    DEAD = "dead"
    SKIPPED = "skipped"


def _kind(text: str) -> NotificationKind:
    """Return a kind, spelled as an option or as the type of a message."""
    try:
        return NotificationKind(text.replace(".", "-"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(NotificationKind)}.") from None


ChannelId = Annotated[str, typer.Argument(help="Id of the channel.", show_default=False)]
Kinds = Annotated[
    list[NotificationKind] | None,
    typer.Option(
        "--kind",
        parser=_kind,
        metavar=f"[{'|'.join(NotificationKind)}]",
        help="Tell only of this kind. Repeatable; all if not given.",
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="What it is for.")]
After = Annotated[
    str | None, typer.Option("--after", help="Tell so much later what you have not read by then: 0s, 2m, 1h.")
]


@app.command()
@command(asks="notifications")
async def create(
    target: AsyncClient,
    console: Console,
    url: Annotated[
        str,
        typer.Argument(help=_WHERE, show_default=False),
    ],
    *,
    kind: Kinds = None,
    name: Name = None,
    after: After = None,
) -> None:
    """Make a channel. Of a webhook, standard output has the secret and nothing else; it is told this once."""
    seconds = _after_seconds(after)
    channel = pb.Channel(url=_url(url), name=name or "", kinds=numbers(kind or []), after_seconds=seconds)
    request = pb.CreateChannelRequest(request_id=new_request_id(), channel=channel)
    made = await target.notify_channels.CreateChannel(request)
    channel_id = made.channel.channel_id
    if made.channel.url.startswith("mailto:"):
        how = f"pawl notify confirm {channel_id} CODE"
        console.print(f"Made {channel_id}. A code comes to its address: {how}", markup=False, soft_wrap=True)
        return
    if not made.channel.url.lower().startswith("http"):
        console.print(f"Made {channel_id}. Try it with: pawl notify test {channel_id}", markup=False, soft_wrap=True)
        return
    if not made.secret:
        raise CommandError(
            f"Made {channel_id}, and its secret was lost on the way: get another one with"
            f" `pawl notify rotate {channel_id}`."
        )
    print(f"Made {channel_id}. Try it with: pawl notify test {channel_id}", file=sys.stderr)
    console.print(made.secret, markup=False, soft_wrap=True)


@app.command("list")
@command(asks="notifications")
async def list_channels(target: AsyncClient, console: Console) -> None:
    """List your channels, the oldest first."""
    found = (await target.notify_channels.ListChannels(pb.ListChannelsRequest())).channels
    if found or not console.is_terminal:
        show_table(console, ("channel", "state", "kinds", "name", "url"), list(map(_row, found)))
    else:
        console.print("You have no channels.")


@app.command()
@command(asks="notifications")
async def get(target: AsyncClient, console: Console, channel_id: ChannelId) -> None:
    """Show a channel."""
    channel = (await target.notify_channels.GetChannel(pb.GetChannelRequest(channel_id=channel_id))).channel
    lines = dict(zip(("channel", "state", "kinds", "name", "url"), _row(channel), strict=True))
    lines["made"] = wording.time_text(channel.create_time)
    if channel.credential_id:
        delegate = wording.one_line(channel.delegate_user_id)
        lines["saved by"] = f"{channel.credential_id} of {delegate}" if delegate else channel.credential_id
    if channel.after_seconds:
        lines["after"] = wording.seconds_text(channel.after_seconds)
    if channel.HasField("failing_since_time"):
        lines["failing since"] = wording.time_text(channel.failing_since_time)
    for label, text in lines.items():
        console.print(f"{label}: {text}", markup=False, soft_wrap=True)


@app.command()
@command(asks="notifications")
async def update(
    target: AsyncClient,
    console: Console,
    channel_id: ChannelId,
    *,
    url: Annotated[str | None, typer.Option("--url", help=_WHERE)] = None,
    kind: Kinds = None,
    all_kinds: Annotated[bool, typer.Option("--all-kinds", help="Tell of all kinds.")] = False,
    name: Name = None,
    after: After = None,
    enable: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Tell again, or nothing more; what waits is given up.")
    ] = None,
) -> None:
    """Change a channel; what is not named stays as it is."""
    if kind and all_kinds:
        raise CommandError("Give --kind or --all-kinds, not both.")
    kinds = notify_pb2.NotificationKinds(kinds=numbers(kind or [])) if kind or all_kinds else None
    address = None if url is None else _url(url)
    said = {"url": address, "name": name, "enabled": enable, "kinds": kinds, "after_seconds": _after_seconds(after)}
    if all(value is None for value in said.values()):
        raise CommandError("Say what to change: --url, --kind, --all-kinds, --name, --after, --enable or --disable.")
    change = pb.UpdateChannelRequest(channel_id=channel_id, **said)  # type: ignore[arg-type]  # as the keys say
    await target.notify_channels.UpdateChannel(change)
    console.print(f"Changed {channel_id}.", style="green", markup=False)


@app.command()
@command(asks="notifications")
async def delete(
    target: AsyncClient,
    console: Console,
    channel_id: ChannelId,
    *,
    yes: Yes = False,
) -> int:
    """Delete a channel, with its secret and its deliveries."""
    if not is_sure(f"Delete the channel {channel_id}?", yes=yes):
        return EXIT_UNSUCCESSFUL
    await target.notify_channels.DeleteChannel(pb.DeleteChannelRequest(channel_id=channel_id))
    console.print(f"Deleted {channel_id}.", style="green", markup=False)
    return 0


@app.command()
@command(asks="notifications")
async def confirm(
    target: AsyncClient,
    console: Console,
    channel_id: ChannelId,
    code: Annotated[str, typer.Argument(help="The code that came to its address.", show_default=False)],
) -> None:
    """Confirm the address of an e-mail, which tells from then on."""
    await target.notify_channels.ConfirmChannel(pb.ConfirmChannelRequest(channel_id=channel_id, code=code))
    console.print(f"Confirmed {channel_id}.", style="green", markup=False)


@app.command()
@command(asks="notifications")
async def code(target: AsyncClient, console: Console, channel_id: ChannelId) -> None:
    """Have another code be sent to the address of an e-mail."""
    await target.notify_channels.SendChannelCode(pb.SendChannelCodeRequest(channel_id=channel_id))
    console.print(f"Sending a code. Then: pawl notify confirm {channel_id} CODE", markup=False, soft_wrap=True)


@app.command()
@command(asks="notifications")
async def rotate(target: AsyncClient, console: Console, channel_id: ChannelId) -> None:
    """Give a channel another secret, which standard output has. The one before signs for a day, too."""
    request = pb.RotateChannelSecretRequest(channel_id=channel_id)
    secret = (await target.notify_channels.RotateChannelSecret(request)).secret
    console.print(secret, markup=False, soft_wrap=True)


@app.command()
@command(asks="notifications")
async def test(target: AsyncClient, console: Console, channel_id: ChannelId) -> int:
    """Send a test, and say what came of it."""
    sent = (await target.notify_channels.TestChannel(pb.TestChannelRequest(channel_id=channel_id))).delivery
    request = pb.ListDeliveriesRequest(channel_id=channel_id)
    try:
        async with asyncio.timeout(_TEST_SECONDS):
            while sent.state == pb.CHANNEL_DELIVERY_STATE_WAITING:
                await asyncio.sleep(_POLL_SECONDS)
                listed = (await target.notify_channels.ListDeliveries(request)).deliveries
                sent = next((each for each in listed if each.delivery_id == sent.delivery_id), sent)
    except TimeoutError:
        raise CommandError(f"No outcome yet: `pawl notify deliveries {channel_id}` will tell.") from None
    if sent.state == pb.CHANNEL_DELIVERY_STATE_DELIVERED:
        console.print(f"Delivered in {sent.latency_milliseconds} ms: status {sent.status}.", style="green")
        return 0
    console.print(
        f"Not delivered: {wording.sentence(wording.one_line(sent.last_error, 500))}", style="red", markup=False
    )
    return EXIT_UNSUCCESSFUL


@app.command()
@command(asks="notifications")
async def deliveries(
    target: AsyncClient,
    console: Console,
    channel_id: Annotated[str, typer.Argument(help="Id of the channel; all if not given.", callback=narrows)] = "",
    *,
    state: Annotated[
        list[DeliveryState] | None, typer.Option("--state", help="Only those that stand there. Repeatable.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many, the newest.", min=1)] = 50,
) -> None:
    """List what was sent to a channel, or to all of yours, the newest first, and how many there are."""
    states = [pb.ChannelDeliveryState.Value(f"{_STATE}{each.name}") for each in state or []]
    found, counts = await _found(target, channel_id, states, count)
    headings = ("delivery", "made", "type", "state", "tries", "status", "ms", "next try", "error")
    of_all = not channel_id
    rows = [(*[each.channel_id] * of_all, *_delivery_row(each)) for each in found]
    show_table(console, (*["channel"] * of_all, *headings), rows)
    in_all = (f"{each.count} {wording.value_name(pb.ChannelDeliveryState, each.state)}" for each in counts)
    console.print(f"In all: {', '.join(in_all) or 'none'}.", markup=False)


@app.command()
@command(asks="notifications")
async def resend(
    target: AsyncClient,
    console: Console,
    delivery_id: Annotated[list[str] | None, typer.Argument(help="Ids of deliveries.", show_default=False)] = None,
    *,
    dead: Annotated[bool, typer.Option("--dead", help="Send all that are dead.")] = False,
    channel: Annotated[
        str, typer.Option("--channel", help="With --dead: only those of this channel.", callback=narrows)
    ] = "",
) -> None:
    """Send deliveries once more, under the same ids."""
    if dead is bool(delivery_id):
        raise CommandError("Give ids of deliveries, or --dead.")
    ids = list(delivery_id or [])
    if dead:
        found, _ = await _found(target, channel, [pb.CHANNEL_DELIVERY_STATE_DEAD], None)
        ids = [each.delivery_id for each in found if each.type != _CODE]
    for first in range(0, len(ids), _PAGE):
        some = ids[first : first + _PAGE]
        await target.notify_channels.ResendDeliveries(pb.ResendDeliveriesRequest(delivery_ids=some))
    told = ids[0] if len(ids) == 1 else f"{len(ids)} deliveries"
    console.print(f"Sending {told} again." if ids else "Nothing is dead.", style="green", markup=False)


async def _found(
    target: AsyncClient, channel_id: str, states: Sequence[pb.ChannelDeliveryState.ValueType], count: int | None
) -> tuple[list[pb.ChannelDelivery], list[pb.ChannelDeliveryCount]]:
    """Return the newest deliveries, at most `count` of them, and how many there are in each state."""
    request = pb.ListDeliveriesRequest(channel_id=channel_id, page_size=min(count or _PAGE, _PAGE), states=states)
    found: list[pb.ChannelDelivery] = []
    counts: list[pb.ChannelDeliveryCount] = []
    async for page in target.pages(target.notify_channels.ListDeliveries, request):
        found += page.deliveries
        counts += page.counts
        if count is not None and len(found) >= count:
            break
    return found[:count], counts


def _url(text: str) -> str:
    """Return the URL of an address; a URL stays as it is."""
    text = secret_of(text)
    return f"mailto:{text}" if "@" in text and ":" not in text else text


def _after_seconds(after: str | None) -> int | None:
    return None if after is None else seconds_of(after, "after")


def numbers(kinds: list[NotificationKind]) -> list[notify_pb2.NotificationKind.ValueType]:
    """Return kinds as the contract has them."""
    return [notify_pb2.NotificationKind.Value(f"{_PREFIX}{kind.name}") for kind in dict.fromkeys(kinds)]


def _row(channel: pb.Channel) -> tuple[str, ...]:
    state = "enabled" if channel.enabled else "disabled"
    return (
        channel.channel_id,
        f"{state}: {wording.one_line(channel.disable_reason, 200)}" if channel.disable_reason else state,
        ", ".join(wording.value_name(notify_pb2.NotificationKind, kind) for kind in channel.kinds) or "all",
        wording.one_line(channel.name, 80),
        wording.clean(channel.url),
    )


def _delivery_row(delivery: pb.ChannelDelivery) -> tuple[str, ...]:
    waits = delivery.HasField("next_try_time")
    return (
        delivery.delivery_id,
        wording.time_text(delivery.create_time),
        delivery.type,
        wording.value_name(pb.ChannelDeliveryState, delivery.state),
        str(delivery.tries),
        str(delivery.status or ""),
        str(delivery.latency_milliseconds) if delivery.HasField("try_time") else "",
        wording.time_text(delivery.next_try_time) if waits else "",
        wording.one_line(delivery.last_error, 100),
    )
