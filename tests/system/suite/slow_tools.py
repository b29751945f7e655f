"""Tools whose effect can be counted from outside, which take as long as a test wants."""

from __future__ import annotations

import asyncio

from pawl.tools import Awaited, Category, EffectClass, ToolContext, tool
from tests.system.suite.effect_file import effect_file, exists, held


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


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def hold_again(path: str) -> str:
    """Add a line to a file, then wait for the test. May be repeated."""
    note(path, "done")
    await held(path)
    return "finished"


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
async def count_up(path: str, context: ToolContext) -> str:
    """Add five lines to a file, and wait for the test after the third. Resumes from its checkpoint."""
    number = context.last_checkpoint or 0
    assert isinstance(number, int)
    for step in range(number, 5):
        if step == 3:
            await held(path)
        note(path, f"step {step}")
        await context.checkpoint(step + 1)
    return "counted"


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def look_up_price(path: str) -> dict[str, float]:
    """Say what something costs: the number in a file."""
    return {"price": float(effect_file(path).read_text(encoding="utf-8"))}


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def wait_for_file(path: str) -> str:
    """Wait until there is a file."""
    await exists(effect_file(path))
    return "it is there"


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
async def order_once(path: str, context: ToolContext) -> str:
    """Ask what to order, then add it to a file. Must not be repeated."""
    colour = await context.ask("Which colour?", options=["red", "blue"])
    size = await context.ask("Which size?")
    note(path, f"{colour} {size}")
    return f"{colour} {size}"


@tool(category=Category.SAFE)
async def print_poster(path: str, context: ToolContext) -> Awaited:
    """Hand a poster to a print shop, which says later how it went: writes down where the answer goes."""
    note(path, (await context.completion_token()).url)
    return Awaited()
