"""P11: the cost of a run with two replicas of one or of each service, compared with one of each on the same cores."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final

from bench.figures import Figure, NotMeasured, at_most
from bench.options import Options
from bench.slices import CPU, RATE, Slice, cpu_by_process, ratios, shown, take_turns
from bench.subjects import Pawl
from bench.world import model_server, scratch

_TIMES_MAX: Final = 1.2
_SERVICES: Final = ("agent-loop", "tool-registry", "job-store")
_ONE, _ALL = "one of each", "two of each"


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Alternate suites with one and two replicas of each service and, unless `quick`, with two of a single service."""
    ways = {_ONE: {}, _ALL: dict.fromkeys(_SERVICES, 2)}
    if not options.quick:
        ways |= {f"two of {service}": {service: 2} for service in _SERVICES}
    async with AsyncExitStack() as stack:
        data = await stack.enter_async_context(scratch())
        server = await stack.enter_async_context(model_server())
        subjects = {}
        for way, replicas in ways.items():
            subject = Pawl(data / way.replace(" ", "-"), server.url, replicas=replicas)
            subjects[way] = await stack.enter_async_context(subject)
            await subject.run(options.runs, options.at_once)
        figures = await _figures(subjects, options, options.at_once)
        judged = {way: subjects[way] for way in (_ONE, _ALL)}
        return figures + await _figures(judged, options, 2 * options.at_once)


async def _figures(subjects: Mapping[str, Pawl], options: Options, at_once: int) -> list[Figure | NotMeasured]:
    runs = max(options.runs, 2 * at_once)
    seen = await take_turns(subjects, options.turns, runs=runs, at_once=at_once)
    one = seen.pop(_ONE)
    return [_figure(way, at_once, slices, one) for way, slices in seen.items()]


def _figure(way: str, at_once: int, slices: list[Slice], one: list[Slice]) -> Figure:
    """Return the cost of one configuration. Only two replicas of each service have a target."""
    what = f"CPU a run with {way}, {at_once} concurrent, relative to one of each"
    times = shown(ratios(slices, one, CPU))
    detail = {"runs a second, times": shown(ratios(slices, one, RATE))["value"]} | cpu_by_process(slices)
    if way == _ALL:
        return at_most(_TIMES_MAX, code="P11", what=what, unit="", detail=detail, **times)
    return Figure(code="P11", what=what, unit="", detail=detail, **times)
