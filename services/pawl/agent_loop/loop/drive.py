"""Drives one claimed run until it is parked, ends, or belongs to another worker.

The ledger is authoritative, and `base` is a local copy of it. Facts and events record what has happened since it was
read. Each cycle plans from the base and the facts, and commits the changes before it starts new work. If the ledger
refuses a step, the drive plans again from a fresh copy with the same facts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from enum import StrEnum
from typing import Final, TypeVar, assert_never

from msgspec.structs import replace

from pawl.agent_loop.loop.ports import Claim, Loaded
from pawl.agent_loop.loop.rules import budget, planning, step
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.command_rules import (
    approvals_given,
    decisions,
    may_have_been_held,
    others_change_calls,
    results,
    shared_decisions,
    withdrawn_results,
)
from pawl.agent_loop.loop.rules.decision import Finish, Park, StartModel, StopModel, Wait
from pawl.agent_loop.loop.rules.fact import (
    CallExecuted,
    CallStopped,
    Fact,
    ModelAnswered,
    ModelCut,
    ModelFailed,
    OutputDelta,
    OwnerEvent,
    RunRefused,
    Shown,
    ToolProgress,
)
from pawl.agent_loop.loop.rules.options import as_deployed
from pawl.agent_loop.loop.rules.planning import Plan
from pawl.agent_loop.loop.rules.run import RunFailure
from pawl.agent_loop.loop.rules.state import MODEL, State
from pawl.agent_loop.loop.rules.step import Step
from pawl.agent_loop.loop.rules.tool import RecordedDecision, RecordedResult
from pawl.agent_loop.loop.run_tasks import RunTasks, WorkerDependencies
from pawl.agent_loop.loop.spans import RunSpans
from pawl.chassis.ids import CallId
from pawl.chassis.process.tasks import within
from pawl.chassis.rpc.retry import INTERNAL_SECONDS_MAX, Retry
from pawl.chassis.rpc.translate import seconds
from pawl.errors import IllegalTransition, InboxChanged
from pawl.values import ENDED, CallState, LeaseAction, RunState, Usage

T = TypeVar("T")

# The ledger refuses a step if another writer came first. If it does so this many times in a row while the log stays
# unchanged, the step itself is wrong.
_REFUSALS_MAX: Final = 20
# Clocks differ slightly: waking a moment too early must not become a busy loop.
_WAIT_SECONDS_MIN: Final = 0.001
# If the ledger takes longer than this to respond, that counts as an outage.
_OUTAGE_SECONDS: Final = 5.0
# How long a run's last step waits for the registry to count the withdrawn front-end calls.
_LAST_REPORT_SECONDS: Final = 5.0


class DriveEnd(StrEnum):
    PARKED = "parked"
    ENDED = "ended"
    HANDED_OVER = "handed_over"


class Drive:
    """Drives one claimed run. `run` can be cancelled at any time, and makes no writes after that."""

    def __init__(self, claim: Claim, dependencies: WorkerDependencies, failure: RunFailure | None = None) -> None:
        """Create a drive.

        If `failure` is set, `run` stops all work, settles open calls and ends the run with this failure.
        """
        self.claim = claim
        self._dependencies = dependencies
        # Ending a crashed run has already been retried: report an internal error immediately.
        internal_seconds_max = 0.0 if failure else INTERNAL_SECONDS_MAX
        self._retry = Retry(dependencies.clock, chance=dependencies.random, internal_seconds_max=internal_seconds_max)
        self._signal = asyncio.Event()
        self._facts: list[Fact] = [RunRefused(failure=failure)] if failure else []
        self._outbox: list[OwnerEvent] = []
        self._shown = Shown()
        self._woken = False
        self._handing_over = False
        self._recorded: frozenset[RecordedDecision | RecordedResult] = frozenset()
        self._withdrawn: dict[CallId, RecordedResult] = {}
        self._reported: set[CallId] = set()
        # The last fraction and message of each call.
        self._progress_shown: dict[CallId, tuple[float | None, str]] = {}
        self._refusals = 0
        self._has_written = False
        # Usage of discarded model calls that the ledger does not know about yet.
        self._discarded_usage = Usage()
        self._clock_offset = 0.0
        # Adding this to a database time of the last plan gives a time of the monotonic clock.
        self._from_database = 0.0
        self._active_from = 0.0
        self._plan_again_at = 0.0
        self._is_failing = failure is not None
        self._base: State
        self._tasks: RunTasks
        self._spans: RunSpans | None = None

    def wake(self) -> None:
        self._woken = True
        self._signal.set()

    def hand_over(self) -> None:
        """Ask the drive to stop at its next commit without settling anything."""
        self._handing_over = True
        self._signal.set()

    async def run(self, loaded: Loaded | None = None) -> DriveEnd:
        """Drive the run, starting from `loaded` if it is set. Return the reason for releasing the run.

        Raises:
            LeaseLost, RunEnded, RunNotFound: The run no longer belongs to this worker.
        """
        loaded = await self._load() if loaded is None else self._prepared(loaded)
        self._base = loaded.state
        self._active_from = self._dependencies.clock.monotonic() - self._base.run.active_seconds
        self._tasks = RunTasks(
            self._dependencies,
            self._base.run,
            retry=self._retry,
            signal=self._signal,
            now=self._now,
            active_seconds=self._active_seconds,
            spans=self._spans_of(loaded),
            own_tools=loaded.own_tools,
        )
        left: DriveEnd | None = None
        try:
            while (left := await self._turn()) is None:
                pass
            return left
        finally:
            await self._tasks.cancel_all()
            self._spans_of(loaded).end(self._base, left or "lost")

    async def _turn(self) -> DriveEnd | None:
        async with self._slot():
            rest = await self._advance()
        return None if rest is None else await self._rest(rest)

    def _slot(self) -> AbstractAsyncContextManager[object]:
        """Return the slot to hold during a step.

        Background runs share a small number of slots and give way to other runs. A stopping worker releases all its
        runs at the same time, so that they share commits.
        """
        if self._handing_over:
            return nullcontext()
        steps = self._dependencies.background_steps
        return steps.held() if self.claim.in_background else steps.foreground()

    async def _advance(self) -> Wait | Park | Finish | DriveEnd | None:
        """Commit what has happened, and start the work that follows. Return the next step, or None to plan again."""
        self._signal.clear()
        if self._handing_over:
            return await self._release()
        if self._woken or self._has_lapsed_offer():
            await self._read_inbox()
        self._collect(at_once=False)
        if await self._commit_part():
            return None
        if self._only_output_can_be_there():
            return await self._show_output()
        taken = self._fitting_facts()
        now, started = self._now(), self._dependencies.clock.monotonic()
        plan = planning.plan(self._planning_base(taken), self._facts_with_seqs(taken), now)
        if isinstance(plan.rest, StopModel):
            # Stop the model first, so that one step contains everything that has happened.
            await self._cancel_model(plan.state.loop.failure)
            return None
        await self._record()
        await self._report(plan)
        planned = self._step(plan)
        early = self._early_model_call(plan)
        if early is not None:
            self._tasks.start_model(early, plan.state, started, is_early=True)
        if not planned.changes_nothing and not await self._commit(planned, plan.state, facts_taken=taken):
            self._discarded_usage += await self._tasks.discard_early_model_call()
            return None
        self._tasks.confirm_model_call()
        for work in plan.work:
            if isinstance(work, StartModel):
                self._shown = Shown()
            if work is not early:
                state = replace(plan.state, shared_tokens_max=self._base.shared_tokens_max)
                self._tasks.start_work(work, state, started)
        self._from_database = started - now
        return plan.rest

    def _early_model_call(self, plan: Plan) -> StartModel | None:
        """Return the model call that may start while the step that announces it is not yet durable, or None.

        The call's output is not used until the step is durable. If the step is refused, the output is discarded, but
        the call still costs money. The call therefore starts early only if a refusal is unlikely: there are no commands
        and no recent refusals. The run must not have a token budget either, because only the commit's response contains
        the number of tokens left.
        """
        if self._base.commands or budget.tokens(self._base) or self._woken or self._handing_over or self._refusals:
            return None
        calls = (work for work in plan.work if isinstance(work, StartModel) and not work.delay_seconds)
        return next(calls, None)

    async def _rest(self, rest: Wait | Park | Finish | DriveEnd) -> DriveEnd | None:
        """Wait for news, park the run or finish it."""
        match rest:
            case DriveEnd():
                return rest
            case Finish():
                return DriveEnd.ENDED
            case Park():
                if rest.wake_time is not None:
                    self._dependencies.run_due_at(rest.wake_time + self._from_database)
                return DriveEnd.PARKED
            case Wait():
                if self._base.run.state in ENDED:
                    return DriveEnd.ENDED
                self._plan_again_at = math.inf if rest.until is None else rest.until + self._from_database
                await self._wait(self._plan_again_at)
                return None
            case _:
                assert_never(rest)

    def _only_output_can_be_there(self) -> bool:
        """Return whether only model output can have arrived. In that case, there is nothing to decide."""
        is_quiet = not self._facts and not self._base.commands and MODEL in self._tasks.under_way
        return is_quiet and self._dependencies.clock.monotonic() < self._plan_again_at

    async def _show_output(self) -> Wait | None:
        if not self._outbox:
            return Wait(until=self._plan_again_at - self._from_database)
        after = self._counting_output(replace(self._base, active_seconds=self._active_seconds()))
        await self._commit(step.between(self._base, after, self._outbox), after)
        return None

    async def _commit_part(self) -> bool:
        """If the inbox is too large for one step, commit part of it and return True. Otherwise, return False."""
        part = planning.apply_part(self._planning_base(0), self._now(), self._dependencies.step_bytes_max)
        if part is None:
            return False
        await self._record()
        await self._commit(step.between(self._base, part, self._outbox), part)
        return True

    async def _record(self) -> None:
        """Add each decision, approval and result that the next step consumes to the audit chain, once."""
        decided, brought = (*approvals_given(self._base), *decisions(self._base)), results(self._base)
        await self._tasks.tool_calls.record(
            [note for note in decided if note not in self._recorded],
            [note for note in brought if note not in self._recorded],
        )
        self._recorded = frozenset((*decided, *brought))

    async def _report(self, plan: Plan) -> None:
        """Report withdrawn front-end calls to the registry, which counts them.

        The drive normally reports them after the step, when no more results can arrive. It retries until it succeeds,
        if necessary on the next worker. A run that ends has no next worker, so its last step reports before the commit,
        with a short timeout.
        """
        is_last = isinstance(plan.rest, Finish)
        self._withdrawn |= {note.call_id: note for note in withdrawn_results(self._base)}
        lost = self._withdrawn | {note.call_id: note for note in (withdrawn_results(plan.state) if is_last else ())}
        unreported = [note for note in lost.values() if note.call_id not in self._reported]
        if await self._tasks.tool_calls.report(unreported, seconds_max=_LAST_REPORT_SECONDS if is_last else 0.0):
            self._reported.update(note.call_id for note in unreported)

    # Ledger access.

    async def _answered(self, request: Callable[[], Awaitable[T]]) -> T:
        """Return the ledger's response. Retry until there is one.

        The duration of an outage does not count as active time.
        """
        clock = self._dependencies.clock
        started = clock.monotonic()
        try:
            return await self._retry.until_answered(request)
        finally:
            waited = clock.monotonic() - started
            if waited > _OUTAGE_SECONDS:
                self._active_from += waited

    async def _load(self) -> Loaded:
        self._woken = False
        return self._prepared(await self._answered(lambda: self._dependencies.ledger.load(self.claim)))

    def _prepared(self, loaded: Loaded) -> Loaded:
        self._set_time(loaded.now)
        run = loaded.state.run
        options = as_deployed(run.options, self._dependencies.approvals_required)
        return replace(loaded, state=replace(loaded.state, run=replace(run, options=options)))

    def _spans_of(self, loaded: Loaded) -> RunSpans:
        if self._spans is None:
            tracing = self._dependencies.tracing
            self._spans = RunSpans(tracing, self.claim, loaded.state, is_failing=self._is_failing)
        return self._spans

    def _has_lapsed_offer(self) -> bool:
        """Return whether an offer's deadline has passed.

        Only the ledger knows whether a client holds a lease on the call.
        """
        now = self._now()
        offered = (call for call in self._base.open_calls if call.state is CallState.OFFERED)
        return any(call.deadline_time is not None and call.deadline_time <= now for call in offered)

    async def _read_inbox(self) -> None:
        self._woken = False
        if others_change_calls(self._base):
            self._base = (await self._load()).state
            return
        self._base = await self._answered(lambda: self._dependencies.ledger.read_inbox(self.claim, self._base))

    async def _commit(self, planned: Step, after: State, *, facts_taken: int = 0) -> bool:
        """Write a step and return whether the ledger accepted it.

        If the ledger refused the step, the base is reloaded, and the step must be planned again.
        """
        commit_id = self._dependencies.ids.new("cmt")
        reported = len(self._outbox)
        if self._spans is not None and (planned.delegations or self._spans.new_trace):
            delegations = self._spans.delegated(planned.delegations)
            planned = replace(planned, delegations=delegations, trace=self._spans.new_trace)
        if not self._has_written or shared_decisions(self._base):
            # A dropped drive's step with the same epoch may still be in flight. Also, a call must not progress before
            # all of its approvals are in the log.
            planned = replace(planned, after_seq=self._base.run.last_seq)
        try:
            answer = await self._answered(lambda: self._dependencies.ledger.commit(self.claim, commit_id, planned))
        except (InboxChanged, IllegalTransition):
            known_seq = self._base.run.last_seq
            self._base = (await self._load()).state
            self._refusals += self._base.run.last_seq == known_seq
            if self._refusals > _REFUSALS_MAX:
                raise
            return False
        self._refusals = 0
        self._has_written = True
        if self._spans is not None:
            self._spans.new_trace = ""
        self._discarded_usage = Usage()
        self._shown = self._shown_with(answer.first_seq)
        has_pause = answer.HasField("output_pause_seconds")
        self._tasks.output_shown(answer.output_pause_seconds if has_pause else None)
        for fact in self._facts[:facts_taken]:
            if isinstance(fact, ModelAnswered | ModelFailed | ModelCut):
                self._tasks.limits.count(fact.model_call_id)
        del self._outbox[:reported], self._facts[:facts_taken]
        self._set_time(seconds(answer.time))
        is_kept = planned.lease_action is LeaseAction.KEEP and after.run.state not in ENDED
        if is_kept and may_have_been_held(self._base, after):
            self._base = (await self._load()).state
        else:
            left = answer.shared_tokens_left if answer.HasField("shared_tokens_left") else None
            self._base = step.committed(after, answer.last_seq, left)
        if answer.commands_pending:
            self.wake()
        if planned.delegations:
            self._dependencies.run_due()
        return True

    def _step(self, plan: Plan) -> Step:
        park = plan.rest if isinstance(plan.rest, Park) else None
        planned = step.between(
            self._base,
            plan.state,
            (*self._outbox, *plan.events),
            lease_action=LeaseAction.PARK if park else LeaseAction.KEEP,
            wake_time=park.wake_time if park else None,
        )
        run = plan.state.run
        is_done = isinstance(plan.rest, Finish) and run.state is RunState.COMPLETED
        has_answered = is_done and run.usage.model_calls > 0 and run.output_text != ""
        return replace(planned, asks_title=self._dependencies.makes_titles and has_answered and not run.depth)

    async def _release(self) -> DriveEnd:
        """Release the run in a step that commits the known facts but makes no new decisions.

        If there are no facts, `Worker.hand_over` releases the run.
        """
        await self._tasks.cancel_all()
        self._collect(at_once=True)
        while await self._commit_part():
            pass
        if self._facts or self._outbox or self._discarded_usage != Usage():
            await self._record()
            now = self._now()
            taken = self._fitting_facts()
            state, reported = planning.apply_all(self._planning_base(taken), self._facts_with_seqs(taken), now)
            events = (*self._outbox, *reported)
            await self._commit(step.between(self._base, state, events, lease_action=LeaseAction.RELEASE), state)
        return DriveEnd.HANDED_OVER

    # Facts and events.

    def _collect(self, *, at_once: bool) -> None:
        """Collect new facts, progress and any output that is due. If there are facts, all output is due."""
        progress = self._tasks.progress(at_once=at_once)
        if self._base.run.is_job:
            self._facts += progress
        self._facts += self._tasks.facts()
        self._outbox += (each for each in progress if self._has_news(each))
        self._outbox += self._tasks.output(at_once=at_once or bool(self._facts))

    def _has_news(self, progress: ToolProgress) -> bool:
        """Return whether there is progress to show. A checkpoint alone has no new fraction or message."""
        latest, last = (progress.fraction, progress.message), self._progress_shown.get(progress.call_id)
        self._progress_shown[progress.call_id] = latest
        return latest != (None, "") and not (progress.has_checkpoint and latest == last)

    async def _cancel_model(self, failure: RunFailure | None) -> None:
        cut = await self._tasks.cancel_model()
        self._collect(at_once=True)
        if cut is not None:
            # Keep the reason, because once the model call is gone, no rule would detect the round's limit again.
            self._facts.append(replace(cut, failure=failure))

    def _fitting_facts(self) -> int:
        """Return how many facts fit into one step, counted from the first.

        The results of a batch can be large.
        """
        sizes = [len(result.content_json) if result else 0 for result in map(_result_of, self._facts)]
        return step.fitting(sizes, self._dependencies.step_bytes_max)

    def _facts_with_seqs(self, taken: int) -> tuple[Fact, ...]:
        """Return the first `taken` facts. Add the seqs of all output to facts that end a model call."""
        shown = self._shown_with(self._base.run.last_seq + 1)
        return tuple(
            replace(fact, shown=shown) if isinstance(fact, ModelAnswered | ModelFailed | ModelCut) else fact
            for fact in self._facts[:taken]
        )

    def _shown_with(self, first_seq: int) -> Shown:
        seqs = [seq for seq, event in enumerate(self._outbox, first_seq) if isinstance(event, OutputDelta)]
        return Shown(first_seq=self._shown.first_seq or seqs[0], last_seq=seqs[-1]) if seqs else self._shown

    async def _wait(self, until: float) -> None:
        due = self._tasks.output_due_at()
        if (progress_due := self._tasks.progress_due_at()) is not None:
            until = min(until, progress_due)
        wait = (until if due is None else min(until, due)) - self._dependencies.clock.monotonic()
        await within(None if math.isinf(wait) else max(_WAIT_SECONDS_MIN, wait), self._signal.wait())

    def _planning_base(self, taken: int) -> State:
        # A call that has ended must not start again, even if a later step reports its end.
        ended = {fact.call_id for fact in self._facts[taken:] if isinstance(fact, CallExecuted)}
        under_way, active_seconds = self._tasks.under_way | ended, self._active_seconds()
        base = replace(self._base, under_way=under_way, active_seconds=active_seconds)
        return self._counting_output(budget.with_discarded(base, self._discarded_usage))

    def _counting_output(self, state: State) -> State:
        """Count the usage for output that is about to be shown.

        If this worker dies, the next one has no other way to learn of this usage.
        """
        opened, usage = state.loop.model_call, self._tasks.model_usage()
        if opened is None or usage is None or not any(isinstance(event, OutputDelta) for event in self._outbox):
            return state
        return replace(state, run=replace(state.run, usage=opened.usage_before + usage))

    def _set_time(self, database_time: float) -> None:
        self._clock_offset = database_time - self._dependencies.clock.monotonic()

    def _now(self) -> float:
        """Return the database's time, which lags by at most one response. It may jump, so use it only for deadlines."""
        return self._dependencies.clock.monotonic() + self._clock_offset

    def _active_seconds(self) -> float:
        return self._dependencies.clock.monotonic() - self._active_from


def _result_of(fact: Fact) -> CallResult | None:
    match fact:
        case CallExecuted():
            return fact.ended.result
        case CallStopped():
            return fact.answer.result.result if fact.answer.result else None
        case _:
            return None
