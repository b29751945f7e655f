"""Applies decisions until the run must wait or end. Plans the step to commit and the work that follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import answering, budget, delegation, fact_rules, job_program, jobs, programs, step
from pawl.agent_loop.loop.rules.command_rules import apply_command
from pawl.agent_loop.loop.rules.decide import IN_MOTION, decide, not_made
from pawl.agent_loop.loop.rules.decision import (
    Advance,
    CallModel,
    CheckFallback,
    Decision,
    Decline,
    Delegate,
    EnterSteers,
    Execute,
    Fail,
    Finish,
    Park,
    PinTools,
    PlanUndo,
    Propose,
    ReadAgent,
    ReadCalls,
    ReadProgram,
    Resume,
    Settle,
    StartModel,
    StopCalls,
    StopModel,
    TakeOver,
    TellProgress,
    Wait,
)
from pawl.agent_loop.loop.rules.fact import (
    TAKEOVER,
    Cancel,
    Command,
    Fact,
    OwnerEvent,
    RoundRetrying,
    RoundStarted,
    Shown,
    Steer,
    Warned,
)
from pawl.agent_loop.loop.rules.fact_rules import apply_fact
from pawl.agent_loop.loop.rules.loop_state import OpenModelCall
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.state import MODEL, State
from pawl.chassis.ids import CallId
from pawl.values import CallState, RunState, WaitKind

_ROUNDS_NEAR_LIMIT: Final = 0.8
# A correct set of rules never makes more decisions than this in a row without starting work.
_DECISIONS_MAX: Final = 1000

# Decisions that start work once the step is durable.
Work: TypeAlias = (
    PinTools
    | PlanUndo
    | ReadProgram
    | ReadCalls
    | ReadAgent
    | Propose
    | StartModel
    | Execute
    | CheckFallback
    | StopCalls
)

# Decisions that end a plan. After StopModel, planning continues once the model call is cancelled.
Rest: TypeAlias = Wait | Park | Finish | StopModel


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to commit (`events`, and the difference between `state` and the ledger), and what to do next."""

    state: State
    events: tuple[OwnerEvent, ...]
    work: tuple[Work, ...]
    rest: Rest


def plan(base: State, facts: Sequence[Fact], now: float) -> Plan:
    """Return the next step, given the ledger's state, its commands and new facts.

    The function is pure: the same arguments always result in the same plan. If the ledger refuses a step, the caller
    plans again from a fresh base.
    """
    state, events = apply_all(base, facts, now)
    found = advance(state, events, now, written=base.run.state)
    after, more = programs.of(found.state.run).reported(state, found.state)
    return replace(found, state=after, events=(*found.events, *more))


def apply_all(base: State, facts: Sequence[Fact], now: float) -> tuple[State, list[OwnerEvent]]:
    """Apply the unconsumed commands and these facts. Return the state and the events that report the facts.

    The state includes the program's records of settled calls, because later decisions may depend on them.
    """
    state = _apply_commands(base, sorted(base.commands, key=_priority), now)
    events: list[OwnerEvent] = []
    for fact in facts:
        state, produced = apply_fact(state, fact, now)
        events += produced
    after, more = programs.of(state.run).reported(base, state)
    return after, [*events, *more]


def apply_part(base: State, now: float, bytes_max: int) -> State | None:
    """Apply as many unconsumed commands as fit into one step.

    Return None if all of them fit, because the step may then also contain other changes.
    """
    commands = sorted(base.commands, key=_priority)
    count = step.fitting([_bytes_of(base, command) for command in commands], bytes_max)
    if count == len(commands):
        return None
    state = _apply_commands(base, commands[:count], now)
    if state.run.state is not RunState.CANCELLING:
        return state
    # The ledger refuses a step in which a call of a cancelled run progresses.
    nearer = [call for call in state.open_calls if call is not base.calls.get(call.call_id)]
    return state.with_calls(not_made(call, now) for call in nearer)


def _apply_commands(base: State, commands: Sequence[Command], now: float) -> State:
    state = base
    # A result that the ledger accepted counts even if an earlier message withdraws the call, because receipts are
    # final. A waiting tool does not continue with an answer that arrived along with a cancellation.
    for command in commands:
        state = apply_command(state, command, now)
    taken = tuple(command.command_id for command in commands)
    left = tuple(command for command in base.commands if command.command_id not in taken)
    return replace(state, commands=left, consumed=taken)


