"""P17: the cost of a long history, in late rounds of one run and for a message in a long conversation.

The duration of a round is measured from the last byte of an answer to the arrival of the next request, so the model's
own time does not count. The history stays below the size at which it is summarised.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from bench.figures import Figure, NotMeasured, at_most
from bench.options import Options
from bench.subjects import Pawl
from bench.watching import follow, watch
from bench.world import ModelServer, pawl
from pawl.agent.v1 import agent_pb2
from pawl.event.v1 import run_pb2

_ROUNDS: Final = 1000
_EARLY: Final = 100
# Number of rounds on each side of the round that is measured.
_BESIDE: Final = 15
_LATE_MAX: Final = 1.5
_LATE_MAX_MS: Final = 20.0
_MESSAGES: Final = 10_000
_MESSAGE_MAX_MS: Final = 60.0
_CONTEXT_BYTES: Final = 4_000_000


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Do one run of 1,000 rounds, and many short runs in one conversation."""
    async with pawl(tool_rounds=_ROUNDS - 1, chunks=1) as (subject, server):
        await watch(subject, _start())
        requests = await server.requests()
    taken = [(then.arrived - request.last_bytes) * 1000 for request, then in pairwise(requests)]
    if len(requests) != _ROUNDS:
        raise RuntimeError(f"a run of {_ROUNDS} rounds had {len(requests)} requests")
    async with pawl(tool_rounds=0, chunks=1) as (subject, server):
        milliseconds = await _messages(subject, server, options.count(_MESSAGES, 1000))
    return [*_late(taken), *_in_a_conversation(milliseconds)]


def _start(conversation_id: str = "") -> agent_pb2.StartRunRequest:
    limits = run_pb2.RunLimits(rounds_max=_ROUNDS, context_bytes_max=_CONTEXT_BYTES)
    return agent_pb2.StartRunRequest(
        text="Continue.",
        conversation_id=conversation_id,
        options=run_pb2.RunOptions(tool_names=["look_up"], limits=limits),
    )


async def _messages(subject: Pawl, server: ModelServer, count: int) -> list[float]:
    """Return the milliseconds from the StartRun call of each message to the request to the model."""
    found: list[float] = []
    conversation_id = ""
    for _ in range(count // 2):
        began = time.monotonic()
        run = (await subject.agents.StartRun(_start(conversation_id))).run
        conversation_id = run.conversation_id
        await follow(subject, run.run_id)
        (request,) = await server.requests()
        found.append((request.arrived - began) * 1000)
    return found


def _around(taken: Sequence[float], number: int) -> float:
    return statistics.median(taken[max(0, number - _BESIDE) : number + _BESIDE])


def _late(taken: Sequence[float]) -> list[Figure]:
    early, late = _around(taken, _EARLY), _around(taken, _ROUNDS)
    detail = {f"round {number}": _around(taken, number) for number in (1, 100, 250, 500, 750, 1000)}
    return [
        at_most(
            _LATE_MAX,
            code="P17",
            what="round 1,000, as a multiple of round 100",
            value=late / early,
            unit="",
            detail=detail,
        ),
        at_most(_LATE_MAX_MS, code="P17", what="round 1,000", value=late, unit="ms"),
    ]


def _in_a_conversation(milliseconds: Sequence[float]) -> list[Figure]:
    late = milliseconds[-2 * _BESIDE :]
    return [
        at_most(
            _MESSAGE_MAX_MS,
            code="P17",
            what=f"message in a conversation of {2 * len(milliseconds):,} messages to the model's request, p50",
            value=statistics.median(late),
            unit="ms",
            spread=(min(late), max(late)),
            detail={"first": statistics.median(milliseconds[: 2 * _BESIDE])},
        )
    ]
