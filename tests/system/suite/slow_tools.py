"""Tools whose effect can be counted from outside, slow enough to be interrupted."""

from __future__ import annotations

import asyncio

from pawl.tools import Awaited, Category, EffectClass, ToolContext, tool
from tests.system.suite.effect_file import effect_file


async def _act(path: str, seconds: float) -> str:
    with effect_file(path).open("a", encoding="utf-8") as effects:  # one line
        effects.write("done\n")
    await asyncio.sleep(seconds)
    return "finished"


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
async def act_once(path: str, seconds: float) -> str:
    """Add a line to a file, then take a while. Must not be repeated."""
    return await _act(path, seconds)


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def act_again(path: str, seconds: float) -> str:
    """Add a line to a file, then take a while. May be repeated."""
    return await _act(path, seconds)


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
async def count_up(path: str, seconds: float, context: ToolContext) -> str:
    """Add five lines to a file, with so much time between. Goes on where it was."""
    number = context.last_checkpoint or 0
    assert isinstance(number, int)
    for step in range(number, 5):
        with effect_file(path).open("a", encoding="utf-8") as steps:
            steps.write(f"step {step}\n")
        await context.checkpoint(step + 1)
        await asyncio.sleep(seconds)
    return "counted"


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def look_up_price(path: str) -> dict[str, float]:
    """Say what something costs: the number in a file."""
    return {"price": float(effect_file(path).read_text(encoding="utf-8"))}


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def wait_for_file(path: str) -> str:
    """Wait until there is a file."""
    await _exists(path)
    return "it is there"


async def _exists(path: str) -> None:
    while not effect_file(path).exists():  # nothing tells of it
        await asyncio.sleep(0.02)


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
async def take_price(path: str) -> dict[str, float]:
    """Wait until something has a price, the number in a file, and take the file away."""
    await _exists(path)
    price = {"price": float(effect_file(path).read_text(encoding="utf-8"))}
    effect_file(path).unlink()
    return price


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, heartbeat_seconds=5.0)
async def stall(path: str, seconds: float, context: ToolContext) -> str:
    """Get stuck the first time, and go on the second."""
    with effect_file(path).open("a", encoding="utf-8") as begins:  # one line
        begins.write("done\n")
    if context.last_checkpoint is None:
        await context.checkpoint("stuck")
        await asyncio.sleep(3600)
    await asyncio.sleep(seconds)
    return f"not {context.last_checkpoint} any more"


@tool(category=Category.SENSITIVE, effect=EffectClass.AT_MOST_ONCE)
async def pay_once(path: str, seconds: float) -> str:
    """Add a line to a file, then take a while. Must not be repeated, and needs an approval."""
    return await _act(path, seconds)


async def _order(path: str, context: ToolContext) -> str:
    colour = await context.ask("Which colour?", options=["red", "blue"])
    size = await context.ask("Which size?")
    with effect_file(path).open("a", encoding="utf-8") as orders:  # one line
        orders.write(f"{colour} {size}\n")
    return f"{colour} {size}"


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
async def order_once(path: str, context: ToolContext) -> str:
    """Ask what to order, then add it to a file. Must not be repeated."""
    return await _order(path, context)


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
async def order_again(path: str, context: ToolContext) -> str:
    """Ask what to order, then add it to a file. May be repeated."""
    return await _order(path, context)


@tool(category=Category.SAFE)
async def print_poster(path: str, context: ToolContext) -> Awaited:
    """Hand a poster to a print shop, which says later how it went: writes down where the answer goes."""
    token = await context.completion_token()
    with effect_file(path).open("a", encoding="utf-8") as orders:  # one line
        orders.write(f"{token.url}\n")
    return Awaited()
