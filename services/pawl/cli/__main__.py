"""Entry point of the `pawl` program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from pawl.chassis.identity.local_key import IN_CLEAR
from pawl.chassis.process.start import StartError
from pawl.cli import (
    access,
    agents,
    chat,
    conversations,
    decisions,
    demo,
    events,
    inbox,
    jobs,
    notify,
    operating,
    programs,
    runs,
    starters,
    toolbox,
)
from pawl.cli.command import EXIT_IMPOSSIBLE, EXIT_INTERRUPTED, Flags, fail
from pawl.launcher.options import read_options
from pawl.launcher.up import up as run_suite

_FLAGS: Final = ("--address", "--data", "--store", "--user", "--ca")
_SWITCHES: Final = ("--key-in-clear",)
_ALL_PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="pawl",
    cls=_Group,
    help="A durable runtime for LLM agents. Start it with `pawl up`, then talk to it with `pawl chat`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001  # typer passes it by position
    if wanted:
        typer.echo(f"pawl {version('pawl-runtime')}")
        raise typer.Exit


@app.callback()
def flags(
    context: typer.Context,
    *,
    address: Annotated[
        str | None,
        typer.Option(envvar="PAWL_ADDRESS", help="host:port of agent-loop; separate several replicas with commas."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="PAWL_DATA", help="The suite's data folder; default: .pawl.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Act in this store. Requires the local key of a suite on this machine.")
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(help="Act as this user. Requires the local key of a suite on this machine, or a delegate key."),
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            "--ca",
            envvar="PAWL_TLS_CA_FILE",
            help="CA certificate file, to connect with TLS. A suite in the data folder brings its own.",
        ),
    ] = None,
    key_in_clear: Annotated[
        bool,
        typer.Option("--key-in-clear", envvar=IN_CLEAR, help="Allow sending the key to other machines without TLS."),
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Store the connection flags. The key comes from PAWL_API_KEY or the data folder."""
    context.obj = {"address": address, "data": data, "store": store, "user": user}
    context.obj |= {"authority": authority, "key_in_clear": key_in_clear}


@app.command()
def up(
    context: typer.Context,
    *,
    port: Annotated[
        list[str] | None,
        typer.Option(help="name=number; 0 picks a free port, `all` sets the ports that are not named. Repeatable."),
    ] = None,
    replicas: Annotated[list[str] | None, typer.Option(help="service=count. Repeatable.")] = None,
) -> None:
    """Start the suite on this machine.

    Runs PostgreSQL, NATS and the services until Ctrl-C. Without
    OPENAI_API_KEY or OPENAI_BASE_URL it also runs a scripted model. All data
    is in the folder given by --data or PAWL_DATA (default: .pawl).
    """
    given: Flags = context.obj
    try:
        options = read_options(os.environ, data=given["data"], ports=port or (), replicas=replicas or ())
    except StartError as error:
        raise typer.Exit(fail(error, [])) from None
    raise typer.Exit(run_suite(options, agents.apply_folder))


tools = typer.Typer(invoke_without_command=True)
tools.callback()(toolbox.tools)
tools.command(add_help_option=False, context_settings=_ALL_PASSED_ON)(programs.check)
tools.command("stats")(toolbox.stats)
access.keys.command()(programs.bootstrap)
model = typer.Typer(help="Check model servers.", no_args_is_help=True)
model.callback()(lambda: None)
model.command("check", add_help_option=False, context_settings=_ALL_PASSED_ON)(programs.check_model)

_COMMANDS: Final[Mapping[str, Callable[..., None] | typer.Typer]] = {
    "run": runs.run,
    "chat": chat.chat,
    "watch": runs.watch,
    "runs": runs.runs,
    "fork": conversations.fork,
    "status": runs.status,
    "inbox": inbox.inbox,
    "approve": decisions.approve,
    "top-up": runs.top_up,
    "cancel": runs.cancel,
    "undo": operating.undo,
    "steps": runs.steps,
    "events": events.events,
    "attention": operating.attention,
    "resolve": operating.resolve,
    "redrive": operating.redrive,
    "end": operating.end,
    "audit": access.audit,
    "tools": tools,
    "model": model,
    "agents": agents.app,
    "apply": agents.apply,
    "documents": toolbox.documents,
    "memory": toolbox.memory,
    "sources": toolbox.sources,
    "notifications": notify.notifications,
    "notify": notify.app,
    "complete": toolbox.complete,
    "whoami": access.whoami,
    "console": programs.console,
    "rules": access.rules,
    "keys": access.keys,
    "conversations": conversations.app,
    "jobs": jobs.app,
    "schedules": starters.schedules,
    "triggers": starters.triggers,
    "demo": demo.demo,
}
for _name, _made in _COMMANDS.items():
    if isinstance(_made, typer.Typer):
        app.add_typer(_made, name=_name)
    else:
        app.command(_name)(_made)


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Move the connection flags to the front, so that they can also be typed after the command."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    rest, flags, index = list(arguments), list[str](), 0
    while index < end:
        name, has_value, _ = rest[index].partition("=")
        length = 1 if rest[index] in _SWITCHES else 0 if name not in _FLAGS else 1 if has_value else 2
        flags += rest[index : index + length]
        del rest[index : index + length]
        end -= length
        index += not length
    return [*flags, *rest]


def main() -> None:
    """Run the command line and exit. Users see error messages, never a traceback."""
    try:
        app(args=flags_first(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001  # last chance to print a readable message
        fail(error, [])
        sys.exit(EXIT_IMPOSSIBLE)


if __name__ == "__main__":
    main()
