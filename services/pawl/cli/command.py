"""Shared parts of commands: connecting to the suite, parsing values, printing output and setting exit codes."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import queue
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, TextIO, TypeAlias

import typer
from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from pawl.chassis import strict_json
from pawl.chassis.process.tasks import shield
from pawl.cli.failure import CommandError, explain
from pawl.client import AsyncClient, forms
from pawl.client.target import Service
from pawl.errors import InvalidJson

# The command ran, but its operation or the run that it watched did not succeed.
EXIT_UNSUCCESSFUL: Final = 1
# The command could not run. Standard error says why.
EXIT_IMPOSSIBLE: Final = 2
EXIT_INTERRUPTED: Final = 130

# How long commands that keep watching retry while no service responds.
FOLLOW_SECONDS: Final = 30.0

# Flags before the command, as arguments of AsyncClient.
Flags: TypeAlias = dict[str, Any]

_JSON_BYTES_MAX: Final = 1024 * 1024
_DURATION: Final = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def command(*, service: Service = "agent") -> Callable[[Callable[..., Awaitable[int | None]]], Callable[..., None]]:
    """Turn a coroutine function into a typer command. Its first parameters are the client and the console.

    The function's result is the exit code. None means 0.
    """

    def made(work: Callable[..., Awaitable[int | None]]) -> Callable[..., None]:
        @functools.wraps(work)
        def run(context: typer.Context, **options: Any) -> None:
            if context.invoked_subcommand is None:  # Otherwise, a subcommand does the work.
                raise typer.Exit(_perform(context, work, options, service))

        # Typer reads the parameters from the signature.
        _, _, *options = inspect.signature(work, eval_str=True).parameters.values()
        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        vars(run)["__signature__"] = inspect.Signature([context, *options])
        return run

    return made


def _option_names(context: typer.Context) -> dict[str, str]:
    """Return the name of each parameter as users type it: `--every` for an option, `run_id` for an argument."""
    return {each.name: each.opts[0] for each in context.command.params if each.name}


def _perform(
    context: typer.Context, work: Callable[..., Awaitable[int | None]], options: dict[str, Any], service: Service
) -> int:
    console = Console(highlight=False)
    addresses: list[str] = []

    async def run() -> int | None:
        store = _place_store(context, options)
        async with AsyncClient(**{**context.obj, "store": store}, retry_seconds=0.0) as target:
            addresses.extend(getattr(target, service))
            return await work(target, console, **options)

    try:
        return asyncio.run(run()) or 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe. Writing would fail again at exit.
        sys.stdout = None
        return EXIT_UNSUCCESSFUL
    except Exception as error:  # noqa: BLE001  # users see a message, never a traceback
        return fail(error, addresses, service, _option_names(context))


def _place_store(context: typer.Context, options: dict[str, Any]) -> str | None:
    """Return the store in which to act, and put --store into the command's own option if it has one.

    Return None if an API key is used and the command has its own --store option. The key determines the store in which
    to act, and the request contains the option's value.
    """
    own = next((each for each in context.command.params if "--store" in each.opts), None)
    given = options[own.name] if own and own.name else None
    stores = [*(context.obj["store"] or ()), *((given or ()) if own and own.multiple else filter(None, [given]))]
    if len(stores) > 1 and not (own and own.multiple):
        raise CommandError("Specify --store only once.")
    store = stores[0] if stores else None
    if own and own.name:
        options[own.name] = stores if own.multiple else store
    return None if own and os.environ.get("PAWL_API_KEY") else store


def follows(target: AsyncClient) -> None:
    """Let a watching command reconnect after a restart of the suite. Other commands fail immediately."""
    target.retry_seconds = FOLLOW_SECONDS


def seconds_of(duration: str, parameter: str) -> int:
    """Parse a duration such as 30m, 2h or 7d into seconds.

    Raises:
        CommandError: The duration is invalid. The error names the parameter.
    """
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise CommandError(f"{duration!r} is not a duration like 30m, 2h or 7d.", parameter=parameter)
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def time_of(text: str, parameter: str) -> Timestamp:
    """Parse a time such as `2026-01-31T09:00`, in the local time zone unless it has an offset.

    Raises:
        CommandError: The time is invalid. The error names the parameter.
    """
    moment = Timestamp()
    try:
        moment.FromDatetime(datetime.fromisoformat(text).astimezone(UTC))
    except (ValueError, OverflowError):
        raise CommandError(f"{text!r} is not a time like 2026-01-31T09:00.", parameter=parameter) from None
    return moment


def labels_of(texts: Sequence[str] | None, parameter: str = "labels") -> dict[str, str]:
    """Parse key=value labels.

    Raises:
        CommandError: A label does not have this form, or a key is repeated.
    """
    labels: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (key and equals) or key in labels:
            raise CommandError(f"{text!r} must be key=value, with each key at most once.", parameter=parameter)
        labels[key] = value
    return labels


def json_of(text: str | bytes, what: str, hint: str = "", *, bytes_max: int = _JSON_BYTES_MAX) -> Any:
    """Parse JSON. `what` describes the text in error messages.

    Raises:
        CommandError: The text is not JSON. The message ends with the hint.
    """
    try:
        return strict_json.loads(text.encode() if isinstance(text, str) else text, bytes_max=bytes_max)
    except InvalidJson as error:
        raise CommandError(f"{what} is not JSON: {error.message}. {hint}".rstrip()) from None


def object_of(text: str | bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object. `what` describes the text in error messages.

    Raises:
        CommandError: The text is not a JSON object.
    """
    found = json_of(text, what)
    if not isinstance(found, dict):
        raise CommandError(f'{what} must be a JSON object, like {{"n": 1}}.')
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors from reading a file into messages for the user.

    Raises:
        CommandError: The block raised OSError.
    """
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from None


def read_file(path: Path, bytes_max: int = -1) -> bytes:
    """Return a file's content, or its first `bytes_max` bytes.

    Raises:
        CommandError: The file cannot be read.
    """
    with reading(path):
        return forms.read_file(path, bytes_max)


def secret_of(given: str) -> str:
    """Read a secret: `-` from standard input, and `@FILE` from a file. Anything else is the secret itself.

    Avoid the last form: every user of a machine can see the arguments of running programs.

    Raises:
        CommandError: The file cannot be read, or the secret is empty.
    """
    if given == "-":
        found = sys.stdin.readline().strip()
    elif given.startswith("@"):
        found = read_file(Path(given[1:])).decode(errors="replace").strip()
    else:
        return given
    if not found:
        raise CommandError(f"{'Standard input' if given == '-' else given[1:]} is empty.")
    return found


WithLabels = Annotated[list[str] | None, typer.Option("--label", help="Only with this label: key=value. Repeatable.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation; required without a terminal.")]


def confirm(question: str, *, yes: bool) -> bool:
    """Return whether the user confirms. Do not ask if `yes` is set.

    Raises:
        CommandError: There is no terminal on which to ask.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise CommandError("There is no terminal to ask for confirmation. Add --yes to confirm.")
    return typer.confirm(question)