def _bytes_of(state: State, command: Command) -> int:
    call = state.calls.get(getattr(command.kind, "call_id", CallId("")))
    return step.size_bytes(command) + (0 if call is None else step.size_bytes(call))


def _priority(command: Command) -> int:
    return 0 if isinstance(command.kind, Cancel) else 2 if isinstance(command.kind, Steer) else 1


def advance(state: State, events: Sequence[OwnerEvent], now: float, *, written: RunState) -> Plan:
    """Return the plan that follows from `state`. `written` is the run's state in the ledger."""
    produced = list(events)
    work: list[Work] = []
    for _ in range(_DECISIONS_MAX):
        decision = decide(state, now)
        if isinstance(decision, Finish) and decision.state is RunState.COMPLETED and written not in IN_MOTION:
            # The run resumes and ends in the same plan, but the ledger needs one step for resuming and one for ending.
            decision = Resume()
        if isinstance(decision, Work):
            work.append(decision)
        state, more = enact(state, decision, now)
        produced += more
        if isinstance(decision, Wait | Park | Finish | StopModel):
            return Plan(state=state, events=tuple(produced), work=tuple(work), rest=decision)
        if isinstance(decision, Resume) or (isinstance(decision, Settle) and decision.is_part):
            return Plan(state=state, events=tuple(produced), work=tuple(work), rest=Wait(until=now))
    raise RuntimeError("the loop's rules do not terminate")


def enact(state: State, decision: Decision, now: float) -> tuple[State, tuple[OwnerEvent, ...]]:
    match decision:
        case Settle():
            return state.with_calls(decision.calls), ()
        case Decline():
            return fact_rules.answered(state, state.calls[decision.call_id], None), ()
        case EnterSteers():
            return _enter_steers(programs.of(state.run).concluded(state, continues=True)), ()
        case Fail():
            return replace(state, loop=replace(state.loop, failure=decision.failure)), ()
        case (
            PinTools()
            | PlanUndo()
            | ReadProgram()
            | ReadCalls()
            | ReadAgent()
            | Propose()
            | CheckFallback()
            | StopCalls()
        ):
            return _with_work(state, *decision.names), ()
        case Advance():
            return _advance(state, decision), ()
        case TellProgress():
            return job_program.progress_told(state, now), ()
        case Resume():
            return _running(state), ()
        case CallModel():
            return _announce(state, decision)
        case TakeOver():
            return _take_over(state)
        case StartModel():
            return _start_model(state), ()
        case Execute():
            return _start_calls(state, decision, now), ()
        case Delegate():
            return _running(_delegated(state, decision.call_id, now)), ()
        case Park():
            return _park(state, decision), ()
        case Finish():
            return _finish(state, decision), ()
        case StopModel() | Wait():
            return state, ()
        case _:
            assert_never(decision)


def _advance(state: State, decision: Advance) -> State:
    if decision.output_json is not None:
        run = replace(state.run, output_json=decision.output_json, output_text=decision.output_text)
        state = replace(state, run=run)
    taken = state.events_taken + decision.events_taken
    state = replace(state, loop=replace(state.loop, cursor=decision.cursor), events_taken=taken)
    for call in decision.calls:
        state = fact_rules.with_round(state, call.round)
    return _running(state).with_calls(decision.calls)


def _with_work(state: State, *names: str) -> State:
    return replace(state, under_way=state.under_way.union(names))


def _enter_steers(state: State) -> State:
    messages = [Message(role=Role.USER, run_id=state.run.run_id, text=text) for text in state.loop.steers]
    return replace(state, messages=(*state.messages, *messages), loop=replace(state.loop, steers=()))


def _start_calls(state: State, decision: Execute, now: float) -> State:
    calls = [state.calls[call_id] for call_id in decision.call_ids]
    started = [replace(call, state=CallState.RUNNING, attempt=call.attempt + 1, start_time=now) for call in calls]
    return _with_work(_running(state.with_calls(started)), *decision.call_ids)


def _start_model(state: State) -> State:
    opened = state.loop.model_call
    if opened is not None and opened.held:
        loop = replace(
            state.loop, model_call=replace(opened, held=False, next_try_time=None), top_up_deadline_time=None
        )
        state = replace(state, loop=loop)
    # A redriven run is QUEUED with its model call open. Mark it as running now: otherwise the ledger would report that
    # after the output, and the message would reference the wrong events.
    return replace(_with_work(_running(state), MODEL), model_starts_in=None, used_up=None)


