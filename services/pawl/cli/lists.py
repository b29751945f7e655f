"""`pawl tools` and `notifications`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import command
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2
from pawl.notify.v1 import notify_pb2
from pawl.tool.v1 import tool_pb2


@command(asks="tools")
async def tools(target: AsyncClient, console: Console) -> None:
    """List the tools that the model may be given."""
    pages = target.pages(target.tool_register.ListTools, tool_pb2.ListToolsRequest())
    rows = [_tool_row(tool) async for page in pages for tool in page.tools]
    show_table(console, ("tool", "version", "runs in", "category", "effect", "what it does"), rows)


def _tool_row(tool: tool_pb2.Tool) -> tuple[str, ...]:
    definition = tool.definition
    return (
        wording.clean(definition.name),
        str(tool.version),
        wording.value_name(call_pb2.ExecutionContext, definition.context),
        wording.value_name(call_pb2.ToolCategory, definition.category),
        wording.value_name(call_pb2.EffectClass, definition.effect_class).replace("_", " "),
        wording.one_line(definition.description, 80),
    )


@command(asks="notifications")
async def notifications(
    target: AsyncClient,
    console: Console,
    *,
    unread: Annotated[bool, typer.Option("--unread", help="Only those not read.")] = False,
    read: Annotated[bool, typer.Option("--read", help="Mark the ones listed as read.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then show new ones as they come.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many.", min=1, max=200)] = 20,
) -> None:
    """List your notifications, the newest last."""
    request = notify_pb2.ListNotificationsRequest(page_size=count, only_unread=unread)
    page = await target.notifier.ListNotifications(request)
    listed = list(reversed(page.notifications))
    for notification in listed:
        _show(console, notification)
    if read and listed:
        ids = [notification.notification_id for notification in listed]
        acknowledge = notify_pb2.AcknowledgeNotificationsRequest(notification_ids=ids)
        await target.notifier.AcknowledgeNotifications(acknowledge)
    if not listed and not follow:
        console.print("You have no notifications." if not unread else "You have no unread notifications.")
    if follow:
        last = max((notification.number for notification in page.notifications), default=0)
        subscribe = notify_pb2.SubscribeRequest(after_number=last, only_new=last == 0)
        async for response in target.notifier.Subscribe(subscribe):
            if response.HasField("notification"):
                _show(console, response.notification)


def _show(console: Console, notification: notify_pb2.Notification) -> None:
    mark = " " if notification.HasField("read_time") else "*"
    title = wording.one_line(notification.title, 200)
    time = wording.time_text(notification.create_time)
    line = f"{mark} {notification.number:>4}  {time}  {notification.run_id or notification.channel_id}  {title}"
    console.print(line, markup=False, soft_wrap=True)
    if notification.kind == notify_pb2.NOTIFICATION_KIND_APPROVAL_NEEDED:
        how = f"pawl approve {notification.run_id} {notification.call_id}"
        console.print(f"         decide with: {how}", markup=False, soft_wrap=True)
