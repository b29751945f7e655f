"""The tool of the benchmark, as the tool-registry of Pawl loads it."""

from __future__ import annotations

from typing import Annotated

from pawl.tools import Category, EffectClass, tool


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
def look_up(key: Annotated[str, "The key of the item"]) -> dict[str, str]:
    """Look an item up by its key."""
    return {"key": key, "value": f"value of {key}"}
