"""Waiting until a run needs somebody, or has ended."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final

from pawl.agent_loop.app.public_ports import PublicLedger
from pawl.agent_loop.app.public_values import Caller, LogGap, RunView
from pawl.agent_loop.app.watch import Watches
from pawl.agent_loop.domain.run import ENDED, RunState
from pawl.errors import SlowConsumer

RESTING: Final = ENDED | {RunState.WAITING, RunState.NEEDS_ATTENTION}
"""States in which nothing goes on without somebody from outside."""


async def wait_for_rest(
    ledger: PublicLedger, watches: Watches, caller: Caller, run_id: str, *, seconds: float
) -> RunView:
    """Return the run as soon as it rests, or as it is after `seconds`.

    Raises:
        RunNotFound
    """
    run = await ledger.get_run(caller, run_id)
    if run.state in RESTING or seconds == 0:
        return run
    try:
        async with asyncio.timeout(seconds):
            await _rests(watches, caller, run)
    except (TimeoutError, SlowConsumer):
        pass  # The run as it is now is the answer.
    return await ledger.get_run(caller, run_id)


async def _rests(watches: Watches, caller: Caller, run: RunView) -> None:
    async with (
        watches.open(caller, run.run_id, run.last_seq) as watcher,
        aclosing(watcher.events()) as events,
    ):
        async for event in events:
            if isinstance(event, LogGap) or event.run_state in RESTING:
                return
