"""Executes a run with its pure rules only: no tasks, no ledger, and time that only tests advance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pawl.agent_loop.loop.rules import budget, history, planning, proposals, step
from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.decision import (
    CheckFallback,
    Execute,
    Finish,
    Park,
    PinTools,
    StartModel,
    StopCalls,
    StopModel,
)
from pawl.agent_loop.loop.rules.fact import (
    CallExecuted,
    CallStopped,
    Cancel,
    Command,
    CommandKind,
    Decide,
    Fact,
    FallbackChecked,
    ModelAnswered,
    ModelCut,
    ModelFailed,
    OwnerEvent,
    Resolve,
    RoundStarted,
    Steer,
    ToolResult,
    ToolsPinned,
    TopUp,
)
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.run import FailureClass, Run, RunOptions
from pawl.agent_loop.loop.rules.state import MODEL, State
from pawl.agent_loop.loop.rules.tool import ExecutionResult, Stopped, Verdict
from pawl.agent_loop.model.request import CallPiece, Problem, UsageReport
from pawl.chassis.ids import CallId, CommandId, ConversationId, RunId, StoreId, UserId
from pawl.values import (
    ENDED,
    CallResolution,
    CallState,
    DecisionKind,
    Disposition,
    EffectClass,
    ExecutionContext,
    OfferFallback,
    Outcome,
    Question,
    RunState,
    StopCause,
)
from tests.fakes.model import check_history
from tests.simulation.checkers import CALL_MOVES, NEEDS_START

TOKENS_PER_ANSWER = 15

PENDING = {CallState.AWAITING_APPROVAL, CallState.OFFERED, CallState.ASKED}


def _verdict(disposition: Disposition, context: ExecutionContext = ExecutionContext.BACKEND, **fields: Any) -> Verdict:
    return Verdict(call_id=CallId(""), disposition=disposition, context=context, **fields)


_FRONTEND, _HUMAN = ExecutionContext.FRONTEND, ExecutionContext.HUMAN
VERDICTS = {
    "serial": _verdict(Disposition.RUN),
    "parallel": _verdict(Disposition.RUN, parallel=True),
    "lookup": _verdict(Disposition.RUN, effect_class=EffectClass.READ_ONLY, resource_keys=("a",)),
    "gated": _verdict(Disposition.APPROVE, digest="d"),
    "gated_front": _verdict(Disposition.APPROVE, _FRONTEND, digest="d"),
    "front": _verdict(Disposition.OFFER, _FRONTEND),
    "front_asks": _verdict(Disposition.OFFER, _FRONTEND, offer_fallback=OfferFallback.ASK_USER),
    "front_falls_back": _verdict(
        Disposition.OFFER, _FRONTEND, offer_fallback=OfferFallback.BACKEND_TOOL, fallback_tool_name="gated"
    ),
    "ask_by_default": _verdict(
        Disposition.ASK, _HUMAN, question=Question(question="Which?", default_answer="blue", timeout_seconds=60.0)
    ),
    "ask": _verdict(Disposition.ASK, _HUMAN, question=Question(question="Which?")),
    "refused": _verdict(Disposition.REFUSE, error_reason="TOOL_NOT_FOUND", error_message="no such tool"),
}

OK = ExecutionResult(outcome=Outcome.SUCCEEDED, result=CallResult(content_json=b'"done"'))
UNKNOWN = ExecutionResult(outcome=Outcome.UNKNOWN, result=CallResult(content_json=b"null", is_error=True))
ASKS = ExecutionResult(
    outcome=Outcome.INPUT_REQUIRED, result=CallResult(content_json=b"null"), question=Question(question="Really?")
)


def verdict_on(call: Call) -> Verdict:
    return replace(
        VERDICTS[call.tool_name], call_id=call.call_id, arguments_json=call.proposed_arguments.encode(), tool_version=1
    )


def answer(*names: str, text: str = "", arguments: Sequence[str] = ()) -> ModelAnswer:
    """Return an answer that calls these tools. By default, the arguments of each call are different."""
    written = arguments or [f'{{"n":{n}}}' for n in range(len(names))]
    return ModelAnswer(
        text=text,
        reasoning="",
        calls=tuple(
            CallPiece(call_id="same", name=name, arguments=given) for name, given in zip(names, written, strict=True)
        ),
        refusal="",
        provider_state_json=b"",
        usage=UsageReport(input_tokens=10, output_tokens=5),
        finish_reason="stop",
    )


@dataclass
class Simulation:
    """Plans, commits and remembers started work. The model returns `answers` in order, then plain text."""

    answers: list[ModelAnswer]
    options: RunOptions = field(default_factory=RunOptions)
    now: float = 1000.0
    base: State = field(init=False)
    facts: list[Fact] = field(default_factory=list)
    under_way: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    model_calls: int = 0
    tokens_served: int = 0
    tokens_granted: int = 0
    takeovers: int = 0
    breaks: int = 0
    events: list[OwnerEvent] = field(default_factory=list)
    cancelled: bool = False
    parked: bool = False
    ids: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.tokens_granted = self.options.limits.total_tokens_max
        run = Run(
            store_id=StoreId("s"),
            user_id=UserId("u"),
            conversation_id=ConversationId("c"),
            run_id=RunId("r"),
            options=self.options,
        )
        self.base = State(run=run, messages=(Message(role=Role.USER, run_id=RunId("r"), text="hello", number=1),))

    @property
    def run(self) -> Run:
        return self.base.run

    @property
    def calls(self) -> list[Call]:
        return sorted(self.base.calls.values(), key=lambda call: (call.round, call.index))

    def turn(self) -> None:
        """Plan, commit and start work until nothing can happen without new input."""
        while True:
            before = self.base
            plan = planning.plan(replace(self.base, under_way=frozenset(self.under_way)), self.facts, self.now)
            self.facts.clear()
            self._check(before, plan)
            self.events += plan.events
            self.base = step.committed(plan.state, 0, None)
            for work in plan.work:
                self._start_work(work)
            self.parked = isinstance(plan.rest, Park | Finish)
            if isinstance(plan.rest, StopModel):
                self.under_way.discard(MODEL)
                self.facts.append(ModelCut(answer=answer(text="par")))
            if not self.facts:
                return

    def _start_work(self, work: planning.Work) -> None:
        match work:
            case PinTools():
                self.facts.append(ToolsPinned(tools=()))
            case StartModel():
                assert not self.tokens_granted or self.tokens_served < self.tokens_granted, "the budget was exceeded"
                self.model_calls += 1
                self.under_way.add(MODEL)
                check_history(history.of_run(self.base))
            case Execute():
                assert not self.cancelled
                self.under_way.update(work.call_ids)
                self.started += work.call_ids
            case CheckFallback():
                call = self.base.calls[work.call_id]
                verdict = replace(verdict_on(replace(call, tool_name=call.fallback_tool_name)), call_id=call.call_id)
                self.facts.append(FallbackChecked(call_id=call.call_id, verdict=verdict))
            case StopCalls():
                for call_id in work.call_ids:
                    self.under_way.discard(call_id)
                    self.facts.append(CallStopped(call_id=call_id, answer=Stopped(stopped=True)))

    def _check(self, before: State, plan: planning.Plan) -> None:
        for call_id, call in before.calls.items():
            after = plan.state.calls[call_id]
            assert not call.settled or after == call, "a settled call changed"
            if after.state is not call.state:
                move = (call.state.name, after.state.name)
                assert move[1] in CALL_MOVES[move[0]].split(), f"the ledger would refuse {move}"
                assert move not in NEEDS_START or call.attempt, f"the ledger would refuse {move} before it began"
        for event in plan.events:
            if isinstance(event, RoundStarted):
                assert plan.state.open_calls == () or plan.state.run.state in ENDED
        if [work for work in plan.work if isinstance(work, StartModel)]:
            assert all(call.settled and call.result for call in plan.state.calls.values()), "the batch is open"

    # Events that can happen to the run.

    def model_answers(self) -> None:
        self.under_way.remove(MODEL)
        self.tokens_served += TOKENS_PER_ANSWER
        given = self.answers.pop(0) if self.answers else answer(text="done")
        opened = self.base.loop.model_call
        assert opened is not None
        calls = proposals.draft(
            self.run,
            given,
            without_tools=opened.without_tools,
            now=self.now,
            new_call_id=lambda: CallId(f"call_{next(self.ids)}"),
        )
        verdicts = {call.call_id: verdict_on(call) for call in calls if call.state is CallState.PROPOSED}
        self.facts.append(ModelAnswered(answer=given, calls=calls, verdicts=verdicts))
        self.turn()

    def model_fails(self, *, is_counted: bool = True) -> None:
        self.breaks += 1
        self.under_way.remove(MODEL)
        broken = answer(text="half") if is_counted else replace(answer(text="half"), usage=UsageReport())
        self.tokens_served += TOKENS_PER_ANSWER * is_counted
        error = Problem(
            reason="STREAM_TRUNCATED", failure_class=FailureClass.PROVIDER, retryable=True, message="It broke off."
        )
        self.facts.append(ModelFailed(error=error, answer=broken, jitter=0.5))
        self.turn()

    def needs(self, tokens: int) -> None:
        self.under_way.remove(MODEL)
        nothing = replace(answer(), usage=UsageReport())
        self.facts.append(ModelFailed(error=budget.TOO_LITTLE, answer=nothing, jitter=0.5, tokens_needed=tokens))
        self.turn()

    def ends(self, call_id: str, ended: ExecutionResult = OK) -> None:
        self.under_way.remove(call_id)
        self.facts.append(CallExecuted(call_id=CallId(call_id), ended=ended))
        self.turn()

    def sends(self, *kinds: CommandKind) -> None:
        commands = [
            Command(command_id=CommandId(f"cmd_{next(self.ids)}"), user_id=UserId("u"), time=self.now, kind=kind)
            for kind in kinds
        ]
        self.cancelled |= any(isinstance(kind, Cancel) for kind in kinds)
        self.base = replace(self.base, commands=tuple(commands))
        self.turn()

    def decides(self, call: Call, kind: DecisionKind) -> None:
        self.sends(
            Decide(
                call_id=call.call_id,
                kind=kind,
                arguments_json=b'{"edited":true}',
                edited_digest="e",
                reason="because",
                answer="yes",
            )
        )

    def returns(self, call: Call, *, is_error: bool = False) -> None:
        self.sends(ToolResult(call_id=call.call_id, result=CallResult(content_json=b'"seen"', is_error=is_error)))

    def steers(self, text: str = "something else") -> None:
        self.sends(Steer(text=text))

    def tops_up(self, tokens: int) -> None:
        self.tokens_granted += tokens
        self.sends(TopUp(tokens=tokens))

    def cancels(self) -> None:
        self.sends(Cancel(cause=StopCause.USER))

    def resolves(self, call: Call, resolution: CallResolution) -> None:
        self.sends(Resolve(call_id=call.call_id, resolution=resolution, content_json=b'"it did"'))

    def passes(self, seconds: float, *, parked: bool = True) -> None:
        self.now += seconds
        if not parked:
            self.base = replace(self.base, active_seconds=self.base.active_seconds + seconds)
        self.turn()

    def is_taken_over(self) -> None:
        self.takeovers += 1
        self.under_way.clear()
        self.facts.clear()
        self.base = replace(
            self.base,
            under_way=frozenset(),
            model_starts_in=None,
            tools_pinned=False,
            active_seconds=self.run.active_seconds,
        )
        self.turn()

    def finishes(self) -> None:
        """Finish everything until the run ends: running work succeeds and waits time out."""
        for _ in range(200):
            if self.run.state in ENDED:
                return
            if MODEL in self.under_way:
                self.model_answers()
            elif running := sorted(self.under_way):
                self.ends(running[0])
            elif self.run.state is RunState.NEEDS_ATTENTION:
                self.resolves(self.base.calls[CallId(self.base.loop.in_doubt[0])], CallResolution.TELL_MODEL)
            else:
                self.passes(100_000)
        raise AssertionError(f"the run does not end: {self.base}")


def started(*batches: Sequence[str], options: RunOptions | None = None) -> Simulation:
    """Return a run whose model has answered with the first of these batches of calls."""
    run = Simulation([answer(*names) for names in batches], options or RunOptions())
    run.turn()
    run.model_answers()
    return run


def run_state(run: Simulation) -> RunState:
    """Return the state of a run in a way that mypy does not narrow."""
    return run.run.state
