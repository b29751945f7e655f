"""Tools of all four effect classes, which record their effects in a file. The registry loads this module."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from pawl.tools import (
    Category,
    EffectClass,
    ReconcileResult,
    ToolContext,
    ToolError,
    did_not_happen,
    happened,
    tool,
)
from tests.chaos.history import EffectFile, effect
from tests.chaos.prompts import AGAIN, PARCELS

FILE_VARIABLE = "CHAOS_EFFECTS_FILE"


def _file() -> EffectFile:
    return EffectFile(Path(os.environ[FILE_VARIABLE]))


async def _act(tool_name: str, tag: str, seconds: float, context: ToolContext) -> str:
    """Work for half of the time, cause the effect, and work for the rest.

    A crash may come before or after the effect.
    """
    file = _file()
    arguments: dict[str, Any] = {"tag": tag, "seconds": seconds}
    begun = effect(file, tool_name, context, arguments)
    context.progress(0.1, tag)
    await asyncio.sleep(seconds / 2)
    # A blocking write of one line, so that nothing can come between it and the tool.
    if file.is_void(begun, file.append(begun)):
        raise ToolError("a client was told that this had not happened")
    context.progress(0.5, tag)
    await asyncio.sleep(seconds / 2)
    return f"{tool_name} {tag}"


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def read_meter(tag: str, seconds: float, context: ToolContext) -> str:
    """Count the parcels with that tag. May be repeated."""
    parcels = sum(effect.tool_name == "send_parcel" and effect.arguments["tag"] == tag for effect in _file().happened())
    read = await _act("read_meter", tag, seconds, context)
    return f"{read}{AGAIN}" if parcels >= PARCELS else read


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
async def set_valve(tag: str, seconds: float, context: ToolContext) -> str:
    """Set a valve. Repeated calls with the same key are harmless."""
    return await _act("set_valve", tag, seconds, context)


async def was_sent(context: ToolContext) -> ReconcileResult:
    """Return whether the parcel with that key was sent."""
    file = _file()
    sent = file.bar(effect(file, "send_parcel", context, {}, bars=True))
    return did_not_happen() if sent is None else happened(f"send_parcel {sent.arguments['tag']}")


@tool(category=Category.SAFE, effect=EffectClass.RECONCILABLE, reconcile=was_sent)
async def send_parcel(tag: str, seconds: float, context: ToolContext) -> str:
    """Send a parcel. It is possible to find out later whether it was sent."""
    return await _act("send_parcel", tag, seconds, context)


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
async def press_button(tag: str, seconds: float, context: ToolContext) -> str:
    """Press a button, which must never happen twice."""
    return await _act("press_button", tag, seconds, context)


@tool(category=Category.SENSITIVE, effect=EffectClass.AT_MOST_ONCE)
async def launch_rocket(tag: str, seconds: float, context: ToolContext) -> str:
    """Launch a rocket, which needs an approval and must never happen twice."""
    return await _act("launch_rocket", tag, seconds, context)
