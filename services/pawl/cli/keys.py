"""`pawl keys`: the API keys of a store, and of the deployment."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.audit import Json
from pawl.cli.checks import run_program
from pawl.cli.command import Flags, command, narrows, new_request_id
from pawl.cli.failure import CommandError
from pawl.cli.rules import set_end
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.identity.v1 import key_pb2

app = typer.Typer(
    help="API keys: make, list and revoke them, and see who did. Needs the role operator or deployment.",
    no_args_is_help=True,
)

_DATABASE: Final = "PAWL_DATABASE_URL"

InStore = Annotated[
    str, typer.Option("--in-store", help="The store, where your key is the deployment's; else it is your own.")
]


class EventKind(StrEnum):
    """The kinds of events."""

    KEY_CREATED = "key-created"
    KEY_REVOKED = "key-revoked"
    KEY_BOOTSTRAPPED = "key-bootstrapped"


@app.command()
@command(asks="keys")
async def create(
    target: AsyncClient,
    console: Console,
    user: Annotated[str, typer.Argument(help="Whom the key stands for.", show_default=False)],
    *,
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            help="viewer, member, approver, admin, operator, worker, delegate, gateway or deployment; roles of your own"
            " beside one. Repeatable. Without any: a member who decides the calls of their own runs.",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What it is for.")] = "",
    lasts: Annotated[
        str | None, typer.Option("--for", help="How long: 30m, 2h, 7d. Without it: until revoked.")
    ] = None,
    in_store: InStore = "",
    decides_for_users: Annotated[
        bool, typer.Option("--decides-for-users", help="With the role delegate: it may decide for those it acts for.")
    ] = False,
) -> None:
    """Make a key. Standard output has its secret and nothing else; it is told this once."""
    key = key_pb2.Key(user_id=user, roles=role, name=name, store_id=in_store, decides_for_users=decides_for_users)
    if lasts is not None:
        set_end(key, lasts)
    request = key_pb2.CreateKeyRequest(request_id=new_request_id(), key=key)
    made = await target.key_register.CreateKey(request)
    if not made.secret:
        raise CommandError(
            f"Made {made.key.key_id}, and its secret was lost on the way: revoke it and make another one."
        )
    print(f"Made {made.key.key_id}. Revoke it with: pawl keys revoke {made.key.key_id}", file=sys.stderr)
    console.print(made.secret, markup=False, soft_wrap=True)


@app.command("list")
@command(asks="keys")
async def list_keys(
    target: AsyncClient,
    console: Console,
    *,
    ended: Annotated[bool, typer.Option("--all", help="Also those that are revoked or expired.")] = False,
    in_store: InStore = "",
) -> None:
    """List keys, the newest first."""
    request = key_pb2.ListKeysRequest(include_ended=ended, store_id=in_store)
    found = [key async for page in target.pages(target.key_register.ListKeys, request) for key in page.keys]
    if not found:
        print("There are no keys.", file=sys.stderr)
        return
    headings = ("key", "user", "roles", "until", "last used", "made by", "name")
    show_table(console, headings, list(map(_row, found)))


@app.command()
@command(asks="keys")
async def revoke(
    target: AsyncClient,
    console: Console,
    key_id: Annotated[str, typer.Argument(help="Id of the key.", show_default=False)],
) -> None:
    """End a key for good: within five seconds nobody takes it."""
    await target.key_register.RevokeKey(key_pb2.RevokeKeyRequest(key_id=key_id))
    console.print(f"Revoked {key_id}.", style="green", markup=False)


@app.command()
@command(asks="keys")
async def events(
    target: AsyncClient,
    console: Console,
    *,
    key: Annotated[str, typer.Option("--key", help="Only of this key.", callback=narrows)] = "",
    kind: Annotated[EventKind | None, typer.Option("--kind", help="Only of this kind.")] = None,
    in_store: Annotated[
        str, typer.Option("--in-store", help="Only of this store; without it the deployment's key shows all.")
    ] = "",
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many, the newest.", min=1)] = 50,
    json: Json = False,
) -> None:
    """List who made and revoked keys, the newest last."""
    request = key_pb2.ListKeyEventsRequest(key_id=key, store_id=in_store)
    if kind is not None:
        request.kind = key_pb2.KeyEventKind.Value(f"KEY_EVENT_KIND_{kind.name}")
    found: list[key_pb2.KeyEvent] = []
    async for page in target.pages(target.key_register.ListKeyEvents, request):
        found += page.events
        if len(found) >= count:
            break
    found = found[:count][::-1]
    if json:
        for event in found:
            console.print(wording.document_line(event), markup=False, soft_wrap=True)
    elif found:
        headings = ("event", "time", "what", "store", "key", "user", "roles", "by", "name")
        show_table(console, headings, list(map(_event_row, found)))
    else:
        print("There are no such events.", file=sys.stderr)


@app.command()
def bootstrap(
    context: typer.Context,
    *,
    database_url: Annotated[
        str | None, typer.Option("--database-url", help="By default PAWL_DATABASE_URL, else that of the data folder.")
    ] = None,
) -> None:
    """Make the first key of the deployment, which makes all others; needs access to the database.

    Standard output has its secret and nothing else. While the deployment has a key, it makes none.
    """
    flags: Flags = context.obj
    if database_url is not None:
        variables = {_DATABASE: database_url, f"{_DATABASE}_FILE": ""}
    elif os.environ.get(_DATABASE) or os.environ.get(f"{_DATABASE}_FILE"):
        variables = {}
    else:
        variables = {f"{_DATABASE}_FILE": str((flags.data or Path(".pawl")) / "secrets" / "database.url")}
    run_program("pawl.job_store.bootstrap", environment={**os.environ, **variables})


def _row(key: key_pb2.Key) -> tuple[str, ...]:
    until = wording.time_text(key.expire_time) if key.HasField("expire_time") else "it is revoked"
    if key.HasField("revoke_time"):
        until = f"revoked {wording.time_text(key.revoke_time)} by {wording.clean(key.revoke_user_id)}"
    elif key.HasField("expire_time") and key.expire_time.ToDatetime(tzinfo=UTC) <= datetime.now(UTC):
        until = f"expired {until}"
    return (
        key.key_id,
        wording.clean(key.user_id),
        ", ".join(key.roles) or "none",
        until,
        wording.time_text(key.last_use_time) if key.HasField("last_use_time") else "never",
        wording.clean(key.create_user_id) or "bootstrap",
        wording.one_line(key.name, 80),
    )


def _event_row(event: key_pb2.KeyEvent) -> tuple[str, ...]:
    by = f"{event.by_delegate_user_id} for {event.by_user_id}" if event.by_delegate_user_id else event.by_user_id
    return (
        str(event.event_id),
        wording.time_text(event.time),
        wording.value_name(key_pb2.KeyEventKind, event.kind).replace("_", " "),
        event.store_id,
        event.key_id,
        wording.clean(event.user_id),
        ", ".join(event.roles) or ("none" if event.key_id else ""),
        f"{wording.clean(by)} ({event.by_credential_id})" if by else "",
        wording.one_line(event.key_name, 80),
    )
