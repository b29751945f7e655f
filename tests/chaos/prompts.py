"""Prompts of users. The scripted model obeys them literally, so a prompt is a plan."""

from __future__ import annotations

import json
import random

# The front-end tool.
PANEL = "show_panel"

BACK_END = ("read_meter", "set_valve", "send_parcel", "press_button")
GATED = "launch_rocket"
READS = "read_meter"


def prompt(draw: random.Random, tag: str) -> str:
    """Return a prompt of one to three stages. Every call has `tag` in its arguments, so prompts are unique."""
    stages = [_stage(draw, f"{tag}-{number}") for number in range(draw.choice((1, 1, 2, 2, 3)))]
    return " then ".join(stages)


def _stage(draw: random.Random, tag: str) -> str:
    kind = draw.choices(("batch", "text", "gated", "panel", "question", "mixed", "job"), (40, 15, 15, 15, 8, 7, 15))[0]
    match kind:
        case "text":
            return f"{_back_end(draw, tag)} then count to {draw.randrange(20, 60)} slowly"
        case "gated":
            return call(GATED, tag=tag, seconds=_seconds(draw))
        case "panel":
            return call(PANEL, title=tag)
        case "job":
            how = draw.choice(("", "", ", every 2 seconds 2 times"))
            is_gated = draw.random() < 0.3
            wanted = call(GATED, tag=tag, seconds=_seconds(draw)) if is_gated else _back_end(draw, tag)
            how = ", every 1 seconds 3 times" if is_gated and draw.random() < 0.7 else how
            return f"in the background{how}: {wanted}"
        case "question":
            return f"ask me whether {tag} is right"
        case "mixed":
            return " and ".join(
                (call(PANEL, title=tag), _back_end(draw, f"{tag}x"), call(GATED, tag=tag, seconds=_seconds(draw)))
            )
        case _:
            return " and ".join(_back_end(draw, f"{tag}x{number}") for number in range(draw.choice((1, 2, 3))))


def call(tool_name: str, **arguments: str | float) -> str:
    return f"call {tool_name} with {json.dumps(arguments)}"


def _back_end(draw: random.Random, tag: str) -> str:
    return call(draw.choice(BACK_END), tag=tag, seconds=_seconds(draw))


def _seconds(draw: random.Random) -> float:
    return round(draw.choice((0.02, 0.2, 1.5)) * (0.5 + draw.random()), 3)
