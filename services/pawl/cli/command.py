"""The parts that all commands have in common: the suite they talk to, and how they end."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

import typer
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from pawl.chassis import strict_json
from pawl.cli.failure import CommandError, explain
from pawl.client import AsyncClient, forms
from pawl.client.target import Asks
from pawl.errors import InvalidJson

EXIT_UNSUCCESSFUL: Final = 1
"""The command worked, and what it did or watched did not come to a good end."""
EXIT_IMPOSSIBLE: Final = 2
"""The command could not be carried out; a sentence on standard error says why."""
EXIT_INTERRUPTED: Final = 130

FOLLOW_SECONDS: Final = 30.0
"""The time for which a command that follows something asks again while no service answers."""

Flags: TypeAlias = dict[str, Any]
"""The flags that were given before the command: arguments of AsyncClient."""

_JSON_BYTES_MAX: Final = 1024 * 1024
_DURATION: Final = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def command(*, asks: Asks = "agent") -> Callable[[Callable[..., Awaitable[int | None]]], Callable[..., None]]:
    """Make a command for typer of a coroutine function, whose first parameters are the target and the console.

    What it returns is the exit code; None is 0.
    """

    def made(work: Callable[..., Awaitable[int | None]]) -> Callable[..., None]:
        @functools.wraps(work)
        def run(context: typer.Context, **options: Any) -> None:
            if context.invoked_subcommand is None:  # Else the work is that of a command of this one.
                raise typer.Exit(_perform(context.obj, functools.partial(work, **options), asks, _typed(context)))

        # Typer reads what it is to ask for from here.
        _, _, *options = inspect.signature(work, eval_str=True).parameters.values()
        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        vars(run)["__signature__"] = inspect.Signature([context, *options])
        return run

    return made


def _typed(context: typer.Context) -> dict[str, str]:
    """Return what people type for each parameter of a command: `--every`, or `run_id` as its usage has it."""
    return {each.name: each.opts[0] for each in context.command.params if each.name}


def _perform(
    flags: Flags, work: Callable[[AsyncClient, Console], Awaitable[int | None]], asks: Asks, typed: Mapping[str, str]
) -> int:
    """Run a command against the suite that the flags name; returns its exit code."""
    console = Console(highlight=False)
    addresses: list[str] = []

    async def run() -> int | None:
        async with AsyncClient(**flags, retry_seconds=0.0) as target:
            addresses.extend(getattr(target, asks))
            return await work(target, console)

    try:
        return asyncio.run(run()) or 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough. Nothing more can be written, at exit either.
        sys.stdout = None
        return EXIT_UNSUCCESSFUL
    except Exception as error:  # noqa: BLE001  # people get a sentence, never a traceback
        return fail(error, addresses, asks, typed)


def follows(target: AsyncClient) -> None:
    """Have a command that follows something survive a restart of the suite; others fail at once."""
    target.retry_seconds = FOLLOW_SECONDS


def seconds_of(duration: str, parameter: str) -> int:
    """Return how long a time like 30m, 2h or 7d is, which was given for a parameter of the command.

    Raises:
        CommandError: that is no time.
    """
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise CommandError(f"{duration!r} is no duration like 30m, 2h or 7d.", parameter=parameter)
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def time_of(text: str, parameter: str) -> Timestamp:
    """Return the moment of `2026-01-31T09:00`, in the zone of this machine unless it names another one.

    Raises:
        CommandError: it is no moment; the parameter of the command is named.
    """
    moment = Timestamp()
    try:
        moment.FromDatetime(datetime.fromisoformat(text).astimezone(UTC))
    except (ValueError, OverflowError):
        raise CommandError(f"{text!r} is no time like 2026-01-31T09:00.", parameter=parameter) from None
    return moment


def labels_of(texts: Sequence[str] | None, parameter: str = "labels") -> dict[str, str]:
    """Return labels that were given as key=value.

    Raises:
        CommandError: one is not of this form, or a key comes twice.
    """
    labels: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (key and equals) or key in labels:
            raise CommandError(f"{text!r} is not of the form key=value, or its key comes twice.", parameter=parameter)
        labels[key] = value
    return labels


def json_of(text: str | bytes, what: str, hint: str = "", *, bytes_max: int = _JSON_BYTES_MAX) -> Any:
    """Return the JSON value that was given as `what`.

    Raises:
        CommandError: it is no JSON; the message ends with the hint.
    """
    try:
        return strict_json.loads(text.encode() if isinstance(text, str) else text, bytes_max=bytes_max)
    except InvalidJson as error:
        raise CommandError(f"{what} is not JSON: {error.message}. {hint}".rstrip()) from None


def object_of(text: str | bytes, what: str) -> dict[str, Any]:
    """Return the JSON object that was given as `what`.

    Raises:
        CommandError: it is none.
    """
    found = json_of(text, what)
    if not isinstance(found, dict):
        raise CommandError(f'{what} is a JSON object, like {{"n": 1}}.')
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tell people of a file that the body cannot read.

    Raises:
        CommandError: it cannot.
    """
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from None


def read_file(path: Path, bytes_max: int = -1) -> bytes:
    """Return what a file has, the first `bytes_max` bytes of it if that is given.

    Raises:
        CommandError: it cannot be read.
    """
    with reading(path):
        return forms.read_file(path, bytes_max)


def secret_of(given: str) -> str:
    """Return what is secret: with `-` a line of standard input, with `@FILE` what a file has, else what is given.

    The arguments of a program can be seen by everybody on its machine.

    Raises:
        CommandError: the file cannot be read, or nothing is there.
    """
    if given == "-":
        found = sys.stdin.readline().strip()
    elif given.startswith("@"):
        found = read_file(Path(given[1:])).decode(errors="replace").strip()
    else:
        return given
    if not found:
        raise CommandError(f"There is nothing in {'standard input' if given == '-' else given[1:]}.")
    return found


WithLabels = Annotated[list[str] | None, typer.Option("--label", help="Only with this label: key=value. Repeatable.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether you are sure; needed without a terminal.")]


def is_sure(question: str, *, yes: bool) -> bool:
    """Return whether the person means it, who is asked unless `yes` says so.

    Raises:
        CommandError: nobody can be asked, because there is no terminal.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise CommandError("Nobody can be asked here whether you are sure. Add --yes if you are.")
    return typer.confirm(question)


def fail(
    error: Exception, addresses: list[str], asks: Asks = "agent", typed: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Tell on standard error why a command could not be carried out; returns the exit code."""
    told = explain(error, addresses, asks, typed)
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(told)
    return EXIT_IMPOSSIBLE
