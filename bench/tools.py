"""The benchmark's tools, which Pawl's tool-registry loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

from pawl.tools import Category, EffectClass, tool

EFFECTS_VARIABLE: Final = "BENCH_EFFECTS_FILE"


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def look_up(key: Annotated[str, "The key of the item"]) -> dict[str, str]:
    """Look up an item by its key."""
    return {"key": key, "value": f"value of {key}"}


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
def reserve(key: Annotated[str, "The key of the item"]) -> dict[str, str]:
    """Reserve an item by its key. As much work as `look_up`, but it starts only after its call is durably recorded."""
    return {"key": key, "value": f"value of {key}"}


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
def send(key: Annotated[str, "The key of the item"]) -> dict[str, str]:
    """Send an item, which must never happen twice. Each time is a line in a file."""
    with Path(os.environ[EFFECTS_VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(f"{key}\n")
    return {"key": key}
