"""The steps of runs, for users: as they are, and as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from pawl.agent_loop.adapters.public_ledger import PublicLedger
from pawl.agent_loop.app.watch import Watches
from pawl.agent_loop.domain.step_history import Step, StepChange, Steps
from pawl.chassis.auth import Principal
from pawl.chassis.ids import RunId
from pawl.errors import SeqBeyondEnd
from pawl.event.v1.event_pb2 import RunEvent
from pawl.event.v1.gap_pb2 import Gap

TakeIn = Callable[[Steps, Sequence[RunEvent] | Gap], tuple[StepChange, ...]]
"""Gives a part of a log to steps; returns what it has changed."""


class RunSteps:
    """Makes steps from logs. Keeps nothing between requests."""

    def __init__(self, *, ledger: PublicLedger, watches: Watches, take_in: TakeIn) -> None:
        self._ledger = ledger
        self._watches = watches
        self._take_in = take_in

    async def list(self, caller: Principal, run_id: RunId) -> tuple[Step, ...]:
        """Return the steps of a run as they are now, in order.

        Raises:
            RunNotFound
        """
        steps, after_seq = Steps(), 0
        while True:
            page = await self._ledger.list_events(caller, run_id, after_seq)
            if page.HasField("gap"):
                self._take_in(steps, page.gap)
                after_seq = page.gap.to_seq
            self._take_in(steps, page.events)
            after_seq = page.events[-1].seq if page.events else after_seq
            if not page.events or after_seq >= page.last_seq:
                return steps.all()

    async def watch(
        self, caller: Principal, run_id: RunId, after_seq: int, *, silence_seconds: float
    ) -> AsyncGenerator[tuple[tuple[StepChange, ...], int], None]:
        """Give what changes after `after_seq`, with the seq up to which it is told; end with the run.

        Nothing is given for changes of the log that change no step. After `silence_seconds`
        without an event comes a part without changes. Consume it inside `contextlib.aclosing`.

        Raises:
            RunNotFound, SeqBeyondEnd, Overloaded, SlowConsumer
        """
        run = await self._ledger.get_run(caller, run_id)
        if after_seq > run.last_seq:
            raise SeqBeyondEnd(last_seq=run.last_seq)
        steps, seq = Steps(), 0
        async with (
            self._watches.open(caller, run_id, 0) as watcher,
            aclosing(watcher.pages(silence_seconds=silence_seconds)) as pages,
        ):
            async for page in pages:
                if isinstance(page, Gap):
                    changes, seq = self._take_in(steps, page), page.to_seq
                    if seq > after_seq:
                        yield changes, seq
                    continue
                if not page:
                    yield (), seq
                    continue
                seq = page[-1].seq
                self._take_in(steps, [event for event in page if event.seq <= after_seq])
                changes = self._take_in(steps, [event for event in page if event.seq > after_seq])
                if changes:
                    yield changes, seq
