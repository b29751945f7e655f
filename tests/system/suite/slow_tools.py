"""Tools whose effect can be counted from outside, slow enough to be interrupted."""

from __future__ import annotations

import asyncio

from pawl.tools import Category, EffectClass, ToolContext, tool
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
