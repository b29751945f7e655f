"""P4: the number of events into which an answer is divided, and the delay of the first event, for one run at a time."""

from __future__ import annotations

from typing import Final

from bench.figures import Figure, NotMeasured, at_most
from bench.options import Options
from bench.percentiles import percentile
from bench.watching import watch
from bench.world import pawl

_CHUNKS: Final = 100
_EVENTS_AT_ONCE_MAX: Final = 11
_EVENTS_SLOW_MAX: Final = 22
_SLOW_MS: Final = 20.0
_FIRST_MAX_MS: Final = 5.0


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Count the events of answers of 100 chunks, sent together and 20 ms apart. The limit is for the largest count."""
    at_once, _ = await _answers(options.count(50, 20), 0)
    slow, first = await _answers(options.count(25, 6), _SLOW_MS)
    apart = f"{_SLOW_MS:g} ms apart"
    return [
        _events(f"output events of {_CHUNKS} chunks at once", at_once, _EVENTS_AT_ONCE_MAX),
        _events(f"output events of {_CHUNKS} chunks {apart}", slow, _EVENTS_SLOW_MAX),
        at_most(
            _FIRST_MAX_MS,
            code="P4",
            what=f"first chunk to the client's first output event, chunks {apart}, p50",
            value=percentile(first, 0.5),
            unit="ms",
            spread=(min(first), max(first)),
            detail={"answers": float(len(first))},
        ),
    ]


async def _answers(runs: int, chunk_milliseconds: float) -> tuple[list[int], list[float]]:
    """Return the number of output events of each answer, and the milliseconds until the first of them."""
    counts: list[int] = []
    first: list[float] = []
    async with pawl(tool_rounds=0, chunks=_CHUNKS, chunk_milliseconds=chunk_milliseconds) as (subject, server):
        await watch(subject)
        await server.requests()
        for _ in range(runs):
            (events,) = (await watch(subject)).output.values()
            (request,) = await server.requests()
            counts.append(len(events))
            first.append((events[0] - request.first_output) * 1000)
    return counts, first


def _events(what: str, counts: list[int], bound: int) -> Figure:
    return at_most(
        bound,
        code="P4",
        what=f"{what}, most of {len(counts)} answers",
        value=max(counts),
        unit="",
        spread=(min(counts), max(counts)),
    )
