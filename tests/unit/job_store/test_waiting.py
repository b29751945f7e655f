"""Wait reasons: every run that is open and not RUNNING has one."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import CallId, ClientId, CommandId, RunId, UserId, WorkerId
from pawl.job_store.ledger.rules import call_table, run_table
from pawl.job_store.ledger.rules.approval import Decision
from pawl.job_store.ledger.rules.rows import Attention, CallRow, Offer, RunRow
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.ledger.rules.states import AttentionReason, WaitReason
from pawl.job_store.ledger.rules.usage import day_end, month_end
from pawl.job_store.ledger.rules.waiting import Situation, Waiting, explain, explain_all
from pawl.values import CallState, DecisionKind, RunState, StopCause, WaitKind
from tests.unit.job_store.world import DIGEST

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
LIMITS = SlotLimits(per_store=3, per_user=2)
# Possible reasons per state; other states give no reason.
ALLOWED = {
    RunState.QUEUED: {WaitReason.TURN, WaitReason.PLACE, WaitReason.WORKER},
    RunState.WAITING: set(WaitReason) - {WaitReason.TURN, WaitReason.PLACE, WaitReason.OPERATOR, WaitReason.STOPPING},
    RunState.NEEDS_ATTENTION: {WaitReason.OPERATOR, WaitReason.WORKER},
    RunState.CANCELLING: {WaitReason.STOPPING},
}
STATES_OF_CALLS = {
    WaitReason.APPROVAL: CallState.AWAITING_APPROVAL,
    WaitReason.ANSWER: CallState.ASKED,
    WaitReason.FRONT_END: CallState.OFFERED,
    WaitReason.AGENT: CallState.DELEGATED,
    WaitReason.OPERATOR: CallState.RUNNING,
    WaitReason.COMPLETION: CallState.RUNNING,
}
TIMES = st.sampled_from([NOW - timedelta(minutes=2), NOW - timedelta(seconds=1), NOW])


def run_row(state: RunState, **fields: Any) -> RunRow:
    values: dict[str, Any] = {
        "store_id": "acme",
        "run_id": "run_1",
        "conversation_id": "conv",
        "user_id": "ann",
        "token_budget": 0,
        "token_ceiling": 0,
        "queued_message": None,
        "options": b"",
        "create_time": NOW - timedelta(hours=1),
        "update_time": NOW - timedelta(minutes=5),
        "state_time": NOW - timedelta(minutes=5),
    }
    return RunRow(state=state, **(values | fields))


def call_row(name: str, state: CallState, **fields: Any) -> CallRow:
    values: dict[str, Any] = {
        "store_id": "acme",
        "run_id": "run_1",
        "conversation_id": "conv",
        "user_id": "ann",
        "round": 1,
        "index": 0,
        "tool_name": "send_email",
        "tool_version": 1,
        "fallback_tool_name": "",
        "arguments": b"{}",
        "attempt": 1,
        "digest": DIGEST if state is CallState.AWAITING_APPROVAL else "",
        "deadline_time": None,
        "offer": None,
        "result": None,
        "spec": b"",
        "create_time": NOW - timedelta(minutes=30),
        "state_time": NOW - timedelta(minutes=10),
        "start_time": None,
        "end_time": None,
    }
    return CallRow(call_id=CallId(name), state=state, **(values | fields))


def waiting_of(state: RunState, *calls: CallRow, around: Any = None, **fields: Any) -> Waiting:
    waiting = explain(Situation(run=run_row(state, **fields), time=NOW, calls=calls, **(around or {})), LIMITS)
    assert waiting is not None
    return waiting


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Draw any rows that the types allow, even those that no ledger writes."""
    state = draw(st.sampled_from(RunState))
    attention = Attention(reason=draw(st.sampled_from(AttentionReason)), since_time=draw(TIMES))
    names = iter(range(100))
    calls = [
        call_row(
            f"call_{next(names)}",
            each,
            tool_name=draw(st.sampled_from(["send_email", "x" * 256, "pay"])),
            reserved_by=draw(st.sampled_from(["", "cmd_1"])),
            child_run_id=RunId("run_2"),
            approvals_required=draw(st.sampled_from([1, 3])),
            escalated=draw(st.booleans()),
            state_time=draw(TIMES),
            offer=Offer(client_id=ClientId(""), epoch=0, expire_time=None, lease_seconds=0.0),
        )
        for each in draw(
            st.lists(st.sampled_from([state for state in CallState if not state.is_terminal]), max_size=30)
        )
    ]
    run = run_row(
        state,
        waits=tuple(draw(st.sets(st.sampled_from(WaitKind)))) if state is RunState.WAITING else (),
        worker_id=draw(st.sampled_from([None, WorkerId("w1")])),
        claim_at=draw(TIMES | st.none() | st.just(NOW + timedelta(minutes=1))),
        crashes=draw(st.integers(0, 3)),
        attention=attention if state is RunState.NEEDS_ATTENTION else None,
        stop_cause=draw(st.sampled_from([None, StopCause.USER])),
        queued_message=draw(st.sampled_from([None, b"m"])),
        state_time=draw(TIMES),
    )
    return Situation(
        run=run,
        time=NOW,
        calls=calls,
        is_cut=draw(st.booleans()),
        before=tuple(map(RunId, draw(st.sampled_from([(), ("run_0",), tuple(f"run_{n}" for n in range(90))])))),
        store_slots_used=draw(st.integers(0, 4)),
        user_slots_used=draw(st.integers(0, 4)),
    )


