"""Drives a peer: reads the number of runs from standard input, and writes their durations to standard output.

It uses only the standard library, because each peer that imports it has a separate environment.
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
        "description": "Look up an item by its key.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "The key of the item"}},
            "required": ["key"],
            "additionalProperties": False,
        },
    },
}
"""The description of the tool for the model, for peers that do not generate it from `look_up`."""


def look_up(key: str) -> dict[str, str]:
    """Look up an item by its key."""
    return {"key": key, "value": f"value of {key}"}


def options() -> argparse.Namespace:
    """Return the options: the model's URL, a folder for data, and the URL of a database, which may be empty."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--database", default="")
    return parser.parse_args()


async def obey(run: Callable[[str], Awaitable[str]]) -> None:
    """For each line `COUNT AT_ONCE` on standard input, do COUNT runs, AT_ONCE at a time, and print their durations.

    `run` receives a new id and returns the answer.
    """
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
