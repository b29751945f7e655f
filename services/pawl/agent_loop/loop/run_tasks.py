"""Performs the work that a run's plans request, in tasks alongside the run's drive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, assert_never

from msgspec.structs import replace

from pawl.agent_loop.agents.rules import AgentVersion, ModelTerms, draft_name
from pawl.agent_loop.goals import judging
from pawl.agent_loop.loop.background_steps import BackgroundSteps
from pawl.agent_loop.loop.ledger import WorkerLedgerClient, calls_of_run
from pawl.agent_loop.loop.model_call import ModelCall, TermsCache, request_of
from pawl.agent_loop.loop.model_limits import ModelLimits
from pawl.agent_loop.loop.ports import AgentReader, Meter, Randomness, Registry
from pawl.agent_loop.loop.rules import answering, hints, jobs, output, proposals, step
from pawl.agent_loop.loop.rules.answering import usage_of
from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.decision import (
    CheckFallback,
    Execute,
    PinTools,
    PlanUndo,
    Propose,
    ReadAgent,
    ReadCalls,
    ReadProgram,
    StartModel,
    StopCalls,
)
from pawl.agent_loop.loop.rules.fact import (
    AgentRead,
    CallChecked,
    CallExecuted,
    CallsRead,
    CallStopped,
    Fact,
    FallbackChecked,
    ModelAnswered,
    ModelCut,
    ModelFailed,
    OutputChecked,
    OutputDelta,
    RunRefused,
    ToolProgress,
)
from pawl.agent_loop.loop.rules.history import ReasoningEcho
from pawl.agent_loop.loop.rules.planning import Work
from pawl.agent_loop.loop.rules.retry import KEY_GONE
from pawl.agent_loop.loop.rules.run import PinnedAgent, Run, limit_failure
from pawl.agent_loop.loop.rules.state import MODEL, READ, START, State, check_of, stop_of
from pawl.agent_loop.loop.rules.tool import ProposedCall, Tool, Verdict
from pawl.agent_loop.loop.run_tools import RunTools
from pawl.agent_loop.loop.spans import RunSpans, Tracing, answered, executed
from pawl.agent_loop.loop.tasks import Tasks
from pawl.agent_loop.loop.tool_calls import ToolCalls
from pawl.agent_loop.model.request import ModelPort, ModelRequest
from pawl.agent_loop.model.shared import SharedModels
from pawl.agent_loop.undo import planning as undo_planning
from pawl.agent_loop.workflows import reading
from pawl.agent_loop.workflows.reading import Graphs
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, IdSource, StoreId, UserId
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.retry import Retry
from pawl.errors import AgentNotFound, CallNotFound, ToolNotFound
from pawl.values import CallState, Disposition, Progress, Usage

# Minimum time between two progress reports of a job. Only the latest report is kept in between.
JOB_PROGRESS_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDependencies:
    """Dependencies that all of a worker's runs share.

    `run_due` makes the worker poll immediately, and `run_due_at` makes it poll at a given monotonic time.
    """

    ledger: WorkerLedgerClient
    agents: AgentReader
    graphs: Graphs
    registry: Registry
    model: ModelPort
    clock: Clock
    ids: IdSource
    random: Randomness
    meter: Meter
    default_model: str
    reasoning_echo: ReasoningEcho = ReasoningEcho.AUTO
    # True if models get a tool for background calls instead of extra parameters.
    background_as_tool: bool = False
    takes_images: bool = False
    step_bytes_max: int = step.BYTES_MAX
    run_due: Callable[[], None] = lambda: None
    run_due_at: Callable[[float], None] = lambda _: None
    makes_titles: bool = False
    # Minimum number of users who must approve a gated call, including in runs that started under a lower setting.
    approvals_required: int = 1
    background_steps: BackgroundSteps = field(default_factory=BackgroundSteps)
    terms: TermsCache = field(default_factory=TermsCache)
    # Returns whether a principal's API key is no longer valid.
    credential_is_gone: Callable[[Principal], bool] = lambda _: False
    # None if there are no limits per minute.
    shared: SharedModels | None = None
    # None if this process records no traces.
    tracing: Tracing | None = None


class RunTasks(Tasks):
    """Performs the work that plans request. Sets `signal` when there is something to collect.

    `now` returns database time, and `active_seconds` returns how long the run has been active. `own_tools` holds the
    tools that the run's client supplied.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        run: Run,
        *,
        retry: Retry,
        signal: asyncio.Event,
        now: Callable[[], float],
        active_seconds: Callable[[], float],
        spans: RunSpans,
        own_tools: Sequence[Tool] = (),
    ) -> None:
        super().__init__(signal)
        self._spans = spans
        self._dependencies = dependencies
        self._signal = signal
        self._now = now
        self._active_seconds = active_seconds
        self._retry = retry
        self.tool_calls = ToolCalls(
            run,
            registry=dependencies.registry,
            retry=retry,
            clock=dependencies.clock,
            own_tools=own_tools,
            credential_is_gone=dependencies.credential_is_gone,
        )
        self._progress: dict[CallId, ToolProgress] = {}
        self._progress_seconds = JOB_PROGRESS_SECONDS if run.is_job else 0.0
        self._progress_not_before = 0.0
        self._run_tools = RunTools(self.tool_calls, own_tools)
        self._model_call: ModelCall | None = None
        self._model_before: ModelCall | None = None
        self.limits = ModelLimits(dependencies.shared, retry, dependencies.ids, dependencies.random, now)
        # Cleared while a model call is running and the step that announces it is not yet durable.
        self._is_durable = asyncio.Event()
        self._is_durable.set()

    def progress(self, *, at_once: bool) -> tuple[ToolProgress, ...]:
        """Return and clear the latest progress of each call if it is due or `at_once` is set."""
        due = self.progress_due_at()
        if due is None or not (at_once or due <= self._dependencies.clock.monotonic()):
            return ()
        progress = tuple(self._progress.values())
        self._progress.clear()
        self._progress_not_before = self._dependencies.clock.monotonic() + self._progress_seconds
        return progress

    def progress_due_at(self) -> float | None:
        """Return the monotonic time at which progress must be shown, or None if there is none."""
        return self._progress_not_before if self._progress else None

    def output(self, *, at_once: bool) -> tuple[OutputDelta, ...]:
        """Return and clear the model's output if it is due or `at_once` is set."""
        due = self.output_due_at()
        if self._model_call is None or due is None:
            return ()
        return self._model_call.take_output() if at_once or due <= self._dependencies.clock.monotonic() else ()

    def output_shown(self, pause_seconds_min: float | None) -> None:
        """Record that all output returned so far is durable. Unless it is None, set the minimum pause from now on."""
        if self._model_call:
            self._model_call.output_shown(pause_seconds_min)

    async def cancel_all(self) -> None:
        await super().cancel_all()
        self.limits.count_all()

    def output_due_at(self) -> float | None:
        """Return the monotonic time at which output must be shown, or None if there is none."""
        return self._model_call.output_due_at() if self._model_call else None

    def model_usage(self) -> Usage | None:
        """Return the usage of the last model call so far, or None if there was none."""
        return usage_of(self._model_call.usage()) if self._model_call else None

    def start_work(self, work: Work, state: State, due_at: float) -> None:
        """Start the work that `state` announced. `state` must be durable. The work has been due since `due_at`."""
        start = self.start
        match work:
            case PinTools():
                start(START, self._run_tools.pin(state))
            case PlanUndo():
                channel = self._dependencies.ledger.channel
                start(
                    START, undo_planning.plan(state.run, channel=channel, tool_calls=self.tool_calls, retry=self._retry)
                )
            case ReadProgram():
                start(START, self._read_program(state))
            case ReadCalls():
                start(READ, self._read(work, state.run))
            case ReadAgent():
                start(work.call_id, self._read_agent(work, state.run))
            case Propose():
                for call in work.calls:
                    start(check_of(call.call_id), self._check(call, state.run))
            case StartModel():
                self.start_model(work, state, due_at)
            case Execute():
                for call_id in work.call_ids:
                    start(call_id, self._execute(call_id, state))
            case CheckFallback():
                start(check_of(work.call_id), self._check_fallback(work.call_id, state))
            case StopCalls():
                for call_id in work.call_ids:
                    start(stop_of(call_id), self._stop(call_id, state))
            case _:
                assert_never(work)

    def start_model(self, work: StartModel, state: State, due_at: float, *, is_early: bool = False) -> None:
        """Start a model call.

        With `is_early`, the call starts before `state` is durable, and `confirm_model_call` or
        `discard_early_model_call` must follow.
        """
        if is_early:
            self._model_before = self._model_call
            self._is_durable.clear()
        self._model_call = ModelCall(
            state,
            model=self._dependencies.model,
            monotonic=self._dependencies.clock.monotonic,
            on_output=self._signal.set,
            due_at=due_at + work.delay_seconds,
        )
        self.start(MODEL, self._call_model(self._model_call, state, work.delay_seconds))

    def confirm_model_call(self) -> None:
        """Record that an early model call's state is durable."""
        self._model_before = None
        self._is_durable.set()

    async def discard_early_model_call(self) -> Usage:
        """Cancel the early model call, if there is one, as if it had never started. Return its usage."""
        call = self._model_call
        if self._is_durable.is_set() or call is None:
            return Usage()
        await self.cut(MODEL)
        self._model_call = self._model_before
        self.confirm_model_call()
        call.measure("forgotten", self._dependencies.meter)
        self.limits.count(call.model_call_id)
        return usage_of(call.usage())

    async def cancel_model(self) -> ModelCut | None:
        """Cancel the model call. Return the output received so far, or None if no call was running."""
        call = self._model_call
        if call is None or not await self.cut(MODEL):
            return None
        call.measure("cut", self._dependencies.meter)
        return ModelCut(answer=call.answer(), model_call_id=call.model_call_id)

    async def _call_model(self, call: ModelCall, state: State, delay_seconds: float) -> Fact:
        return replace(await self._called(call, state, delay_seconds), model_call_id=call.model_call_id)

    async def _called(self, call: ModelCall, state: State, delay_seconds: float) -> ModelAnswered | ModelFailed:
        if delay_seconds:
            await self._dependencies.clock.sleep(delay_seconds)
        tools = await self._run_tools.pinned(state)
        request = request_of(
            replace(state, active_seconds=self._active_seconds()),
            tools,
            default_model=self._dependencies.default_model,
            echo=self._dependencies.reasoning_echo,
            takes_images=self._dependencies.takes_images,
            background_as_tool=self._dependencies.background_as_tool,
        )
        model_terms = await self._terms(state.run)
        request = replace(request, store_id=state.run.store_id, server=model_terms.model_server)
        refused = self._refused(call, model_terms, request)
        ended = refused or await self._stream(call, request, state, model_terms)
        await self._is_durable.wait()
        outcome = ended.error.outcome if isinstance(ended, ModelFailed) else "answered"
        call.measure(outcome, self._dependencies.meter)
        if isinstance(ended, ModelFailed):
            if ended.used_up is not None:
                self._dependencies.meter.model_call_waits(ended.used_up.kind)
            return ended
        opened = state.loop.model_call
        if opened is None or opened.summary:
            return ModelAnswered(answer=ended)
        calls = proposals.draft(
            state.run,
            ended,
            without_tools=opened.without_tools,
            now=self._now(),
            new_call_id=lambda: CallId(self._dependencies.ids.new("call")),
        )
        as_tool = self._dependencies.background_as_tool
        calls, terms = jobs.extract_terms(calls, tools, self._now(), as_tool=as_tool)
        known = [tool.name for tool in state.run.tools]
        is_near_loop = answering.may_be_stuck(state.loop, calls, state.run.options.limits.identical_calls_max)
        proposed = proposals.to_check(state.run, calls)
        verdicts = await self._verdicts(proposed, known, may_read=not (is_near_loop or terms))
        return ModelAnswered(
            answer=ended,
            calls=calls,
            verdicts=hints.for_model(state.run, proposed, verdicts, tools, as_tool=as_tool),
            output=await self._checked_output(state, ended),
            terms=terms,
        )

    async def _stream(
        self, call: ModelCall, request: ModelRequest, state: State, terms: ModelTerms
    ) -> ModelAnswer | ModelFailed:
        take = self.limits.taking(call, request, state, terms)
        with self._spans.model_call(request) as span:
            started, error = self._dependencies.clock.monotonic(), "cancelled"
            try:
                ended = await call.stream(request, self._dependencies.random, take)
                error = ended.error.reason if isinstance(ended, ModelFailed) else ""
            finally:
                first = None if call.first_output_at is None else call.first_output_at - started
                answered(span, call.answer(), error_type=error, first_seconds=first)
                self.limits.ended(call, state.run.store_id, request.server)
            return ended

    def _refused(self, call: ModelCall, terms: ModelTerms, request: ModelRequest) -> ModelFailed | None:
        if self.tool_calls.key_is_gone:
            return ModelFailed(error=KEY_GONE, answer=call.answer(), jitter=0.0)
        return call.refused(terms, request.model)

    async def _terms(self, run: Run) -> ModelTerms:
        needed = self._dependencies

        async def read(store_id: StoreId, user_id: UserId, name: str) -> ModelTerms:
            return await self._retry.until_answered(partial(needed.agents.model_terms, store_id, user_id, name))

        return await needed.terms.of(run, needed.clock.monotonic(), read)

    async def _checked_output(self, state: State, answer: ModelAnswer) -> OutputChecked | None:
        form, opened = state.run.options.response_format, state.loop.model_call
        may_end = not answer.calls or (opened is not None and opened.without_tools)
        if form is None or not may_end or output.is_refusal(answer):
            return None
        return await self.tool_calls.check_output(form.schema_json, output.document(answer.text))

    async def _execute(self, call_id: CallId, state: State) -> Fact:
        call = state.calls[call_id]

        def on_progress(latest: Progress) -> None:
            self._progress[call_id] = ToolProgress.of(call, latest, self._progress.get(call_id))
            self._signal.set()

        unknowns, answers = state.loop.unknowns_resolved.get(call_id, 0), state.loop.answers.get(call_id, ())
        series = call.granted_series
        if series is not None and state.run.grant is not None:
            series = replace(series, grant_call_id=state.run.grant.call_id)
        with self._spans.tool_call(call) as span:
            ended = await self.tool_calls.execute(
                call, unknowns, on_progress, answers, series, traceparent=span.traceparent
            )
            executed(span, ended)
        self._dependencies.meter.call_executed(ended.outcome)
        return CallExecuted(call_id=call_id, ended=ended)

    async def _stop(self, call_id: CallId, state: State) -> Fact:
        await self.cut(call_id)
        return CallStopped(call_id=call_id, answer=await self.tool_calls.stop(state.calls[call_id]))

    async def _read_program(self, state: State) -> Fact:
        return await reading.read(
            state.run,
            self._dependencies.graphs,
            tool_calls=self.tool_calls,
            retry=self._retry,
            pins_tools=not (state.run.round or state.run.tools),
        )

    async def _read(self, work: ReadCalls, run: Run) -> Fact:
        ledger, until_answered = self._dependencies.ledger, self._retry.until_answered
        reads = (partial(ledger.call, run.store_id, run.user_id, call_id) for call_id in work.call_ids)
        try:
            calls = [await until_answered(read) for read in reads]
        except CallNotFound as error:
            message = "This run uses results of an earlier run, which was deleted."
            return RunRefused(failure=limit_failure(error.reason, message))
        if work.run_id:
            asked = (ledger.channel, run.store_id, run.user_id, work.run_id, judging.without_rest)
            calls += (await until_answered(partial(calls_of_run, *asked)))[-judging.EVIDENCE_CALLS_MAX :]
        return CallsRead(calls=tuple(calls), run_id=work.run_id)

    async def _read_agent(self, work: ReadAgent, run: Run) -> Fact:
        if work.is_workflow:
            find = partial(self._dependencies.graphs.version, run.store_id, work.name, work.version)
            version = await self._retry.until_answered(find)
            return AgentRead(call_id=work.call_id, workflow_version=version)
        delegates: tuple[str, ...] = ()
        if run.workflow is not None or run.goal is not None:
            # The agent was chosen by the author of the workflow or goal, not by another agent.
            delegates = (work.name,)
        elif run.agent is not None:
            delegates = await self._delegates(run, run.agent)
        agent: AgentVersion | None = None
        if work.name in delegates:
            read = partial(self._dependencies.agents.get_agent, run.store_id, work.name, 0)
            with suppress(AgentNotFound):
                agent = await self._retry.until_answered(read)
        return AgentRead(call_id=work.call_id, delegates=delegates, agent=agent)

    async def _delegates(self, run: Run, pinned: PinnedAgent) -> tuple[str, ...]:
        """Return the agents to which the run's agent may delegate. For a draft, use its current version."""
        agents, draft = self._dependencies.agents, draft_name(pinned.name)
        if draft:
            read = partial(agents.get_draft, run.store_id, run.user_id, draft)
        else:
            read = partial(agents.get_agent, run.store_id, pinned.name, pinned.version)
        try:
            return (await self._retry.until_answered(read)).definition.delegates_to
        except AgentNotFound:
            if not draft:
                raise
            return ()

    async def _check(self, call: Call, run: Run) -> Fact:
        if not run.tool_version(call.tool_name):
            return CallChecked(call=call, verdict=_not_found(call))
        known = [tool.name for tool in run.tools]
        verdicts = await self._verdicts(proposals.to_check(run, [call]), known, may_read=True)
        return CallChecked(call=call, verdict=verdicts[call.call_id])

    async def _verdicts(
        self, proposed: Sequence[ProposedCall], known: Sequence[str], *, may_read: bool
    ) -> dict[CallId, Verdict]:
        # A call that was not executed at once gets another span when it is.
        spans = {call.call_id: self._spans.start_tool_call(call) for call in proposed} if may_read else {}
        if any(span.traceparent for span in spans.values()):
            proposed = [replace(call, traceparent=spans[call.call_id].traceparent) for call in proposed]
        verdicts = await self.tool_calls.check(proposed, known, may_read=may_read)
        for call_id, verdict in verdicts.items():
            if verdict.result is not None:
                self._dependencies.meter.call_executed(verdict.result.outcome)
                executed(spans[call_id], verdict.result)
                spans[call_id].end()
        return verdicts

    async def _check_fallback(self, call_id: CallId, state: State) -> Fact:
        call = state.calls[call_id]
        instead = replace(call, state=CallState.PROPOSED, tool_name=call.fallback_tool_name)
        proposed = proposals.to_check(state.run, [instead])
        verdicts = await self.tool_calls.check(proposed, [tool.name for tool in state.run.tools])
        return FallbackChecked(call_id=call_id, verdict=verdicts[call_id])


def _not_found(call: Call) -> Verdict:
    return Verdict(
        call_id=call.call_id,
        disposition=Disposition.REFUSE,
        error_reason=ToolNotFound.reason,
        error_message=f"There is no tool {call.tool_name} that the user may call.",
    )