def check(situation: Situation, waiting: Waiting | None) -> None:
    """Check that the reason fits the run's state, that its calls match, and that its sentence is well formed."""
    run = situation.run
    assert (waiting is None) == (run.state.is_terminal or run.state is RunState.RUNNING)
    if waiting is None:
        return
    assert waiting.reason in ALLOWED[run.state]
    assert re.fullmatch(r"[A-Z].*\.", waiting.sentence)
    assert len(waiting.sentence.encode()) <= 2048
    assert waiting.remedy.endswith(".")
    assert waiting.since_time <= situation.time
    assert waiting.deadline_time is None or waiting.deadline_time > situation.time
    calls = {call.call_id: call for call in situation.calls}
    for call_id in waiting.call_ids:
        assert calls[call_id].state is STATES_OF_CALLS[waiting.reason]
        assert not calls[call_id].reserved_by
        assert call_table.TRANSITIONS[calls[call_id].state], "it can still move"
    assert max(len(waiting.call_ids), len(waiting.run_ids)) <= 20


@given(situation=situations())
def test_every_open_run_that_is_not_running_has_one_wait_reason(situation: Situation) -> None:
    check(situation, explain(situation, LIMITS))


def test_wait_reasons_cover_all_open_states() -> None:
    assert set(ALLOWED) == {state for state, moves in run_table.TRANSITIONS.items() if moves} - {RunState.RUNNING}
    assert set().union(*ALLOWED.values()) == set(WaitReason)


