"""`pawl demo`: one conversation through the whole suite, with a crash in the middle, checked from the ledger."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.chassis import logs
from pawl.cli.command import EXIT_IMPOSSIBLE, EXIT_INTERRUPTED, EXIT_UNSUCCESSFUL, fail
from pawl.cli.demo_ledger import read_ledger, verdicts
from pawl.cli.demo_screen import Screen
from pawl.cli.demo_story import Story
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite

_SECONDS_MAX: Final = 120.0
_REPLICAS: Final = 2


def demo(
    *, keep: Annotated[bool, typer.Option("--keep", help="Keep the data folder, with its logs, in any case.")] = False
) -> None:
    """Play one conversation, a crash included.

    Starts a suite of its own in a temporary folder and on free ports, plays the
    conversation, and checks from the ledger that everything really happened.
    Exit code 0 only if it did.
    """
    folder = Path(tempfile.mkdtemp(prefix="pawl-demo-"))
    code = EXIT_UNSUCCESSFUL
    try:
        code = asyncio.run(_play(folder, Screen(Console(highlight=False))))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except TimeoutError:
        code = fail(CommandError(f"The demo was not over after {_SECONDS_MAX:g} s."), [])
    except Exception as error:  # noqa: BLE001  # people get a sentence, never a traceback
        code = fail(error, [])
    if keep or code in {EXIT_UNSUCCESSFUL, EXIT_IMPOSSIBLE}:
        print(f"Data and logs are kept in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(code)


async def _play(folder: Path, screen: Screen) -> int:
    started = time.monotonic()
    logs.configure(service="demo", instance_id="demo", level="error", log_format="auto")
    options = SuiteOptions(data=folder, replicas={"agent-loop": _REPLICAS})
    screen.line(f"Starting PostgreSQL, NATS, a scripted model and the services in {folder} ...")
    async with asyncio.timeout(_SECONDS_MAX), Suite(options) as suite:
        target = AsyncClient(data=folder, environment={})
        screen.line(
            f"Ready after {time.monotonic() - started:.1f} s. The agent-loop runs twice: {', '.join(target.agent)}"
        )
        async with target:
            story = Story(suite, target, screen)
            await story.play()
            ledger = await read_ledger(target, story.evidence.run_id, suite.folder.outbox)
        story.evidence.seconds = time.monotonic() - started
        screen.line()
        screen.line("Read again from the ledger:")
        found = verdicts(ledger, story.evidence)
        for name, good, detail in found:
            screen.verdict(name, detail, good=good)
    missing = [name for name, good, _ in found if not good]
    screen.line(
        f"{len(missing)} of {len(found)} did not happen: {'; '.join(missing)}" if missing else "All of it happened."
    )
    if not missing:
        screen.line("Next: `make up`, and in another terminal `.venv/bin/pawl console`, which opens a browser.")
    return EXIT_UNSUCCESSFUL if missing else 0
