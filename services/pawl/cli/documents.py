"""`pawl documents`: what the model can list, read and search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import command
from pawl.cli.failure import CommandError
from pawl.cli.runs import show_table
from pawl.cli.target import Target
from pawl.tool.v1 import document_pb2

_TEXT_BYTES_MAX: Final = 1024 * 1024

commands = typer.Typer(
    name="documents", help="List, add and remove the documents that the model can read.", no_args_is_help=True
)

OfStore = Annotated[bool, typer.Option("--shared", help="The store's, for all its users, instead of your own.")]


@commands.command(name="list")
@command(asks="tools")
async def list_documents(target: Target, console: Console) -> None:
    """List your documents, and those of the store."""
    pages = target.pages(target.documents.ListDocuments, document_pb2.ListDocumentsRequest())
    found = [document async for page in pages for document in page.documents]
    if found or not console.is_terminal:
        show_table(console, ("owner", "bytes", "language", "changed", "name"), [_row(each) for each in found])
    else:
        console.print("There are no documents. Add one with `pawl documents add FILE`.")


@commands.command()
@command(asks="tools")
async def add(
    target: Target,
    console: Console,
    file: Annotated[Path, typer.Argument(help="A text in UTF-8, at most 1 MiB.")],
    *,
    name: Annotated[str, typer.Option(help="Its name; that of the file if not given.")] = "",
    language: Annotated[str, typer.Option(help="How its words are searched: simple, english, german and so on.")] = "",
    shared: OfStore = False,
) -> None:
    """Add a document, or replace the one of its name."""
    request = document_pb2.PutDocumentRequest(
        name=name or file.name, text=_read(file), language=language, owner=_owner(shared=shared)
    )
    put = await target.documents.PutDocument(request)
    done = "Added" if put.created else "Replaced"
    console.print(f"{done} {wording.one_line(put.document.name)}.", markup=False, soft_wrap=True)


@commands.command()
@command(asks="tools")
async def remove(
    target: Target,
    console: Console,
    name: Annotated[str, typer.Argument(help="Its name, as `pawl documents list` shows it.")],
    *,
    shared: OfStore = False,
) -> None:
    """Remove a document."""
    request = document_pb2.DeleteDocumentRequest(name=name, owner=_owner(shared=shared))
    await target.documents.DeleteDocument(request)
    console.print(f"Removed {wording.one_line(name)}.", markup=False, soft_wrap=True)


def _owner(*, shared: bool) -> document_pb2.DocumentOwner.ValueType:
    return document_pb2.DOCUMENT_OWNER_STORE if shared else document_pb2.DOCUMENT_OWNER_USER


def _read(file: Path) -> str:
    """Return the text of a file.

    Raises:
        CommandError: it cannot be read, is too large or no text in UTF-8.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.") from None
    if len(content) > _TEXT_BYTES_MAX:
        raise CommandError(f"{file} is over {_TEXT_BYTES_MAX} bytes. Cut it into several documents.")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise CommandError(f"{file} is not a text in UTF-8. Convert it first.") from None


def _row(document: document_pb2.Document) -> tuple[str, ...]:
    return (
        "store" if document.owner == document_pb2.DOCUMENT_OWNER_STORE else "you",
        str(document.text_bytes),
        wording.clean(document.language),
        wording.time_text(document.update_time),
        wording.one_line(document.name, 200),
    )