APPROVED = Decision(
    command_id=CommandId("c"),
    kind=DecisionKind.APPROVE,
    user_id=UserId("bob"),
    reason="",
    time=NOW,
    digest=DIGEST,
    arguments_sha256=b"",
)
_GATED = {"approvals_required": 2, "approvals": (APPROVED,), "escalated": True}
# Waits, open calls, reason, sentence, and the users it names (HITL-4).
WAITS: list[tuple[tuple[WaitKind, ...], list[CallRow], WaitReason, str, tuple[str, ...]]] = [
    (
        (WaitKind.APPROVAL,),
        [call_row("call", CallState.AWAITING_APPROVAL)],
        WaitReason.APPROVAL,
        "It is waiting for an approval of send_email.",
        ("ann",),
    ),
    (
        (WaitKind.ANSWER,),
        [call_row("call", CallState.ASKED)],
        WaitReason.ANSWER,
        "It is waiting for an answer from ann.",
        ("ann",),
    ),
    (
        (WaitKind.TOOL_RESULT,),
        [call_row("call", CallState.OFFERED)],
        WaitReason.FRONT_END,
        "It is waiting for a front end to run send_email.",
        ("ann",),
    ),
    (
        (WaitKind.COMPLETION,),
        [call_row("call", CallState.RUNNING)],
        WaitReason.COMPLETION,
        "It is waiting for an external system to complete send_email.",
        (),
    ),
    (
        (WaitKind.APPROVAL, WaitKind.ANSWER),
        [call_row("q", CallState.ASKED), call_row("call", CallState.AWAITING_APPROVAL, tool_name="pay")],
        WaitReason.APPROVAL,
        "It is waiting for an approval of pay, and for an answer from ann.",
        ("ann",),
    ),
    (
        (WaitKind.APPROVAL,),
        [call_row("call", CallState.AWAITING_APPROVAL, **_GATED)],
        WaitReason.APPROVAL,
        "It is waiting for 2 approvals of send_email (1 given) (requested twice, not decided in time).",
        (),
    ),
    ((WaitKind.PAUSED,), [], WaitReason.PAUSED, "It is waiting for its user to resume it: it is paused.", ("ann",)),
    ((WaitKind.PROVIDER,), [], WaitReason.PROVIDER, "It is waiting for the model server, which is unavailable.", ()),
    (
        (WaitKind.AGENT_QUOTA,),
        [],
        WaitReason.AGENT_QUOTA,
        "It is waiting for the next day: the agent default has used up its daily tokens.",
        (),
    ),
    (
        (WaitKind.STORE_MONTHLY_TOKENS,),
        [],
        WaitReason.STORE_TOKENS,
        "It is waiting for the next month: its store has used up the monthly tokens.",
        (),
    ),
    (
        (WaitKind.USER_DAILY_TOKENS,),
        [],
        WaitReason.USER_TOKENS,
        "It is waiting for the next day: its user has used up the daily tokens.",
        (),
    ),
    (
        (WaitKind.RATE,),
        [],
        WaitReason.RATE,
        "It is waiting for a model call: its store or model server has reached its limit per minute.",
        (),
    ),
]


ASKED: list[tuple[tuple[WaitKind, ...], list[CallRow], WaitReason, str, tuple[str, ...]]] = [
    (
        (WaitKind.PERSON,),
        [call_row("call", CallState.AWAITING_APPROVAL, asked_user_id="kim")],
        WaitReason.APPROVAL,
        "It is waiting for an approval of send_email by kim.",
        ("kim",),
    ),
    (
        (WaitKind.PERSON,),
        [call_row("call", CallState.AWAITING_APPROVAL, tool_name="approval", asked_user_id="kim")],
        WaitReason.APPROVAL,
        "It is waiting for an approval by kim.",
        ("kim",),
    ),
    (
        (WaitKind.PERSON,),
        [call_row("call", CallState.AWAITING_APPROVAL, asked_user_id="")],
        WaitReason.APPROVAL,
        "It is waiting for an approval of send_email.",
        (),
    ),
    (
        (WaitKind.PERSON,),
        [call_row("call", CallState.ASKED, asked_user_id="kim")],
        WaitReason.ANSWER,
        "It is waiting for an answer from kim.",
        ("kim",),
    ),
]


def test_a_run_that_waits_for_people_names_them() -> None:
    due = NOW + timedelta(minutes=3)
    for waits, calls, reason, sentence, user_ids in (*WAITS, *ASKED):
        waiting = waiting_of(RunState.WAITING, *calls, waits=waits, claim_at=due)
        assert (waiting.reason, waiting.sentence, waiting.user_ids) == (reason, sentence, user_ids)
        since = NOW - timedelta(minutes=10 if calls else 5)
        assert (waiting.since_time, waiting.call_ids) == (since, ("call",) if calls else ()), sentence
        ends = {WaitReason.AGENT_QUOTA: day_end(NOW), WaitReason.USER_TOKENS: day_end(NOW)}
        ends[WaitReason.STORE_TOKENS] = month_end(NOW)
        assert waiting.deadline_time == ends.get(reason, due)
        roles = {WaitReason.APPROVAL: ("admin", "approver"), **dict.fromkeys(ends, ("admin",))}
        assert waiting.roles == (() if any(call.asked_user_id for call in calls) else roles.get(reason, ()))


