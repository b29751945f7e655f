"""`pawl notify`: the webhooks by which you are told."""

from __future__ import annotations

import asyncio
import sys
from enum import StrEnum
from itertools import islice
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import command, is_sure, new_request_id
from pawl.cli.failure import CommandError
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1 import webhook_pb2 as pb

app = typer.Typer(help="Be told by webhook: signed requests to a URL of yours.", no_args_is_help=True)

_PREFIX: Final = "NOTIFICATION_KIND_"
_TEST_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.2


class NotificationKind(StrEnum):
    """The kinds of notifications."""

    RUN_COMPLETED = "run-completed"
    RUN_FAILED = "run-failed"
    RUN_CANCELLED = "run-cancelled"
    RUN_EXPIRED = "run-expired"
    INPUT_NEEDED = "input-needed"
    ATTENTION_NEEDED = "attention-needed"
    APPROVAL_NEEDED = "approval-needed"
    WEBHOOK_DISABLED = "webhook-disabled"


def _kind(text: str) -> NotificationKind:
    """Return a kind, spelled as an option or as the type of a message."""
    try:
        return NotificationKind(text.replace(".", "-"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(NotificationKind)}.") from None


WebhookId = Annotated[str, typer.Argument(help="Id of the webhook.", show_default=False)]
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


@app.command()
@command(asks="notifications")
async def create(
    target: AsyncClient,
    console: Console,
    url: Annotated[str, typer.Argument(help="Where requests go.", show_default=False)],
    *,
    kind: Kinds = None,
    name: Name = None,
) -> None:
    """Make a webhook. Standard output has its secret and nothing else; it is told this once."""
    webhook = pb.Webhook(url=url, name=name or "", kinds=_numbers(kind or []))
    request = pb.CreateWebhookRequest(request_id=new_request_id(), webhook=webhook)
    made = await target.webhooks.CreateWebhook(request)
    if not made.secret:
        raise CommandError(
            f"Made {made.webhook.webhook_id}, and its secret was lost on the way: get another one with"
            f" `pawl notify rotate {made.webhook.webhook_id}`."
        )
    print(f"Made {made.webhook.webhook_id}. Try it with: pawl notify test {made.webhook.webhook_id}", file=sys.stderr)
    console.print(made.secret, markup=False, soft_wrap=True)


@app.command("list")
@command(asks="notifications")
async def list_webhooks(target: AsyncClient, console: Console) -> None:
    """List your webhooks, the oldest first."""
    found = (await target.webhooks.ListWebhooks(pb.ListWebhooksRequest())).webhooks
    if found or not console.is_terminal:
        show_table(console, ("webhook", "state", "kinds", "name", "url"), list(map(_row, found)))
    else:
        console.print("You have no webhooks.")


@app.command()
@command(asks="notifications")
async def get(target: AsyncClient, console: Console, webhook_id: WebhookId) -> None:
    """Show a webhook."""
    webhook = await _found(target, webhook_id)
    lines = dict(zip(("webhook", "state", "kinds", "name", "url"), _row(webhook), strict=True))
    lines["made"] = wording.time_text(webhook.create_time)
    if webhook.HasField("failing_since_time"):
        lines["failing since"] = wording.time_text(webhook.failing_since_time)
    for label, text in lines.items():
        console.print(f"{label}: {text}", markup=False, soft_wrap=True)


@app.command()
@command(asks="notifications")
async def update(
    target: AsyncClient,
    console: Console,
    webhook_id: WebhookId,
    *,
    url: Annotated[str | None, typer.Option("--url", help="Where requests go.")] = None,
    kind: Kinds = None,
    all_kinds: Annotated[bool, typer.Option("--all-kinds", help="Tell of all kinds.")] = False,
    name: Name = None,
    enable: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Tell again, or nothing more; what waits is given up.")
    ] = None,
) -> None:
    """Change a webhook; what is not named stays as it is."""
    if kind and all_kinds:
        raise CommandError("Give --kind or --all-kinds, not both.")
    if not (kind or all_kinds) and url is None and name is None and enable is None:
        raise CommandError("Say what to change: --url, --kind, --all-kinds, --name, --enable or --disable.")
    webhook = await _found(target, webhook_id)
    webhook.url = webhook.url if url is None else url
    webhook.name = webhook.name if name is None else name
    webhook.enabled = webhook.enabled if enable is None else enable
    if kind or all_kinds:
        webhook.kinds[:] = _numbers(kind or [])
    await target.webhooks.UpdateWebhook(pb.UpdateWebhookRequest(webhook=webhook))
    console.print(f"Changed {webhook_id}.", style="green", markup=False)


