"""The benchmark's tools, which Pawl's tool-registry loads."""

from __future__ import annotations

from typing import Annotated

from pawl.tools import Category, EffectClass, tool


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def look_up(key: Annotated[str, "The key of the item"]) -> dict[str, str]:
    """Look up an item by its key."""
    return {"key": key, "value": f"value of {key}"}


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
def reserve(key: Annotated[str, "The key of the item"]) -> dict[str, str]:
    """Reserve an item by its key. As much work as `look_up`, but it starts only after its call is durably recorded."""
    return {"key": key, "value": f"value of {key}"}
