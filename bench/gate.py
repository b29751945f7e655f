"""`python -m bench --gate`: fails if a run costs more CPU time than `gate.json` allows.

The cost is the CPU time of all processes, including the client, as a multiple of the hand-written loop's in the same
turn. The lower quartile of all turns is used, because other programs on the machine can only increase the cost. A load
over its limit is measured once more with twice as many turns, and only the second result counts.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from bench.comparison import BASE, SUBJECTS
from bench.environments import Unavailable
from bench.percentiles import percentile
from bench.slices import CPU_AND_CLIENT, ratios, take_turns
from bench.subjects import Pawl, Subject
from bench.world import model_server, scratch

ALLOWED: Final = Path(__file__).parent / "gate.json"
MARGIN: Final = 0.25
_TURNS: Final = 12
_WARM_UP_RUNS: Final = 64


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A load that the gate measures. `cpu_multiple` is the cost of a run when the file was last changed."""

    at_once: int
    runs: int
    cpu_multiple: float

    @property
    def limit(self) -> float:
        return self.cpu_multiple * (1 + MARGIN)


async def passes() -> bool:
    """Measure the loads. Return whether all are within their limits, or True if no measurement is possible."""
    left = msgspec.json.decode(ALLOWED.read_bytes(), type=dict[str, Load])
    for turns in (_TURNS, 2 * _TURNS):
        try:
            left = {name: load for name, load in left.items() if await _misses(name, load, turns)}
        except Unavailable as error:
            print(f"The gate cannot measure here: {error}", file=sys.stderr)
            return True
        except Exception:  # noqa: BLE001  # on a very busy machine a subject may fail: count it as a miss
            traceback.print_exc()
        if not left:
            return True
    print(
        f"A run costs more CPU than before ({', '.join(left)}). Find out why with `python -m bench P1 P2`. "
        f"If the cost is justified, set cpu_multiple in {ALLOWED.name} and give the reason in the commit.",
        file=sys.stderr,
    )
    return False


async def _misses(name: str, load: Load, turns: int) -> bool:
    async with AsyncExitStack() as stack:
        data = await stack.enter_async_context(scratch())
        server = await stack.enter_async_context(model_server())
        subjects: dict[str, Subject] = {
            BASE: await stack.enter_async_context(SUBJECTS[BASE](data / BASE, server.url)),
            "pawl": await stack.enter_async_context(Pawl(data / "pawl", server.url)),
        }
        for subject in subjects.values():
            await subject.run(_WARM_UP_RUNS, load.at_once)
        slices = await take_turns(subjects, turns, runs=load.runs, at_once=load.at_once)
    measured = cost(ratios(slices["pawl"], slices[BASE], CPU_AND_CLIENT))
    print(f"{name}: {measured:.2f} times the CPU of the hand-written loop; limit {load.limit:.2f}", flush=True)
    return measured > load.limit


def cost(multiples: Sequence[float]) -> float:
    """Return the cost of the turns that other programs disturbed least."""
    return percentile(multiples, 0.25)
