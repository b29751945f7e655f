"""A tool that goes on for as long as a test wants."""

from __future__ import annotations

import asyncio

from pawl.tools import Category, EffectClass, tool
from tests.system.suite.effect_file import effect_file


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE, timeout_seconds=280)
async def hold(path: str) -> str:
    """Add a line to a file, then wait until there is another one beside it. Must not be repeated."""
    with effect_file(path).open("a", encoding="utf-8") as effects:  # one line
        effects.write("held\n")
    while not effect_file(f"{path}.release").exists():
        await asyncio.sleep(0.05)
    return "released"