def fail(
    error: Exception, addresses: list[str], service: Service = "agent", typed: Mapping[str, str] = MappingProxyType({})
) -> int:
    message = explain(error, addresses, service, typed)
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(message)
    return EXIT_IMPOSSIBLE


_GAP: Final = 2
_LAST_WIDTH_MIN: Final = 8
_PART: Final = re.compile(r"\n|[^\S\n]+|\S+")
# Longest word that is kept in one piece. Longer ones are links, or text in a script without spaces.
_HELD_CELLS_MAX: Final = 30


def say(console: Console, lines: str | Iterable[str], style: str = "") -> None:
    """Print lines without breaking them, so that they can be copied. The terminal wraps them."""
    for line in [lines] if isinstance(lines, str) else lines:
        console.print(line, style=style, markup=False, soft_wrap=True)


def show_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as a table on a terminal, and as tab-separated lines elsewhere.

    On a narrow terminal, each cell gets its own line, so that no id is truncated.
    """
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
        return
    widths = (max(map(cell_len, column)) for column in list(zip(headings, *rows, strict=True))[:-1])
    if rows and sum(width + _GAP for width in widths) + _LAST_WIDTH_MIN > console.width:
        for row in rows:
            lines = (f"  {heading}: {cell}" for heading, cell in zip(headings[1:], row[1:], strict=True) if cell)
            say(console, [row[0], *lines])
        return
    table = Table(box=None, pad_edge=False, expand=True)
    for heading in headings[:-1]:
        table.add_column(heading, no_wrap=True)
    table.add_column(headings[-1], no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(table)


class WordWrap:
    """Wraps streamed text at word boundaries.

    The last word is held back until it is complete, and spaces are held back until a word follows them.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._blanks = ""
        self._word = ""

    def take(self, text: str) -> str:
        """Add a piece of text, and return the text to print."""
        parts = _PART.findall(self._word + text)
        self._word = ""
        if parts and not parts[-1].isspace() and cell_len(parts[-1]) < _HELD_CELLS_MAX:
            self._word = parts.pop()
        return "".join(map(self._wrapped, parts))

    def flush(self) -> str:
        """Return the text that was held back. The next piece starts a new line."""
        word, self._word = self._word, ""
        rest = self._wrapped(word) if word else ""
        self._column, self._blanks = 0, ""
        return rest

    def _wrapped(self, part: str) -> str:
        if part == "\n":
            self._column, self._blanks = 0, ""
            return part
        if part.isspace():
            self._blanks += part.expandtabs(4)
            return ""
        before, self._blanks = self._blanks, ""
        cells = cell_len(before) + cell_len(part)
        if self._column and self._column + cells > self._width:
            before, cells = "\n", cell_len(part)
            self._column = 0
        self._column += cells
        if self._column > self._width:
            self._column %= self._width
        return before + part


class LineReader:
    """Reads a line only when needed, so that an editor can use the keyboard between lines.

    Reading from a terminal cannot be cancelled, so the thread ends only when the process does.
    """

    def __init__(self, source: TextIO | None = None) -> None:
        self._source = source or sys.stdin
        self._wanted: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[str | None]]] = (
            queue.SimpleQueue()
        )
        self._pending: asyncio.Future[str | None] | None = None
        threading.Thread(target=self._read, name="keyboard", daemon=True).start()

    async def line(self) -> str | None:
        """Return the next line without its line break, or None at the end of the input.

        Safe to cancel. The next caller then gets the line.
        """
        if self._pending is None:
            loop = asyncio.get_running_loop()
            self._pending = loop.create_future()
            self._wanted.put((loop, self._pending))
        line = await shield(self._pending)
        self._pending = None
        return line

    def _read(self) -> None:
        while True:
            loop, future = self._wanted.get()
            try:
                text = self._source.readline()
            except (OSError, ValueError):
                text = ""
            line = text.rstrip("\r\n") if text else None
            try:
                loop.call_soon_threadsafe(_resolve, future, line)
            except RuntimeError:
                return  # The event loop is closed.


def _resolve(future: asyncio.Future[str | None], line: str | None) -> None:
    if not future.done():
        future.set_result(line)
