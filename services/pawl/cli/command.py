"""The parts that all commands have in common: the suite they talk to, and how they end."""

from __future__ import annotations

import asyncio
import functools
import inspect
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


_GAP: Final = 2
_LAST_WIDTH_MIN: Final = 8
_PART: Final = re.compile(r"\n|[^\S\n]+|\S+")
_HELD_CELLS_MAX: Final = 30
"""The longest word that is kept whole. A longer one is a link, or text in a script without blanks."""


def say(console: Console, lines: str | Iterable[str], style: str = "") -> None:
    """Print lines as they are; the terminal breaks those that are too long, so that they can be copied."""
    for line in [lines] if isinstance(lines, str) else lines:
        console.print(line, style=style, markup=False, soft_wrap=True)


def show_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows: a table on a terminal, lines with tabs elsewhere, for other programs.

    On a terminal that is too narrow each cell has a line of its own, so that no id is cut.
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
    """Takes pieces of a text and gives what is to be printed of it, with line breaks before words that do not fit.

    The last word is kept back until it is whole, and blanks until a word follows them.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._blanks = ""
        self._word = ""

    def take(self, text: str) -> str:
        """Return what can be printed after the next piece."""
        parts = _PART.findall(self._word + text)
        self._word = ""
        if parts and not parts[-1].isspace() and cell_len(parts[-1]) < _HELD_CELLS_MAX:
            self._word = parts.pop()
        return "".join(map(self._placed, parts))

    def flush(self) -> str:
        """Return what was kept back; the next piece begins a new line."""
        word, self._word = self._word, ""
        rest = self._placed(word) if word else ""
        self._column, self._blanks = 0, ""
        return rest

    def _placed(self, part: str) -> str:
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
    """Reads a line only when asked, so that an editor can have the keyboard in between.

    Its thread ends with the process: a read of a terminal cannot be cancelled.
    """

    def __init__(self, source: TextIO | None = None) -> None:
        self._source = source or sys.stdin
        self._wanted: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[str | None]]] = (
            queue.SimpleQueue()
        )
        self._pending: asyncio.Future[str | None] | None = None
        threading.Thread(target=self._read, name="keyboard", daemon=True).start()

    async def line(self) -> str | None:
        """Return the next line without its end; None at the end of the input.

        Safe to cancel: the line that was asked for is given to the next caller.
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
                return  # The program is over.


def _resolve(future: asyncio.Future[str | None], line: str | None) -> None:
    if not future.done():
        future.set_result(line)
