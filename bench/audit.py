"""P12: the audit log's share of a run's CPU time, with one run and with many.

Two suites run side by side. The registry of one of them loads a module that disables the audit log. The cost of the log
is the difference in CPU time over all processes, including PostgreSQL.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Final

from bench.figures import Figure, NotMeasured, at_most
from bench.options import Options
from bench.slices import CPU, P50, Slice, ratios, shown, take_turns
from bench.subjects import Pawl, start_request
from bench.world import model_server, scratch

_SHARE_MAX: Final = 0.1
_ENTRIES: Final = "SELECT count(*) FROM tool_registry.audit"
_TOOLS: Final = {"that only reads": "look_up", "with effects": "reserve"}


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Compare Pawl with and without the audit log, for a read-only tool and for a tool with effects."""
    found: list[Figure | NotMeasured] = []
    for kind, tool in _TOOLS.items():
        async with AsyncExitStack() as stack:
            data = await stack.enter_async_context(scratch())
            server = await stack.enter_async_context(model_server())
            start = start_request(tool)
            audited = Pawl(data / "audited", server.url, start=start)
            environment = {"PAWL_TOOLS": "bench.tools,bench.unaudited"}
            bare = Pawl(data / "bare", server.url, start=start, environment=environment)
            subjects = {"audited": audited, "bare": bare}
            for subject in subjects.values():
                await stack.enter_async_context(subject)
                await subject.run(options.runs, options.at_once)
            alone = await take_turns(subjects, options.turns, runs=options.runs_alone, at_once=1)
            crowd = await take_turns(subjects, options.turns, runs=options.runs, at_once=options.at_once)
            entries, left = await audited.ask(_ENTRIES), await bare.ask(_ENTRIES)
            if left or not entries:
                raise RuntimeError(f"{left} entries in the suite without an audit log, {entries} in the other")
        found += [_judged(f"alone, a tool {kind}", alone), _judged(f"{options.at_once} runs, a tool {kind}", crowd)]
    return found


def _judged(load: str, seen: dict[str, list[Slice]]) -> Figure:
    audited, bare = seen["audited"], seen["bare"]
    p50 = shown(ratios(bare, audited, P50))["value"]
    return at_most(
        _SHARE_MAX,
        code="P12",
        what=f"part of a run's CPU that the audit log takes, {load}",
        unit="",
        detail={"CPU, ms": shown([CPU(one) for one in audited])["value"], "part of p50": 1 - p50},
        **shown([1 - times for times in ratios(bare, audited, CPU)]),
    )
