"""Implements `pawl apply`, `pawl export` and PAWL_APPLY."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from pawl.agent.v1 import declaration_pb2
from pawl.chassis.ids import is_id
from pawl.cli import wording
from pawl.cli.command import command, say
from pawl.cli.contract import ask
from pawl.cli.declared import applying
from pawl.cli.declared.applying import ApplyError, FileSet
from pawl.cli.declared.kinds import NO_TOOL
from pawl.cli.failure import CommandError, explain
from pawl.client import AsyncClient
from pawl.errors import Conflict, PawlError, Unavailable

if TYPE_CHECKING:  # The launcher imports PostgreSQL and NATS clients.
    from pawl.launcher.options import ApplyOptions, SuiteOptions

# How long PAWL_APPLY waits for things that its files refer to, such as a worker's tools.
WAIT_SECONDS: Final = 600.0
_RETRY_SECONDS: Final = 3.0
_LEASE_SECONDS: Final = 30


@command()
async def apply(
    target: AsyncClient,
    console: Console,
    *,
    file: Annotated[
        list[Path],
        typer.Option(
            "--file", "-f", help="A folder with pawl.yaml, or a file or folder of resources.", show_default=False
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the changes without saving them.")] = False,
    draft: Annotated[
        bool, typer.Option("--draft", help="Save agents as drafts (draft/NAME) that only you can use.")
    ] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Delete the set's resources that have no file.")] = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Take over resources that were created manually or belong to another set.")
    ] = False,
) -> None:
    """Save the resources in files, and show the changes.

    A folder with pawl.yaml is a set: it has subfolders agents, sources,
    workflows, rules, schedules, triggers, channels and settings, and owns
    what its files declare.
    A file is YAML or JSON, with one resource or several separated by ---.
    Nothing changes if any file is invalid.
    """
    wanted = applying.read(file, adopt=adopt, prune=prune, dry_run=dry_run, drafts=draft)
    async for line in _leased(target, wanted):
        say(console, wording.clean(line))


@command()
async def export(
    target: AsyncClient,
    console: Console,
    *,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    name: Annotated[str, typer.Option("--name", help="Name of the set; default: the folder's name.")] = "",
) -> None:
    """Write the resources of the store and your own resources as files for `pawl apply`.

    Only the names of secrets are written.
    """
    name = name or folder.absolute().name
    if not is_id(name):
        raise CommandError(f"{name!r} must have 1 to 64 letters, digits, _ and -.", parameter="name")
    if folder.exists() and any(folder.iterdir()):
        raise CommandError(f"{folder} is not empty. Choose a new folder.", parameter="folder")
    async for line in applying.export(target, folder, name):
        say(console, wording.clean(line))


async def apply_at_start(
    options: SuiteOptions, *, prefix: str = "PAWL_APPLY: ", report: Callable[[str], None] = lambda _: None
) -> None:
    """Apply the set in PAWL_APPLY to a suite that has just started. Print the changes and errors.

    `report` is called after each attempt with the problem, which is empty if there is none.
    """
    if options.apply is not None:
        earlier, latest = set[str](), set[str]()

        def end_attempt(problem: str) -> None:
            earlier.update(latest)
            latest.clear()
            report(problem)

        async for line in _until_applied(options, options.apply, end_attempt):
            # Only lines of earlier attempts are omitted: two new resources may have equal lines.
            if not line.endswith(": unchanged") and line not in earlier:
                print(f"{prefix}{wording.clean(line)}", flush=True)
            latest.add(line)


async def _until_applied(
    options: SuiteOptions, asked: ApplyOptions, report: Callable[[str], None]
) -> AsyncIterator[str]:
    """Apply a set and yield the lines to print. Retry while something to which the files refer is missing."""
    clock = asyncio.get_running_loop().time
    end = clock() + WAIT_SECONDS
    while True:
        problem, may_pass = "", False
        try:
            wanted = await asyncio.to_thread(applying.read, [asked.folder])
            if not wanted.name:
                raise CommandError(f"{asked.folder} has no pawl.yaml")
            async with AsyncClient(data=options.data, store=asked.store, user=asked.user) as target:
                async for line in _leased(target, wanted):
                    yield line
                    may_pass = may_pass or line.endswith(NO_TOOL)
        except ApplyError as error:
            problem, may_pass = str(error), error.may_pass
        except Exception as error:  # noqa: BLE001  # users see a message, never a traceback
            problem, may_pass = explain(error, []), isinstance(error, Conflict | Unavailable)
        report(problem)
        if problem:
            yield problem
        if not may_pass:
            return
        if clock() >= end:
            yield "no more retries; fix the problems above, then run `pawl apply`"
            return
        await asyncio.sleep(_RETRY_SECONDS)


async def _leased(target: AsyncClient, wanted: FileSet) -> AsyncIterator[str]:
    """Apply files while this process holds the lease of their set. The lease is needed only to change resources.

    Raises:
        Conflict: Another process has the lease.
    """
    holder_id = secrets.token_hex(8)

    async def lease(seconds: int) -> None:
        await ask(target, declaration_pb2.LeaseSetRequest(set=wanted.name, holder_id=holder_id, lease_seconds=seconds))

    async def renew() -> None:
        while True:
            await asyncio.sleep(_LEASE_SECONDS / 3)
            with suppress(PawlError):
                await lease(_LEASE_SECONDS)

    if not wanted.name or wanted.dry_run:
        async for line in applying.apply(target, wanted):
            yield line
        return
    await lease(_LEASE_SECONDS)
    renewing = asyncio.create_task(renew())
    try:
        async for line in applying.apply(target, wanted):
            yield line
    finally:
        renewing.cancel()
        with suppress(PawlError):
            await lease(0)
