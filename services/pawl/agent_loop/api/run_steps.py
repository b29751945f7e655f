"""The steps of runs, for users: as they are, and as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from pawl.agent.v1.steps_pb2 import ListStepsRequest, ListStepsResponse, Step, WatchStepsResponse
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.step_history import Steps
from pawl.agent_loop.api.watch import Watches
from pawl.agent_loop.loop.rules import checks
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RunId
from pawl.chassis.rpc.parts import in_parts
from pawl.errors import InvalidPageToken, SeqBeyondEnd
from pawl.event.v1.gap_pb2 import Gap

_STEPS_PER_PAGE: Final = 50
_PAGE_BYTES_MAX: Final = 2 * 1024 * 1024


class RunSteps:
    """Makes steps from logs. Keeps nothing between requests."""

    def __init__(self, *, ledger: PublicLedger, watches: Watches) -> None:
        self._ledger = ledger
        self._watches = watches

    async def list(self, caller: Principal, request: ListStepsRequest) -> ListStepsResponse:
        """Return the steps of a run as they are now, in order, after the one that the token names.

        Raises:
            InvalidId, InvalidField, RunNotFound
            InvalidPageToken: there is no such step in this run.
        """
        run_id, steps_max = convert.run_id(request), checks.page_size(request.page_size) or _STEPS_PER_PAGE
        found = await self._all(caller, run_id)
        start = next((number for number, each in enumerate(found, 1) if each.step_id == request.page_token), 0)
        if request.page_token and not start:
            raise InvalidPageToken
        wanted = found[start : start + steps_max]
        # A page has at least one step if there is any.
        response = ListStepsResponse(steps=next(in_parts(wanted, Step.ByteSize, size_max=_PAGE_BYTES_MAX), []))
        if start + len(response.steps) < len(found):
            response.next_page_token = response.steps[-1].step_id
        return response

    async def _all(self, caller: Principal, run_id: RunId) -> Sequence[Step]:
        steps, after_seq = Steps(), 0
        while True:
            page = await self._ledger.list_events(caller, run_id, after_seq)
            if page.HasField("gap"):
                steps.take_gap(page.gap)
                after_seq = page.gap.to_seq
            steps.take(page.events)
            after_seq = page.events[-1].seq if page.events else after_seq
            if not page.events or after_seq >= page.last_seq:
                return steps.all()

    async def watch(
        self, caller: Principal, run_id: RunId, after_seq: int, *, silence_seconds: float
    ) -> AsyncGenerator[WatchStepsResponse, None]:
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
                    changes, seq = steps.take_gap(page), page.to_seq
                    if seq > after_seq:
                        yield WatchStepsResponse(changes=changes, seq=seq)
                    continue
                if not page:
                    yield WatchStepsResponse(seq=seq)
                    continue
                seq = page[-1].seq
                steps.take(event for event in page if event.seq <= after_seq)
                changes = steps.take(event for event in page if event.seq > after_seq)
                if changes:
                    yield WatchStepsResponse(changes=changes, seq=seq)