def _park(state: State, decision: Park) -> State:
    if WaitKind.BUDGET in decision.waits:
        opened = state.loop.model_call
        held = replace(opened, held=True) if opened else None
        loop = replace(state.loop, model_call=held, top_up_deadline_time=decision.wake_time)
        state = replace(state, loop=loop, model_starts_in=None)
    tokens_needed = budget.missing(state) if WaitKind.BUDGET in decision.waits else 0
    run = replace(state.run, state=decision.state, waits=decision.waits, tokens_needed=tokens_needed)
    return replace(state, run=run)


def _finish(state: State, decision: Finish) -> State:
    if state.loop.model_call is not None:
        # The model call is dropped, but the output of an earlier attempt is kept.
        state = answering.with_partial(state, Shown())
    # Keep the user's new messages, although only the next run will answer them.
    state = _enter_steers(programs.of(state.run).concluded(state, continues=False))
    run = replace(state.run, state=decision.state, waits=(), failure=decision.failure, tokens_needed=0)
    return replace(state, run=run)


def _delegated(state: State, call_id: CallId, now: float) -> State:
    call = state.calls[call_id]
    started = delegation.start(state, call, now)
    *others, created = started.delegations or (None,)
    if created is None or created.call_id != call_id:
        return started
    return replace(started, delegations=(*others, programs.of(state.run).child(state, call, created)))


def _running(state: State) -> State:
    return replace(state, run=replace(state.run, state=RunState.RUNNING, waits=(), tokens_needed=0))


def _announce(state: State, decision: CallModel) -> tuple[State, tuple[OwnerEvent, ...]]:
    summary = decision.summarise_to_number > 0
    opened = OpenModelCall(
        attempt=1,
        without_tools=decision.without_tools,
        output_from_seq=state.run.last_seq + 1,
        summarised_to_number=decision.summarise_to_number,
        usage_before=state.run.usage,
    )
    loop = replace(
        state.loop,
        model_call=opened,
        round_began_active_seconds=state.active_seconds,
        in_doubt=(),
        top_up_deadline_time=None,
    )
    run = state.run
    if summary:
        loop = replace(loop, summarised_round=decision.round)
    else:
        loop = replace(loop, notes={}, unknowns_resolved={}, answers={})
        run = replace(run, round=decision.round)
    started = RoundStarted(
        round=decision.round,
        model_attempt=1,
        model=state.model,
        without_tools=decision.without_tools,
        summary=summary,
    )
    state = replace(_running(replace(state, run=run)), loop=loop, model_starts_in=0.0)
    if not summary:
        state = jobs.entered(state)
    return state, (*_warnings(state, decision), started)


def _warnings(state: State, decision: CallModel) -> tuple[Warned, ...]:
    rounds_max = state.run.options.limits.rounds_max
    if decision.summarise_to_number:
        return (Warned(reason="HISTORY_SUMMARISED", message="The oldest messages are being replaced by a summary."),)
    if decision.is_last:
        message = f"The run has reached its limit of {rounds_max} rounds. The model now answers without tools."
        return (Warned(reason="FINAL_ROUND", message=message),)
    if decision.round == math.ceil(_ROUNDS_NEAR_LIMIT * rounds_max):
        message = f"Round {decision.round} of {rounds_max}."
        return (Warned(reason="ROUND_LIMIT_NEAR", message=message),)
    return ()


def _take_over(state: State) -> tuple[State, tuple[OwnerEvent, ...]]:
    opened = state.loop.model_call
    if opened is None:
        return state, ()
    usage = budget.with_lost_call(state, opened.usage_before)
    state = replace(state, run=replace(state.run, usage=usage))
    # If the log is longer, the lost attempt had shown output.
    showed = state.run.last_seq > opened.output_from_seq
    event = RoundRetrying(
        round=state.run.round + opened.summary,
        model_attempt=opened.attempt,
        reason=TAKEOVER,
        message="Another worker took over the run.",
        void_from_seq=opened.output_from_seq if showed else 0,
        usage=usage - opened.usage_before,
        model=state.model,
    )
    again = replace(
        opened, attempt=opened.attempt + 1, output_from_seq=state.run.last_seq + 1, usage_before=state.run.usage
    )
    return replace(state, loop=replace(state.loop, model_call=again), model_starts_in=0.0), (event,)
