"""`pawl documents`: what the model can list, read and search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import command, reading
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.tool.v1 import document_pb2

commands = typer.Typer(
    name="documents", help="List, add and remove the documents that the model can read.", no_args_is_help=True
)

OfStore = Annotated[bool, typer.Option("--shared", help="The store's, for all its users, instead of your own.")]


@commands.command(name="list")
@command(asks="tools")
async def list_documents(target: AsyncClient, console: Console) -> None:
    """List your documents, and those of the store."""
    found = [document async for document in target.documents()]
    if found or not console.is_terminal:
        show_table(console, ("owner", "bytes", "language", "changed", "name"), [_row(each) for each in found])
    else:
        console.print("There are no documents. Add one with `pawl documents add FILE`.")


@commands.command()
@command(asks="tools")
async def add(
    target: AsyncClient,
    console: Console,
    file: Annotated[Path, typer.Argument(help="A text in UTF-8, at most 1 MiB.")],
    *,
    name: Annotated[str, typer.Option(help="Its name; that of the file if not given.")] = "",
    language: Annotated[str, typer.Option(help="How its words are searched: simple, english, german and so on.")] = "",
    shared: OfStore = False,
) -> None:
    """Add a document, or replace the one of its name."""
    with reading(file):
        put = await target.upload(file, name=name, language=language, shared=shared)
    done = "Added" if put.created else "Replaced"
    console.print(f"{done} {wording.one_line(put.document.name)}.", markup=False, soft_wrap=True)


@commands.command()
@command(asks="tools")
async def remove(
    target: AsyncClient,
    console: Console,
    name: Annotated[str, typer.Argument(help="Its name, as `pawl documents list` shows it.")],
    *,
    shared: OfStore = False,
) -> None:
    """Remove a document."""
    await target.delete_document(name, shared=shared)
    console.print(f"Removed {wording.one_line(name)}.", markup=False, soft_wrap=True)


def _row(document: document_pb2.Document) -> tuple[str, ...]:
    return (
        "store" if document.owner == document_pb2.DOCUMENT_OWNER_STORE else "you",
        str(document.text_bytes),
        wording.clean(document.language),
        wording.time_text(document.update_time),
        wording.one_line(document.name, 200),
    )
