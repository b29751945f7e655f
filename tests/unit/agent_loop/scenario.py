"""A run with a call of every kind, the invariants of its record, and a running worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pawl.agent_loop.loop.rules.fact import OutputDelta, RoundRetrying, RoundStarted
from pawl.agent_loop.loop.rules.run import Run, RunOptions
from pawl.agent_loop.loop.rules.tool import Verdict
from pawl.agent_loop.loop.worker import Worker
from pawl.chassis.ids import ConversationId, RunId, RunKey, StoreId, UserId
from pawl.values import ENDED, CallState, Question, RunState
from tests.fakes.loop_world import World
from tests.fakes.manual_clock import run_in_virtual_time
from tests.fakes.model import Script, calls, says
from tests.fakes.registry import tool

T = TypeVar("T")

DIGEST = "d" * 64
RUN = Run(store_id=StoreId("s"), user_id=UserId("u"), conversation_id=ConversationId("c"), run_id=RunId("r"))
VERDICTS: dict[str, Verdict] = {
    "write": tool(),
    "look": tool(effect="READ_ONLY"),
    "mail": tool("APPROVE", digest=DIGEST),
    "show": tool("OFFER", context="FRONTEND"),
    "ask": tool("ASK", context="HUMAN", question=Question(question="Which colour?")),
}


def everything() -> World:
    """Return a world whose model makes calls of every kind, over three rounds."""
    world = World(
        VERDICTS,
        [
            calls('write {"n":1}', 'look {"n":1}', 'mail {"n":1}', 'show {"n":1}', text="Let me see."),
            calls('ask {"n":1}', 'write {"n":2}'),
            says("All is done.", chunks=30),
        ],
    )
    world.model.by_round = True
    return world


def check_whole(world: World, key: RunKey, *, state: RunState = RunState.COMPLETED) -> None:
    run, settled = world.ledger.run(key), world.ledger.calls(key)
    assert run.state is state
    assert all(call.settled and call.result is not None for call in settled)
    for call in settled:
        if call.tool_name in {"write", "mail"}:
            assert world.registry.effects[call.call_id] <= 1, "an effect happened twice"
            assert (call.state is CallState.SUCCEEDED) <= (world.registry.effects[call.call_id] == 1)
    seqs = [event.seq for event in world.ledger.log(key)]
    assert seqs == list(range(1, len(seqs) + 1))
    if state is RunState.COMPLETED:
        assert [call.state for call in settled] == [CallState.SUCCEEDED] * 6
        assert run.output_text == "All is done."
        assert [event.round for event in world.ledger.events(key) if isinstance(event, RoundStarted)] == [1, 2, 3]


def shown_text(world: World, key: RunKey, round_number: int) -> str:
    """Return the text that a watcher sees in a round, without output that was later voided."""
    shown: list[tuple[int, str]] = []
    for seq, event in enumerate(world.ledger.events(key), 1):
        if isinstance(event, OutputDelta) and event.round == round_number:
            shown.append((seq, event.text))
        if isinstance(event, RoundRetrying) and event.void_from_seq:
            shown = [each for each in shown if each[0] < event.void_from_seq]
    return "".join(text for _, text in shown)


@asynccontextmanager
async def at_work(worker: Worker) -> AsyncIterator[Worker]:
    loops = [asyncio.create_task(loop()) for loop in (worker.claim_forever, worker.renew_forever, worker.fence_forever)]
    try:
        yield worker
    finally:
        await worker.hand_over()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


async def end_of(world: World, key: RunKey) -> None:
    while world.ledger.run(key).state not in ENDED:
        await asyncio.sleep(0.1)


async def worked(world: World, key: RunKey) -> Run:
    """Have a worker drive runs until this one has ended, and return it."""
    async with at_work(world.worker()):
        await end_of(world, key)
    return world.ledger.run(key)


async def finished(
    verdicts: dict[str, Verdict],
    scripts: list[Script],
    *,
    text: str = "hello",
    options: RunOptions | None = None,
    seconds: float = 1.0,
) -> tuple[World, RunKey]:
    world = World(verdicts, scripts, seconds=seconds)
    key = world.ledger.submit(text, options)
    await world.finish(key)
    return world, key


def present(value: T | None) -> T:
    assert value is not None, "the value is missing"
    return value


def at_each(main: Callable[[int], Coroutine[Any, Any, bool]], *, more_than: int) -> None:
    """Play a scenario once for each position at which the event can happen.

    `main` returns whether the event happened. It must happen at more than `more_than` positions.
    """
    position = 0
    while run_in_virtual_time(main(position)):
        position += 1
    assert position > more_than
