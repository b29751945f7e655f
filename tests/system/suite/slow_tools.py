"""Tools with effects that can be counted from outside, which take as long as a test wants."""

from __future__ import annotations

import asyncio

from pawl.tools import Category, EffectClass, tool
from tests.system.suite.effect_file import effect_file, held


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
async def look_up_price(path: str) -> dict[str, float]:
    """Return a price, which is the number in a file."""
    return {"price": float(effect_file(path).read_text(encoding="utf-8"))}
