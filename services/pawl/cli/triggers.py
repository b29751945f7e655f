"""`pawl triggers`: runs that start when something happens outside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, is_sure, seconds_of
from pawl.cli.failure import CommandError
from pawl.cli.runs import Labels, labels_of, labels_text, show_table
from pawl.cli.schedules import Key, OfAgent, Overlap, fire_text, paused_lines
from pawl.client import AsyncClient
from pawl.event.v1 import schedule_pb2, trigger_pb2


class Authentication(StrEnum):
    """The way in which the sender of a webhook shows that it may, as people type it."""

    SIGNATURE = "signature"
    BEARER = "bearer"


Name = Annotated[str, typer.Argument(help="Name of the trigger.", show_default=False)]
Text = Annotated[
    str | None,
    typer.Option(
        "--text", help="The message with which each run begins; the event is at {{event}}.", show_default=False
    ),
]
Shown = Annotated[
    Authentication | None, typer.Option("--webhook", help="Fired by webhooks: signed ones, or with the secret as key.")
]
Pointer = Annotated[
    str | None,
    typer.Option(
        "--conversation-pointer", help="One conversation for events with the same value at this JSON pointer."
    ),
]
Together = Annotated[
    str | None,
    typer.Option("--concurrency-pointer", help="--overlap and --debounce go by events with the same value there."),
]
Debounce = Annotated[
    str | None,
    typer.Option("--debounce", help="Of events that follow each other within 30s, 5m ... fire the last one."),
]
Mailbox = Annotated[
    str | None, typer.Option("--mailbox", help="Fired by mails: user@host, or user@host:port, of an IMAP server.")
]
Plaintext = Annotated[
    bool | None, typer.Option("--plaintext/--tls", help="Without TLS, where the deployment has opened the host.")
]
Secret = Annotated[str | None, typer.Option("--password-secret", help="Secret of the store that is the password.")]
Folder = Annotated[str | None, typer.Option("--folder", help="Folder of the mailbox; INBOX if not given.")]
Poll = Annotated[str | None, typer.Option("--poll", help="Look into the mailbox each 15s to 1h; 60s if not given.")]
Authserv = Annotated[
    str | None, typer.Option("--authserv-id", help="Only mails of which this server says that they pass DMARC.")
]
Senders = Annotated[
    list[str] | None, typer.Option("--sender", help="Only mails from this address, or @domain. Repeatable.")
]
WhenBusy = Annotated[Overlap | None, typer.Option("--overlap", help="While the run before goes on; by default allow.")]

app = typer.Typer(help="Start runs when something happens outside: a webhook or a mail comes in.", no_args_is_help=True)


def _saving(*, made: bool) -> Callable[..., None]:
    """Return the command that makes a trigger, or changes one: both take the same options."""

    @command()
    async def save(
        target: AsyncClient,
        console: Console,
        name: Name,
        *,
        text: Text = None,
        webhook: Shown = None,
        mailbox: Mailbox = None,
        plaintext: Plaintext = None,
        password_secret: Secret = None,
        folder: Folder = None,
        poll_seconds: Poll = None,
        authserv_id: Authserv = None,
        sender: Senders = None,
        overlap: WhenBusy = None,
        debounce_seconds: Debounce = None,
        conversation_key: Key = None,
        conversation_pointer: Pointer = None,
        concurrency_pointer: Together = None,
        agent: OfAgent = None,
        labels: Labels = None,
    ) -> None:
        definition = trigger_pb2.TriggerDefinition(name=name)
        if not made:
            definition = (await target.get_trigger(name)).definition
        _change(
            definition,
            text=text,
            webhook=webhook,
            overlap=overlap,
            debounce_seconds=debounce_seconds,
            conversation_key=conversation_key,
            conversation_pointer=conversation_pointer,
            concurrency_pointer=concurrency_pointer,
            agent=agent,
            labels=labels,
        )
        _change_mailbox(
            definition,
            mailbox,
            plaintext=plaintext,
            password_secret=password_secret,
            folder=folder,
            poll_seconds=None if poll_seconds is None else seconds_of(poll_seconds or "0s", "poll_seconds"),
            authserv_id=authserv_id,
            senders=sender,
        )
        if not made:
            _say(console, await target.update_trigger(definition))
            return
        trigger, secret = await target.create_trigger(definition)
        if definition.HasField("mailbox"):
            _say(console, trigger)
            return
        if not secret:
            raise CommandError(
                f"The trigger {name} was there, and told its secret then: `pawl triggers rotate {name}` gives another."
            )
        print(f"Made {name}: webhooks for {trigger.trigger_id}. Its secret:", file=sys.stderr)
        console.print(secret, markup=False, soft_wrap=True)

    return save


app.command(
    "create",
    help="Make a trigger: it needs --text, and --webhook or --mailbox. The secret of a webhook is all that standard"
    " output has, this once.",
)(_saving(made=True))
app.command(
    "update", help="Change what is given of a trigger, whose runs have the rights of your key then. '' takes away."
)(_saving(made=False))


@app.command("list")
@command()
async def list_triggers(target: AsyncClient, console: Console) -> None:
    """List your triggers by name."""
    rows = [_row(trigger) for trigger in await target.list_triggers()]
    show_table(console, ("trigger", "id", "by", "state", "what"), rows)


@app.command()
@command()
async def show(target: AsyncClient, console: Console, name: Name) -> None:
    """Show a trigger and its last twenty fires."""
    trigger = await target.get_trigger(name)
    lines = [f"{name}: {_by(trigger)} {trigger.trigger_id}", *wording.said("text: ", trigger.definition.text)]
    lines += _details(trigger.definition)
    lines += paused_lines(trigger)
    if trigger.HasField("unreachable_time"):
        since = wording.time_text(trigger.unreachable_time)
        lines.append(f"unreachable since {since}: {wording.one_line(trigger.unreachable_reason, 300)}")
    if trigger.refused_count:
        last = wording.time_text(trigger.refused_time)
        reason = wording.one_line(trigger.refused_reason, 300)
        lines.append(f"refused: {trigger.refused_count}, the last {last}: {reason}")
    lines += ["fires:", *(f"  {fire_text(fire)}" for fire in trigger.fires)]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


@app.command()
@command()
async def pause(
    target: AsyncClient,
    console: Console,
    name: Name,
    *,
    note: Annotated[str, typer.Option(help="Why, for whoever looks at it.", show_default=False)] = "",
) -> None:
    """Pause a trigger: it takes no events, and what waits goes on waiting."""
    _say(console, await target.pause_trigger(name, note))


@app.command()
@command()
async def resume(target: AsyncClient, console: Console, name: Name) -> None:
    """Have a trigger go on, with the rights of your key."""
    _say(console, await target.resume_trigger(name))


@app.command()
@command()
async def rotate(target: AsyncClient, console: Console, name: Name) -> None:
    """Give a trigger another secret, which standard output has. For a day the one before counts, too."""
    console.print(await target.rotate_trigger_secret(name), markup=False, soft_wrap=True)


@app.command()
@command()
async def delete(target: AsyncClient, console: Console, name: Name, *, yes: Yes = False) -> int:
    """Delete a trigger with its secrets, its fires and what waits. Runs that it has started go on."""
    if not is_sure(f"Delete the trigger {name}?", yes=yes):
        return EXIT_UNSUCCESSFUL
    await target.delete_trigger(name)
    console.print(f"Deleted {wording.one_line(name)}.", markup=False, soft_wrap=True)
    return 0


def _change(definition: trigger_pb2.TriggerDefinition, **given: Any) -> None:
    """Put what was given into a definition."""
    for name, value in given.items():
        if value is None:
            continue
        if name == "labels":
            definition.labels.clear()
            definition.labels.update(labels_of(list(filter(None, value))))
        elif name == "overlap":
            definition.overlap = schedule_pb2.ScheduleOverlap.Value(f"SCHEDULE_OVERLAP_{value.name}")
        elif name == "webhook":
            kind = trigger_pb2.WebhookAuthentication.Value(f"WEBHOOK_AUTHENTICATION_{value.name}")
            definition.webhook.authentication = kind
        elif not value:
            definition.ClearField(name)  # type: ignore[arg-type]  # a field of it
        else:
            setattr(definition, name, seconds_of(value, name) if name == "debounce_seconds" else value)


def _change_mailbox(definition: trigger_pb2.TriggerDefinition, address: str | None, **given: Any) -> None:
    """Put what was given of a mailbox into a definition."""
    changed = {name: value for name, value in given.items() if value is not None}
    if address is not None:
        username, _, host = address.rpartition("@")
        name, colon, port = host.rpartition(":")
        if not username or (colon and not port.isdecimal()):
            raise CommandError(
                f"{address!r} is no mailbox like ann@imap.example.com or ann@imap.example.com:993.", parameter="mailbox"
            )
        changed |= {"username": username, "host": name if colon else host, "port": int(port) if colon else 0}
    if changed and definition.HasField("webhook"):
        raise CommandError("Give --webhook or --mailbox, not both.")
    for name, value in changed.items():
        if name == "senders":
            definition.mailbox.senders[:] = filter(None, value)
        else:
            setattr(definition.mailbox, name, value)


def _say(console: Console, trigger: trigger_pb2.Trigger) -> None:
    console.print(f"{trigger.definition.name}: {_by(trigger)}, {_state(trigger)}", markup=False, soft_wrap=True)


def _row(trigger: trigger_pb2.Trigger) -> tuple[str, ...]:
    definition = trigger.definition
    return definition.name, trigger.trigger_id, _by(trigger), _state(trigger), wording.one_line(definition.text)


def _by(trigger: trigger_pb2.Trigger) -> str:
    if trigger.definition.HasField("mailbox"):
        mailbox = trigger.definition.mailbox
        return wording.one_line(f"mails to {mailbox.username} at {mailbox.host}")
    authentication = trigger.definition.webhook.authentication
    return f"webhook ({wording.value_name(trigger_pb2.WebhookAuthentication, authentication)})"


def _state(trigger: trigger_pb2.Trigger) -> str:
    refused = f", {trigger.refused_count} refused" if trigger.refused_count else ""
    if trigger.HasField("pause_time"):
        return f"paused{refused}"
    return "unreachable" if trigger.HasField("unreachable_time") else f"on{refused}"


def _details(definition: trigger_pb2.TriggerDefinition) -> list[str]:
    """Return a line for each thing that was chosen about a trigger beside its text."""
    chosen = {
        "agent": definition.agent,
        "labels": labels_text(definition.labels),
        "conversation key": wording.one_line(definition.conversation_key),
        "conversation by": wording.one_line(definition.conversation_pointer),
        "folder": wording.one_line(definition.mailbox.folder),
        "from": wording.one_line(", ".join(definition.mailbox.senders), 300),
        "DMARC by": wording.one_line(definition.mailbox.authserv_id),
        "overlap": definition.overlap and wording.value_name(schedule_pb2.ScheduleOverlap, definition.overlap),
        "concurrency by": wording.one_line(definition.concurrency_pointer),
        "debounce": definition.debounce_seconds and f"{definition.debounce_seconds} s",
    }
    return [f"{name}: {value}" for name, value in chosen.items() if value]
