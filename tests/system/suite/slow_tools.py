"""Slow and reversible tools with effects that tests can count."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from pawl.tools import Category, EffectClass, Inverse, Reversible, ToolContext, ToolError, tool


def note(path: str, line: str) -> None:
    """Add a line to a file of a test."""
    with effect_file(path).open("a", encoding="utf-8") as lines:
        lines.write(f"{line}\n")


async def _act(path: str, seconds: float) -> str:
    note(path, "done")
    await asyncio.sleep(seconds)
    return "finished"


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
async def act_once(path: str, seconds: float) -> str:
    """Add a line to a file, then take a while. Must not be repeated."""
    return await _act(path, seconds)


@tool(category=Category.SENSITIVE, effect=EffectClass.AT_MOST_ONCE)
async def pay_once(path: str, seconds: float) -> str:
    """Add a line to a file, then take a while. Must not be repeated, and needs an approval."""
    return await _act(path, seconds)


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
async def hold_once(path: str) -> str:
    """Add a line to a file, then wait for the test. Must not be repeated."""
    note(path, "done")
    await held(path)
    return "finished"


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, reports={"progress": [50]})
async def scrape(path: str, pages: int, context: ToolContext) -> str:
    """Add a line to a file for each page, and report the progress."""
    for page in range(1, pages + 1):
        note(path, f"page {page}")
        context.progress(page / pages, f"page {page} of {pages}")
        await asyncio.sleep(0.1)
    return "scraped"


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def look_up_price(path: str) -> dict[str, float]:
    """Return a price, which is the number in a file."""
    return {"price": float(effect_file(path).read_text(encoding="utf-8"))}


def effect_file(path: str) -> Path:
    """Return a file of a test. Other paths are refused, because some tests call all tools with harmful arguments."""
    file = Path(path)
    if Path(tempfile.gettempdir()).resolve() not in file.resolve().parents:
        raise ToolError(f"{path} is not a file for effects")
    return file


async def held(path: str) -> None:
    """Create a file `.held` to report that a tool waits, and wait until the test creates `.go`."""
    file = effect_file(path)
    file.with_suffix(".held").touch()
    await exists(file.with_suffix(".go"))


async def exists(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.02)


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
def put_line(path: str, line: str, holds: bool = False) -> Reversible:
    """Add a line to a file. With `holds`, its inverse waits for the test."""
    note(path, line)
    arguments = {"path": path, "line": line, "holds": holds}
    inverse = Inverse(tool_name="take_line", arguments=arguments, summary=f"Take {line!r} out")
    return Reversible(value={"put": line}, inverse=inverse)


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
async def take_line(path: str, line: str, holds: bool = False) -> str:
    """Remove the last line of a file if it equals this one."""
    if holds:
        await held(path)
    lines = effect_file(path).read_text(encoding="utf-8").splitlines()
    if not lines or lines[-1] != line:
        raise ToolError(f"the last line is not {line!r} any more")
    effect_file(path).write_text("".join(f"{each}\n" for each in lines[:-1]), encoding="utf-8")
    return "taken"


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, reports={"progress": [50]})
async def crawl(path: str, context: ToolContext) -> str:
    """Report the progress that a test writes to a file, until it is complete."""
    while (fraction := float(effect_file(path).read_text(encoding="utf-8"))) < 1:
        # Report repeatedly, as real tools do: a report is lost while the job's run has no worker.
        context.progress(fraction, f"{fraction:.0%} of the pages")
        await asyncio.sleep(0.2)
    return "crawled"
