"""The tools of the benchmark, loaded by Pawl's tool-registry."""

from __future__ import annotations

from typing import Annotated

from pawl.tools import Category, EffectClass, tool


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def look_up(key: Annotated[str, "The key of the item"]) -> dict[str, str]:
    """Look an item up by its key."""
    return {"key": key, "value": f"value of {key}"}


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
def reserve(key: Annotated[str, "The key of the item"]) -> dict[str, str]:
    """Reserve an item by its key. As much work as `look_up`, but only after its intent is durable."""
    return {"key": key, "value": f"value of {key}"}
