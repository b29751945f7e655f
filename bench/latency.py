"""P3: what Pawl adds to a model call for somebody who watches, at one run at a time.

Two waits are measured, each on the one clock that all processes of a machine share: from the model server's first
output of an answer to the client holding the first output event of that round, and from the last byte of an answer to
the arrival of the next request, which has two durable commits and the execution of a tool in it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from bench.figures import Figure, NotMeasured, at_most
from bench.options import Options
from bench.percentiles import percentile
from bench.watching import watch
from bench.world import pawl

_ROUNDS: Final = 4
_MEDIAN_MAX_MS: Final = 2.0
_P99_MAX_MS: Final = 10.0


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Do one run after the other with 5 ms between the chunks, so that the first of each answer is alone."""
    first: list[float] = []
    following: list[float] = []
    async with pawl(tool_rounds=_ROUNDS - 1, chunks=20, chunk_milliseconds=5) as (subject, server):
        for number in range(options.count(220, 60)):
            seen = await watch(subject)
            requests = await server.requests()
            if number < options.count(20, 5):
                continue
            if len(requests) != _ROUNDS or len(seen.output) != _ROUNDS:
                raise RuntimeError(f"a run of {_ROUNDS} rounds had {len(requests)} requests")
            pairs = zip(requests, sorted(seen.output.items()), strict=True)
            first += [(output[0] - request.first_output) * 1000 for request, (_, output) in pairs]
            following += [(then.arrived - request.last_bytes) * 1000 for request, then in pairwise(requests)]
    return [
        *_judged("model's first output to the client's first event", first),
        *_judged("last byte of an answer to the next request", following),
    ]


def _judged(what: str, milliseconds: list[float]) -> list[Figure]:
    detail = {"samples": float(len(milliseconds)), "least": min(milliseconds), "most": max(milliseconds)}
    median, high = percentile(milliseconds, 0.5), percentile(milliseconds, 0.99)
    return [
        at_most(_MEDIAN_MAX_MS, code="P3", what=f"{what}, p50", value=median, unit="ms", detail=detail),
        at_most(_P99_MAX_MS, code="P3", what=f"{what}, p99", value=high, unit="ms"),
    ]
