from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import command, reading, say
from pawl.cli.contract import Option, listing
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.tool.v1 import file_pb2

_PIECE_BYTES: Final = 512 * 1024
_TRANSFER_SECONDS: Final = 6 * 3600.0

files = typer.Typer(help="List the store's files, and copy them in and out.", no_args_is_help=True)
files.command("list")(
    listing(
        file_pb2.ListFilesRequest(),
        {"folder": Option(path="path", is_optional=True)},
        "List the store's files, or those of a folder.",
        {
            "kind": "kind",
            "bytes": lambda file: str(file.size_bytes) if file.kind == file_pb2.FILE_KIND_FILE else "",
            "changed": "update_time",
            "name": "name",
        },
        none="There are no files. Add one with `pawl files put FILE`.",
    )
)


@files.command()
@command(service="tools")
async def put(
    target: AsyncClient,
    console: Console,
    file: Annotated[Path, typer.Argument(help="A file of at most 1 GiB.")],
    path: Annotated[str, typer.Argument(help="Path in the store's folder. Default: the file's name.")] = "",
) -> None:
    """Copy a file into the store's folder, replacing the file at the path."""
    path = path or file.name
    with reading(file), file.open("rb") as source:
        made = await target.files.PutFile(_pieces(source, path), timeout=_TRANSFER_SECONDS)
    say(console, f"Put {wording.one_line(path)}, {made.size_bytes} bytes.")


@files.command()
@command(service="tools")
async def get(
    target: AsyncClient,
    console: Console,
    path: Annotated[str, typer.Argument(help="Path in the store's folder.")],
    file: Annotated[Path | None, typer.Argument(help="The file to create. Default: the path's name.")] = None,
) -> None:
    """Copy a file out of the store's folder. Never replaces a file."""
    made = file or Path(path.rpartition("/")[2])
    part = made.with_name(f".{made.name}.{os.getpid()}.part")
    stream = target.files.GetFile(file_pb2.GetFileRequest(path=path), timeout=_TRANSFER_SECONDS)
    try:
        if made.exists():
            raise FileExistsError
        size = 0
        with part.open("xb") as output:
            async for piece in stream:
                size += piece.size_bytes
                output.write(piece.content)
            if output.tell() != size:
                raise CommandError(f"Only {output.tell()} of {size} bytes arrived. Try again.")
        # Unlike a rename, a link never replaces a file.
        made.hardlink_to(part)
    except FileExistsError:
        raise CommandError(f"{made} already exists. Choose another file.") from None
    except OSError as error:
        raise CommandError(f"{made} cannot be written: {error.strerror}.") from None
    finally:
        stream.cancel()
        part.unlink(missing_ok=True)
    say(console, f"Got {made}, {size} bytes.")


async def _pieces(source: BinaryIO, path: str) -> AsyncIterator[Any]:
    yield file_pb2.PutFileRequest(path=path)
    while content := source.read(_PIECE_BYTES):
        yield file_pb2.PutFileRequest(content=content)