@app.command()
@command(asks="notifications")
async def delete(
    target: AsyncClient,
    console: Console,
    webhook_id: WebhookId,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> int:
    """Delete a webhook, with its secret and its deliveries."""
    if not is_sure(f"Delete the webhook {webhook_id}?", yes=yes):
        return 1
    await target.webhooks.DeleteWebhook(pb.DeleteWebhookRequest(webhook_id=webhook_id))
    console.print(f"Deleted {webhook_id}.", style="green", markup=False)
    return 0


@app.command()
@command(asks="notifications")
async def rotate(target: AsyncClient, console: Console, webhook_id: WebhookId) -> None:
    """Give a webhook another secret, which standard output has. The one before signs for a day, too."""
    request = pb.RotateWebhookSecretRequest(webhook_id=webhook_id)
    secret = (await target.webhooks.RotateWebhookSecret(request)).secret
    console.print(secret, markup=False, soft_wrap=True)


@app.command()
@command(asks="notifications")
async def test(target: AsyncClient, console: Console, webhook_id: WebhookId) -> int:
    """Send a test, and say what came of it."""
    sent = (await target.webhooks.TestWebhook(pb.TestWebhookRequest(webhook_id=webhook_id))).delivery
    request = pb.ListDeliveriesRequest(webhook_id=webhook_id)
    try:
        async with asyncio.timeout(_TEST_SECONDS):
            while sent.state == pb.WEBHOOK_DELIVERY_STATE_WAITING:
                await asyncio.sleep(_POLL_SECONDS)
                listed = (await target.webhooks.ListDeliveries(request)).deliveries
                sent = next((each for each in listed if each.delivery_id == sent.delivery_id), sent)
    except TimeoutError:
        raise CommandError(f"No outcome yet: `pawl notify deliveries {webhook_id}` will tell.") from None
    if sent.state == pb.WEBHOOK_DELIVERY_STATE_DELIVERED:
        console.print(f"Delivered in {sent.latency_milliseconds} ms: status {sent.status}.", style="green")
        return 0
    console.print(f"Not delivered: {wording.one_line(sent.last_error, 500)}.", style="red", markup=False)
    return 1


@app.command()
@command(asks="notifications")
async def deliveries(
    target: AsyncClient,
    console: Console,
    webhook_id: WebhookId,
    *,
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many, the newest.", min=1)] = 50,
) -> None:
    """List what was sent to a webhook, the newest first."""
    request = pb.ListDeliveriesRequest(webhook_id=webhook_id, page_size=min(count, 200))
    found: list[pb.WebhookDelivery] = []
    async for page in target.pages(target.webhooks.ListDeliveries, request):
        found += page.deliveries
        if len(found) >= count:
            break
    headings = ("delivery", "made", "type", "state", "tries", "status", "ms", "next try", "error")
    show_table(console, headings, list(map(_delivery_row, islice(found, count))))


@app.command()
@command(asks="notifications")
async def resend(
    target: AsyncClient,
    console: Console,
    delivery_id: Annotated[str, typer.Argument(help="Id of the delivery.", show_default=False)],
) -> None:
    """Send a delivery once more, under the same id."""
    await target.webhooks.ResendDelivery(pb.ResendDeliveryRequest(delivery_id=delivery_id))
    console.print(f"Sending {delivery_id} again.", style="green", markup=False)


async def _found(target: AsyncClient, webhook_id: str) -> pb.Webhook:
    return (await target.webhooks.GetWebhook(pb.GetWebhookRequest(webhook_id=webhook_id))).webhook


def _numbers(kinds: list[NotificationKind]) -> list[notify_pb2.NotificationKind.ValueType]:
    return [notify_pb2.NotificationKind.Value(f"{_PREFIX}{kind.name}") for kind in dict.fromkeys(kinds)]


def _row(webhook: pb.Webhook) -> tuple[str, ...]:
    state = "enabled" if webhook.enabled else "disabled"
    return (
        webhook.webhook_id,
        f"{state}: {wording.one_line(webhook.disable_reason, 200)}" if webhook.disable_reason else state,
        ", ".join(wording.value_name(notify_pb2.NotificationKind, kind) for kind in webhook.kinds) or "all",
        wording.one_line(webhook.name, 80),
        wording.clean(webhook.url),
    )


def _delivery_row(delivery: pb.WebhookDelivery) -> tuple[str, ...]:
    waits = delivery.HasField("next_try_time")
    return (
        delivery.delivery_id,
        wording.time_text(delivery.create_time),
        delivery.type,
        wording.value_name(pb.WebhookDeliveryState, delivery.state),
        str(delivery.tries),
        str(delivery.status or ""),
        str(delivery.latency_milliseconds) if delivery.HasField("try_time") else "",
        wording.time_text(delivery.next_try_time) if waits else "",
        wording.one_line(delivery.last_error, 100),
    )
