from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import typer.main
from typer.core import TyperArgument, TyperGroup, TyperOption

_FLAGS: Final = ("--address", "--data", "--store", "--user", "--ca")
_SWITCHES: Final = ("--key-in-clear",)

# Each command's module in pawl.cli, and the first sentence of its help.
COMMANDS: Final = {
    "up": ("up:up", "Start the suite on this machine."),
    "init": ("dev:init", "Create the folder of a small product: an agent and a tool."),
    "dev": ("dev:dev", "Start the suite for a product's folder, and reload the folder's changes."),
    "run": ("runs:run", "Start a run and watch it."),
    "chat": ("chat:chat", "Chat with an agent."),
    "watch": ("runs:watch", "Watch a run until it ends."),
    "runs": ("runs:runs", "List your runs, newest first."),
    "fork": ("conversations:fork", "Fork a conversation at a message."),
    "status": ("runs:status", "Show the state of a run."),
    "inbox": ("inbox:inbox", "Show what is waiting for you, across all runs, and decide."),
    "approve": ("decisions:approve", "Decide on a pending call."),
    "top-up": ("runs:top_up", "Add tokens to a run's budget."),
    "cancel": ("runs:cancel", "Cancel a run."),
    "undo": ("operating:undo", "Undo the effects of a run, most recent first."),
    "steps": ("runs:steps", "Show the steps of a run, or the request of one of its model calls."),
    "events": ("events:events", "Print messages from NATS as they arrive."),
    "attention": ("operating:attention", "List the runs that need an operator."),
    "resolve": ("operating:resolve", "Report the outcome of an uncertain call."),
    "redrive": ("operating:redrive", "Continue a quarantined run where it stopped."),
    "end": ("operating:end", "End any user's run in the store."),
    "apply": ("declared.commands:apply", "Save the resources in files, and show the changes."),
    "export": (
        "declared.commands:export",
        "Write the resources of the store and your own resources as files for `pawl apply`.",
    ),
    "notifications": ("notify:notifications", "List your notifications, newest last."),
    "complete": ("toolbox:complete", "Complete a call that is waiting for an external result."),
    "whoami": ("access:whoami", "Show your identity and permissions."),
    "console": ("programs:console", "Open the console in your browser, logged in."),
    "demo": ("demo:demo", "Play a conversation, including a crash."),
    "audit": ("access:audit", "List and verify the store's audit chain."),
    "tools": ("programs:tools", "List the tools available to models."),
    "model": ("programs:model", "Check model servers."),
    "agents": ("agents:app", "List, show and delete the store's agents."),
    "documents": ("toolbox:documents", "List, add and remove the documents that the model can read."),
    "files": ("files:files", "List the store's files, and copy them in and out."),
    "memory": ("toolbox:memory", "List and erase what agents remember about you."),
    "sources": ("toolbox:sources", "Manage tool sources: MCP servers and HTTP APIs."),
    "notify": ("notify:app", "Get notifications by webhook or e-mail."),
    "rules": ("access:rules", "Manage rules that allow, gate or deny calls."),
    "keys": ("programs:keys", "Create, list and revoke API keys."),
    "usage": ("usage:usage", "Show how many runs, calls and tokens were used."),
    "settings": ("settings:app", "Switch features on and off, and change store limits."),
    "conversations": ("conversations:app", "List, search, share and erase conversations."),
    "jobs": ("jobs:app", "Start, list, watch, pause and stop background jobs."),
    "workflows": ("workflows:app", "Save, start, watch and change workflows."),
    "goal": ("goals:app", "Start, list and watch goals, and raise their limits."),
    "schedules": ("starters:schedules", "Start runs at set times or intervals."),
    "triggers": ("starters:triggers", "Start runs when a webhook or e-mail arrives."),
}


def load(name: str) -> Any:
    """Import a command and return it as a Click command."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    made = getattr(import_module(f"pawl.cli.{module}"), attribute)
    holder = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    if isinstance(made, typer.Typer):
        holder.add_typer(made, name=name)
    else:
        holder.command(name)(made)
    return typer.main.get_group(holder).commands[name]


class _Conversion:
    """Converts a parameter's value like typer, but leaves values that already have the right type unchanged.

    typer would import pydantic for every value, which takes a third of the time of a short command.
    """

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        is_list = param.multiple or param.nargs == -1
        if value is None:
            return () if is_list else None
        if not is_list and type(value) in (str, int) and type(value) is param.type_descriptor.annotation:
            return value
        return _typers_conversion(param).coerce(value, param=param, ctx=ctx)


_typers_conversion: Final[Any] = TyperOption.get_runtime_param
for _kind in (TyperArgument, TyperOption):
    setattr(_kind, "get_runtime_param", lambda _parameter: _Conversion())  # noqa: B010  # mypy refuses an assignment


class _Group(TyperGroup):
    """A group that imports a command only when it is called. Importing all of them takes a second."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        command = load(name) if name else None
        if not gc.isenabled():  # See pawl.cli.main.
            gc.freeze()  # Imported modules stay until the end.
            gc.enable()
        return name, command, rest

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
for _name, (_, _help) in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def _show_version(wanted: bool) -> None:  # noqa: FBT001  # typer passes it by position
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  # slow to import

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
        str | None, typer.Option(envvar="PAWL_DATA", metavar="<path>", help="The suite's data folder; default: .pawl.")
    ] = None,
    store: Annotated[
        list[str] | None,
        typer.Option(
            help="The store. Requires the local key of a suite on this machine, or a deployment key for the commands"
            " keys, settings and usage."
        ),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(help="Act as this user. Requires the local key of a suite on this machine, or a delegate key."),
    ] = None,
    authority: Annotated[
        str | None,
        typer.Option(
            "--ca",
            envvar="PAWL_TLS_CA_FILE",
            metavar="<path>",
            help="CA certificate file, to connect with TLS. A suite in the data folder brings its own.",
        ),
    ] = None,
    key_in_clear: Annotated[
        bool,
        typer.Option(
            "--key-in-clear", envvar="PAWL_KEY_IN_CLEAR", help="Allow sending the key to other machines without TLS."
        ),
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Store the connection flags. The key comes from PAWL_API_KEY or the data folder."""
    context.obj = {"address": address, "data": None if data is None else Path(data), "store": store, "user": user}
    context.obj |= {"authority": authority, "key_in_clear": key_in_clear}


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Move the connection flags to the front, so that users can also type them after a command's name."""
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
    """Run the command line and exit. Print error messages, never a traceback."""
    try:
        app(args=flags_first(sys.argv[1:]))
    except KeyboardInterrupt:
        from pawl.cli.command import EXIT_INTERRUPTED  # noqa: PLC0415

        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001  # last chance to print a readable message
        from pawl.cli.command import EXIT_IMPOSSIBLE, fail  # noqa: PLC0415  # slow to import

        fail(error, [])
        sys.exit(EXIT_IMPOSSIBLE)


if __name__ == "__main__":
    main()
