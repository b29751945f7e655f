"""P3: the latency that Pawl adds to a model call for a client that watches one run at a time.

Two delays are measured with the machine's monotonic clock. The first is from the model server's first output of an
answer to the client's first output event of that round. The second is from the last byte of an answer to the next
request, which includes two durable commits and the execution of a tool. The second delay is also measured for the
hand-written loop, in alternation with Pawl.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Final

from bench.comparison import SUBJECTS
from bench.figures import Figure, NotMeasured, at_most
from bench.options import Options
from bench.percentiles import percentile
from bench.subjects import Pawl
from bench.watching import watch
from bench.world import Request, model_server, scratch

_ROUNDS: Final = 4
_FIRST_MAX_MS: Final = 2.0
_ADDED_MAX_MS: Final = 3.0
_P99_MAX_MS: Final = 10.0


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Do runs in sequence, with 5 ms between chunks, so that the first chunk of each answer arrives separately."""
    first, following, by_hand = list[float](), list[float](), list[float]()
    async with AsyncExitStack() as stack:
        data = await stack.enter_async_context(scratch())
        server = await stack.enter_async_context(model_server(tool_rounds=_ROUNDS - 1, chunks=20, chunk_milliseconds=5))
        loop = await stack.enter_async_context(SUBJECTS["handwritten"](data / "loop", server.url))
        pawl = await stack.enter_async_context(Pawl(data / "pawl", server.url))
        for number in range(options.count(220, 60)):
            await loop.run(1, 1)
            others = await server.requests()
            seen = await watch(pawl)
            requests = await server.requests()
            if number < options.count(20, 5):
                continue
            if {len(requests), len(others), len(seen.output)} != {_ROUNDS}:
                raise RuntimeError(f"a run of {_ROUNDS} rounds had {len(requests)} requests, or {len(others)} by hand")
            pairs = zip(requests, sorted(seen.output.items()), strict=True)
            first += [(output[0] - request.first_output) * 1000 for request, (_, output) in pairs]
            following += _between(requests)
            by_hand += _between(others)
    return [*_first(first), *_following(following, by_hand)]


def _between(requests: Sequence[Request]) -> list[float]:
    """Return the milliseconds from each answer to the next request."""
    return [(then.arrived - request.last_bytes) * 1000 for request, then in pairwise(requests)]


def _first(milliseconds: list[float]) -> list[Figure]:
    what = "model's first output to the client's first event"
    median, high = percentile(milliseconds, 0.5), percentile(milliseconds, 0.99)
    return [
        at_most(_FIRST_MAX_MS, code="P3", what=f"{what}, p50", value=median, unit="ms", detail=_range(milliseconds)),
        Figure(code="P3", what=f"{what}, p99", value=high, unit="ms"),
    ]


def _following(milliseconds: list[float], by_hand: list[float]) -> list[Figure]:
    what = "last byte of an answer to the next request"
    median, median_by_hand = percentile(milliseconds, 0.5), percentile(by_hand, 0.5)
    added, high = median - median_by_hand, percentile(milliseconds, 0.99)
    detail = _range(milliseconds) | {
        "p50": median,
        "p50 by hand": median_by_hand,
        "p99 by hand": percentile(by_hand, 0.99),
    }
    return [
        at_most(
            _ADDED_MAX_MS,
            code="P3",
            what=f"{what}, p50, more than the hand-written loop",
            value=added,
            unit="ms",
            detail=detail,
        ),
        at_most(_P99_MAX_MS, code="P3", what=f"{what}, p99", value=high, unit="ms"),
    ]


def _range(milliseconds: list[float]) -> dict[str, float]:
    return {"samples": float(len(milliseconds)), "least": min(milliseconds), "most": max(milliseconds)}
