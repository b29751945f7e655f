"""The program `pawl`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final

import typer

from pawl.chassis.local_key import IN_CLEAR
from pawl.chassis.start import StartError
from pawl.cli import (
    agents,
    attention,
    audit,
    browser,
    channels,
    chat,
    checks,
    completing,
    conversations,
    decisions,
    demo,
    documents,
    events,
    inbox,
    jobs,
    keys,
    lists,
    memory,
    preferences,  # noqa: F401  # its commands are under `pawl notify`
    rules,
    runs,
    schedules,
    sources,
    status,
    steps,
    triggers,
    undoing,
    whoami,
)
from pawl.cli.command import EXIT_IMPOSSIBLE, EXIT_INTERRUPTED, Flags, fail
from pawl.launcher.options import read_options
from pawl.launcher.up import up as run_suite

_FLAGS: Final = ("--address", "--data", "--store", "--user", "--ca")
_SWITCHES: Final = ("--key-in-clear",)
_ALL_PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="pawl",
    help="A durable runtime for LLM agents. Start it with `pawl up`, then talk to it with `pawl chat`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001  # typer gives it so
    if wanted:
        typer.echo(f"pawl {version('pawl-runtime')}")
        raise typer.Exit


@app.callback()
def flags(
    context: typer.Context,
    *,
    address: Annotated[
        str | None, typer.Option(envvar="PAWL_ADDRESS", help="host:port of agent-loop; several with commas between.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="PAWL_DATA", help="Data folder of the suite, by default .pawl.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Act in this store; only with the key of a suite on this machine.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Act as this user; with the key of a suite on this machine, or a delegate's.")
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            "--ca",
            envvar="PAWL_TLS_CA_FILE",
            help="Certificates of the authority, to speak TLS. A suite of the data folder has its own.",
        ),
    ] = None,
    key_in_clear: Annotated[
        bool,
        typer.Option("--key-in-clear", envvar=IN_CLEAR, help="Send the key beyond this machine without TLS, too."),
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Remember which suite to talk to, and as whom. The key comes from PAWL_API_KEY or the data folder."""
    context.obj = Flags(
        address=address, data=data, store=store, user=user, authority=authority, key_in_clear=key_in_clear
    )


@app.command()
def up(
    context: typer.Context,
    *,
    port: Annotated[
        list[str] | None, typer.Option(help="name=number, 0 for a free one; `all` for the ones not named. Repeatable.")
    ] = None,
    replicas: Annotated[list[str] | None, typer.Option(help="service=count. Repeatable.")] = None,
) -> None:
    """Start the suite on this machine.

    PostgreSQL, NATS, the services and, without OPENAI_API_KEY or
    OPENAI_BASE_URL, the scripted model; until Ctrl-C. Everything is kept
    in the folder of --data FOLDER or PAWL_DATA, by default .pawl.
    """
    given: Flags = context.obj
    try:
        options = read_options(os.environ, data=given.data, ports=port or (), replicas=replicas or ())
    except StartError as error:
        raise typer.Exit(fail(error, [])) from None
    raise typer.Exit(run_suite(options, agents.apply_folder))


app.command()(runs.run)
app.command()(chat.chat)
app.command()(runs.watch)
app.command()(runs.runs)
app.command()(conversations.fork)
app.command()(status.status)
app.command()(inbox.inbox)
app.command()(decisions.approve)
app.command()(runs.top_up)
app.command()(runs.cancel)
app.command()(undoing.undo)
app.command()(steps.steps)
app.command()(events.events)
app.command()(attention.attention)
app.command()(attention.resolve)
app.command()(attention.redrive)
app.command()(attention.end)
app.add_typer(audit.app)
tools = typer.Typer(invoke_without_command=True)
tools.callback()(lists.tools)
tools.command(add_help_option=False, context_settings=_ALL_PASSED_ON)(checks.check)
tools.command()(audit.stats)
app.add_typer(tools, name="tools")
model = typer.Typer(help="Look at model servers.", no_args_is_help=True)
model.callback()(lambda: None)
model.command("check", add_help_option=False, context_settings=_ALL_PASSED_ON)(checks.check_model)
app.add_typer(model, name="model")
app.add_typer(agents.app, name="agents")
app.command()(agents.apply)
app.add_typer(documents.commands)
app.add_typer(memory.commands)
app.add_typer(sources.app, name="sources")
app.command()(lists.notifications)
app.add_typer(channels.app, name="notify")
app.command()(completing.complete)
app.command()(whoami.whoami)
app.command()(browser.console)
app.add_typer(rules.app, name="rules")
app.add_typer(keys.app, name="keys")
app.add_typer(conversations.app, name="conversations")
app.add_typer(jobs.app, name="jobs")
app.add_typer(schedules.app, name="schedules")
app.add_typer(triggers.app, name="triggers")
app.command()(demo.demo)


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with those in front that say which suite, and as whom: they may stand behind the command."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    rest, flags, place = list(arguments), list[str](), 0
    while place < end:
        name, has_value, _ = rest[place].partition("=")
        length = 1 if rest[place] in _SWITCHES else 0 if name not in _FLAGS else 1 if has_value else 2
        flags += rest[place : place + length]
        del rest[place : place + length]
        end -= length
        place += not length
    return [*flags, *rest]


def main() -> None:
    """Run the command line. Ends the process; people see sentences, never a traceback."""
    try:
        app(args=flags_first(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001  # the last place that can say it in words
        fail(error, [])
        sys.exit(EXIT_IMPOSSIBLE)


if __name__ == "__main__":
    main()