def test_a_run_whose_wait_has_ended_is_waiting_for_a_worker() -> None:
    call = call_row("a", CallState.AWAITING_APPROVAL, reserved_by="cmd_1")
    waiting = waiting_of(RunState.WAITING, call, waits=(WaitKind.APPROVAL,), claim_at=NOW)
    assert waiting.reason is WaitReason.WORKER
    left = call_row("b", CallState.ASKED)
    waiting = waiting_of(RunState.WAITING, call, left, waits=(WaitKind.APPROVAL, WaitKind.ANSWER), claim_at=NOW)
    assert waiting.reason is WaitReason.ANSWER


def test_a_queued_run_names_the_runs_before_it() -> None:
    """LOOP-13: the sentence names the active run and counts the others."""
    waiting = waiting_of(RunState.QUEUED, queued_message=b"m", around={"before": (RunId("run_a"), RunId("run_b"))})
    assert (waiting.reason, waiting.run_ids) == (WaitReason.TURN, ("run_a", "run_b"))
    assert waiting.sentence == (
        "It is waiting for its turn in the conversation: run run_a is active, with 1 more ahead of it."
    )
    assert waiting.since_time == NOW - timedelta(hours=1)


def test_a_run_over_a_concurrency_limit_waits_for_a_slot() -> None:
    """LOOP-14: the sentence names the limit."""
    since = NOW - timedelta(seconds=9)
    for slots, whose in [({"store_slots_used": 3}, "store has 3"), ({"user_slots_used": 2}, "user has 2")]:
        waiting = waiting_of(RunState.QUEUED, claim_at=since, around=slots)
        assert (waiting.reason, waiting.since_time) == (WaitReason.PLACE, since)
        assert whose in waiting.sentence
    assert (
        waiting_of(RunState.QUEUED, claim_at=since, around={"store_slots_used": 2, "user_slots_used": 1}).reason
        is WaitReason.WORKER
    )


def test_a_run_that_needs_attention_tells_the_operator_what_to_do() -> None:
    attention = Attention(reason=AttentionReason.UNKNOWN_OUTCOME, since_time=NOW - timedelta(days=1))
    doubt = call_row("a", CallState.RUNNING)
    waiting = waiting_of(RunState.NEEDS_ATTENTION, doubt, attention=attention)
    assert (waiting.reason, waiting.call_ids, waiting.roles) == (WaitReason.OPERATOR, ("a",), ("admin", "operator"))
    assert waiting.since_time == attention.since_time
    assert "send_email" in waiting.sentence
    resolved = replace(doubt, reserved_by="cmd_1")
    assert waiting_of(RunState.NEEDS_ATTENTION, resolved, attention=attention, claim_at=NOW).reason is WaitReason.WORKER
    quarantined = replace(attention, reason=AttentionReason.QUARANTINED)
    waiting = waiting_of(RunState.NEEDS_ATTENTION, doubt, attention=quarantined, crashes=3)
    assert (waiting.reason, waiting.call_ids) == (WaitReason.OPERATOR, ())
    assert "3 workers died" in waiting.sentence


def test_a_run_reports_what_its_child_runs_are_waiting_for() -> None:
    """TOOL-7: the sentences of its descendants are appended."""
    above = run_row(RunState.WAITING, waits=(WaitKind.AGENT,))
    middle = run_row(RunState.WAITING, run_id="run_2", waits=(WaitKind.AGENT,), create_time=NOW - timedelta(minutes=9))
    low = run_row(RunState.WAITING, run_id="run_3", waits=(WaitKind.APPROVAL,), create_time=NOW - timedelta(minutes=8))
    found = explain_all(
        [
            Situation(run=above, time=NOW, calls=[call_row("a", CallState.DELEGATED, child_run_id=RunId("run_2"))]),
            Situation(run=middle, time=NOW, calls=[call_row("b", CallState.DELEGATED, child_run_id=RunId("run_3"))]),
            Situation(run=low, time=NOW, calls=[call_row("c", CallState.AWAITING_APPROVAL)]),
        ],
        LIMITS,
    )
    assert found is not None
    assert (found.reason, found.run_ids, found.call_ids) == (WaitReason.AGENT, ("run_2",), ("a",))
    assert found.sentence == (
        "It is waiting for run run_2. Run run_2: It is waiting for run run_3."
        " Run run_3: It is waiting for an approval of send_email."
    )
    assert found.roles == ("admin", "approver")
