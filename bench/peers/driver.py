"""How a peer is driven: it does what it is told on standard input and answers on standard output.

Imported by the peers, each of which has an environment of its own, so it uses the standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

QUESTION = "Look up three items, then tell me about them."
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look an item up by its key.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "The key of the item"}},
            "required": ["key"],
            "additionalProperties": False,
        },
    },
}
"""The tool as the model is told of it, where a peer does not make this from `look_up` itself."""


def look_up(key: str) -> dict[str, str]:
    """Look an item up by its key."""
    return {"key": key, "value": f"value of {key}"}


def options() -> argparse.Namespace:
    """Return where the model is, where data may be kept, and a database."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--database", default="")
    return parser.parse_args()


async def obey(run: Callable[[str], Awaitable[str]]) -> None:
    """Do `COUNT AT_ONCE` runs for each line of standard input; `run` takes a fresh id and returns the answer."""
    loop = asyncio.get_running_loop()
    number = 0
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        count, at_once = map(int, line.split())
        ids = iter([f"bench-{number + n}" for n in range(count)])
        number += count
        seconds: list[float] = []

        async def work(ids: object = ids, seconds: list[float] = seconds) -> None:
            for run_id in ids:  # type: ignore[attr-defined]
                began = time.monotonic()
                answer = await run(run_id)
                if "the end" not in answer:
                    raise SystemExit(f"{run_id} ended with {answer!r}")
                seconds.append(time.monotonic() - began)

        await asyncio.gather(*(work() for _ in range(at_once)))
        print(json.dumps(seconds), flush=True)
