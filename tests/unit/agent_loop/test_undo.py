"""Undo: a separate run that executes the inverses of a run's calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.loop.drive import DriveEnd
from pawl.agent_loop.loop.rules.call import ApprovalRequest, Call, CallResult, Inverse, UserDecision
from pawl.agent_loop.loop.rules.fact import Decide, Steer
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.run import Run, Undo
from pawl.agent_loop.undo import planning
from pawl.agent_loop.undo import rules as undo
from pawl.agent_loop.undo.rules import CallUndo, UndoSource, UndoState
from pawl.chassis.ids import CallId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.errors import RunNotFound
from pawl.values import CallState, DecisionKind, EffectClass, ExecutionContext, Question, RunState
from tests.fakes.loop_world import STORE, USER, World
from tests.fakes.model import Script, calls, says
from tests.fakes.registry import tool
from tests.unit.agent_loop.scenario import present

DIGEST = "d" * 64
VERDICTS = {
    "write": tool(),
    "note": tool(parallel=True),
    "look": tool(effect="READ_ONLY"),
    "mail": tool(),
    "strange": tool(),
    "ask": tool("ASK", context="HUMAN", question=Question(question="Which colour?")),
    "unwrite": tool(parallel=True),
    "unnote": tool(),
}
THREE_ROUNDS: list[Script] = [
    calls('write {"n":1}', 'look {"n":1}', 'ask {"n":1}'),
    calls('write {"n":2}', 'mail {"n":1}'),
    says("Done."),
]


def new_world(scripts: list[Script] | None = None) -> World:
    world = World(dict(VERDICTS), list(scripts or THREE_ROUNDS))
    world.registry.results = {
        name: CallResult(
            content_json=b'"done"',
            inverse=Inverse(tool_name=f"un{name}", arguments_json=b'{"n":1}', summary=f"Take the {name} back"),
        )
        for name in ("write", "note", "strange")
    }
    return world


async def undo_of(world: World, key: RunKey, call_id: str = "") -> RunKey:
    asked = Undo(run_id=key.run_id, call_id=CallId(call_id), user_id=UserId(USER))
    conversation = world.ledger.run(key).conversation_id
    return world.ledger.submit(undo.request_text(key.run_id, CallId(call_id)), conversation_id=conversation, undo=asked)


async def finished(world: World) -> RunKey:
    key = world.ledger.submit("hello")
    await world.finish(key)
    return key


async def undone(world: World, key: RunKey) -> RunKey:
    """Undo a run, and return the run that undid it."""
    by = await undo_of(world, key)
    await world.finish(by)
    return by


async def report(world: World, undone: RunKey, by: RunKey, *tools: str) -> list[tuple[str, UndoState]]:
    """Return the state of each call of a run (or of these tools) in the report of an undo."""
    read = await planning.sources(world.ledger.channel, StoreId(STORE), UserId(USER), undone.run_id)
    found = [undo.outcome_of(source, by.run_id) for source in undo.in_order(read)]
    return [(each.tool_name, each.state) for each in found if not tools or each.tool_name in tools]


async def test_an_undo_runs_inverses_in_reverse_order_without_model_calls() -> None:
    world = new_world()
    key = await finished(world)
    asked_models = len(world.model.requests)
    first_index = len(world.registry.order)

    by = await undone(world, key)

    done = world.ledger.calls(by)
    writes = [call.call_id for call in world.ledger.calls(key) if call.tool_name == "write"]
    assert [(call.tool_name, call.undoes_call_id) for call in done] == [("unwrite", each) for each in writes[::-1]]
    assert world.registry.order[first_index:] == [call.call_id for call in done]
    assert world.registry.running_max == 2, "the run had two concurrent calls, its undo never"
    assert len(world.model.requests) == asked_models
    assert await report(world, key, by) == [
        ("mail", UndoState.CANNOT_BE_UNDONE),
        ("write", UndoState.UNDONE),
        ("ask", UndoState.NOTHING_TO_UNDO),
        ("write", UndoState.UNDONE),
        ("look", UndoState.NOTHING_TO_UNDO),
    ]
    run = world.ledger.run(by)
    assert run.state is RunState.COMPLETED
    assert run.output_text.splitlines() == [
        f"Undo of run {key.run_id}: undid 2 of 3 calls with effects.",
        "- write (Take the write back) undone",
        "- write (Take the write back) undone",
        "- mail cannot be undone: Its tool does not support undo.",
    ]


async def test_a_gated_inverse_waits_for_approval_and_a_rejected_inverse_is_retried() -> None:
    world = new_world()
    world.registry.verdicts["unwrite"] = tool("APPROVE", digest=DIGEST)
    key = await finished(world)
    by = await undo_of(world, key)

    assert (await world.drive(), world.ledger.run(by).state) == (DriveEnd.PARKED, RunState.WAITING)
    assert (await report(world, key, by))[1] == ("write", UndoState.NEEDS_APPROVAL)
    waiting = world.ledger.calls(by)[0]
    await world.ledger.send(by, Decide(call_id=waiting.call_id, kind=DecisionKind.REJECT, reason="keep it"))
    await world.finish(by)
    again = await undone(world, key)
    for run, states in (
        (by, [UndoState.FAILED, UndoState.UNDONE]),
        (again, [UndoState.UNDONE, UndoState.ALREADY_UNDONE]),
    ):
        assert [state for _, state in await report(world, key, run, "write")] == states
    assert "could not be undone: The user refused to approve this call. Reason: keep it" in (
        world.ledger.run(by).output_text
    )


async def test_an_inverse_with_a_missing_tool_does_not_block_the_others() -> None:
    world = new_world([calls("write", "strange"), says("Done.")])
    key = await finished(world)
    by = await undone(world, key)

    assert await report(world, key, by) == [
        ("strange", UndoState.CANNOT_BE_UNDONE),
        ("write", UndoState.UNDONE),
    ]
    assert "There is no tool unstrange" in world.ledger.run(by).output_text


async def test_an_inverse_with_an_unknown_outcome_is_never_run_again() -> None:
    world = new_world([calls("write"), says("Done.")])
    world.registry.forgets = {"unwrite"}
    key = await finished(world)
    await undone(world, key)
    again = await undone(world, key)

    assert (await report(world, key, again), world.ledger.calls(again)) == ([("write", UndoState.CANNOT_BE_UNDONE)], [])
    assert "It is unknown" in world.ledger.run(again).output_text


async def test_a_message_during_an_undo_stops_it_and_is_answered() -> None:
    world = new_world([*THREE_ROUNDS, says("I stopped.")])
    world.registry.verdicts["unwrite"] = tool("APPROVE", digest=DIGEST)
    by = await undo_of(world, await finished(world))
    await world.drive()
    await world.ledger.send(by, Steer(text="wait"))
    await world.finish(by)

    texts = [(message.role, message.text) for message in world.ledger.messages(by) if message.run_id == by.run_id]
    assert [role for role, _ in texts] == [Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert texts[-1][1] == "I stopped."
    assert "- write (Take the write back) not undone" in texts[1][1]
    assert world.model.requests[-1].tools == ()
    assert len(world.ledger.calls(by)) == 1


async def test_an_undo_can_be_undone() -> None:
    world = new_world([calls("note"), says("Done.")])
    world.registry.results["unnote"] = CallResult(
        content_json=b"null", inverse=Inverse(tool_name="note", arguments_json=b"{}", summary="Note it again")
    )
    key = await finished(world)
    by = await undone(world, key)
    redo = await undone(world, by)
    assert [call.tool_name for call in world.ledger.calls(redo)] == ["note"]
    assert await report(world, by, redo) + await report(world, key, by) == [
        ("unnote", UndoState.UNDONE),
        ("note", UndoState.UNDONE),
    ]


# The pure rules of undo: selection, order and reports.


INVERSE = Inverse(tool_name="back", arguments_json=b"{}", summary="back")


@st.composite
def any_call(draw: st.DrawFn, call_id: str = "", run_id: str = "run_1") -> Call:
    state = draw(st.sampled_from([state for state in CallState if state is not CallState.PROPOSED]))
    reason = draw(st.sampled_from(["TOOL_ERROR", "NOT_STOPPED", "TOOL_TIMEOUT", "TOOL_NOT_FOUND", "CANCELLED"]))
    inverse = INVERSE if draw(st.booleans()) and state is CallState.SUCCEEDED else None
    is_error = state is not CallState.SUCCEEDED
    result = CallResult(content_json=b"{}", is_error=is_error, error_reason=reason * is_error, inverse=inverse)
    kind = draw(st.sampled_from([None, *DecisionKind]))
    return Call(
        store_id=StoreId("store"),
        conversation_id=ConversationId("conv"),
        run_id=RunId(run_id),
        call_id=CallId(call_id or f"call_{draw(st.integers(1, 10**9))}"),
        round=draw(st.integers(1, 5)),
        index=draw(st.integers(0, 5)),
        tool_name="do",
        state=state,
        effect_class=draw(st.sampled_from(list(EffectClass))),
        context=draw(st.sampled_from([ExecutionContext.BACKEND, ExecutionContext.FRONTEND])),
        attempt=draw(st.integers(0, 2)),
        approval=ApprovalRequest(digest=DIGEST, decision=UserDecision(kind=kind, user_id=UserId("me")))
        if kind
        else None,
        result=result,
        end_time=draw(st.sampled_from([1.0, 2.0, 3.0, 4.0])),
    )


@st.composite
def any_source(draw: st.DrawFn) -> UndoSource:
    call = draw(any_call())
    count = draw(st.integers(0, 3))
    tries = [
        draw(any_call(call_id=undo.undo_call_id(call.call_id, attempt), run_id=f"run_{attempt + 1}"))
        for attempt in range(1, count + 1)
    ]
    return UndoSource(call=call, attempts=tuple(tries))


@given(any_call(call_id="last"), st.sampled_from(list(EffectClass)))
def test_the_trimmed_calls_of_a_job_are_reported_as_not_undoable(call: Call, effect: EffectClass) -> None:
    """The report has one entry for all of them, which names no call."""
    call = replace(call, effect_class=effect)
    gone = UndoSource(call=replace(call, call_id=CallId(""), round=0, end_time=None), trimmed_rounds=4900)
    sources = undo.in_order([gone, UndoSource(call=call)])
    assert [source.call.call_id for source in sources] == ["last", ""]
    found = undo.outcome_of(sources[-1])
    is_read_only = effect is EffectClass.READ_ONLY
    assert found.state is (UndoState.NOTHING_TO_UNDO if is_read_only else UndoState.CANNOT_BE_UNDONE)
    assert is_read_only or "4900" in found.reason
    assert gone not in undo.in_order([gone], CallId("last"))


@given(st.lists(any_source(), unique_by=lambda source: source.call.call_id, max_size=12))
def test_a_plan_undoes_each_call_at_most_once_starting_with_the_last_to_end(sources: list[UndoSource]) -> None:
    run = Run(
        store_id=StoreId("s"),
        user_id=UserId("u"),
        conversation_id=ConversationId("c"),
        run_id=RunId("run_9"),
        undo=Undo(run_id=RunId("run_1")),
    )

    planned = undo.plan(sources, run)

    of = {source.call.call_id: source for source in sources}
    chosen = [of[step.call_id] for step in planned.steps]
    assert len(set(map(id, chosen))) == len(chosen)
    ends = [(each.call.end_time or 0.0, each.call.round, each.call.index) for each in chosen]
    assert ends == sorted(ends, reverse=True)
    for step, source in zip(planned.steps, chosen, strict=True):
        assert undo.inverse_of(source.call) is not None
        assert step.undo_call_id not in {each.call_id for each in source.attempts}
        assert not any(_may_have_had_its_effect(each) for each in source.attempts[-1:])
    skipped = [source for source in sources if source not in chosen and undo.inverse_of(source.call) is not None]
    assert all(source.attempts for source in skipped)


@given(any_source())
def test_every_call_has_one_undo_state_and_a_reason(source: UndoSource) -> None:
    for run_id in ("", "run_2", "run_9"):
        found: CallUndo = undo.outcome_of(source, RunId(run_id))
        clear = {UndoState.UNDONE, UndoState.ALREADY_UNDONE, UndoState.RUNNING, UndoState.NEEDS_APPROVAL}
        assert found.state in {*clear, UndoState.TO_UNDO} or found.reason
        assert found.state not in clear or found.undo_call_id


def _may_have_had_its_effect(call: Call) -> bool:
    decision = call.approval.decision if call.approval else None
    answered = decision is not None and decision.kind is DecisionKind.ANSWER
    return (call.state is CallState.SUCCEEDED and not answered) or (
        call.state is CallState.OUTCOME_UNKNOWN and call.effect_class is not EffectClass.READ_ONLY
    )


def test_a_tool_stopped_while_asking_cannot_be_undone() -> None:
    """The tool had started, so its effect before the question is unknown."""
    call = Call(
        store_id=StoreId("store"),
        conversation_id=ConversationId("conv"),
        run_id=RunId("run_1"),
        call_id=CallId("call_1"),
        round=1,
        index=0,
        tool_name="order",
        state=CallState.CANCELLED,
        effect_class=EffectClass.AT_MOST_ONCE,
        context=ExecutionContext.BACKEND,
        attempt=1,
        question=Question(question="Which colour?"),
        result=CallResult(content_json=b"{}", is_error=True, error_reason="CANCELLED"),
    )
    assert undo.outcome_of(UndoSource(call=call)).state is UndoState.CANNOT_BE_UNDONE


async def test_an_undo_of_a_missing_run_fails() -> None:
    async def gone(name: str, done: bool) -> None:
        if name == "ListCalls":
            raise RunNotFound

    world = new_world()
    by = await undo_of(world, await finished(world))
    world.ledger.fault = gone
    await world.finish(by)
    run = world.ledger.run(by)
    assert (present(run.failure).reason, "nothing was undone" in run.output_text) == ("RUN_NOT_FOUND", True)
