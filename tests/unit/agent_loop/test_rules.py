from __future__ import annotations

import pytest
from msgspec.structs import replace

from pawl.agent_loop.loop.rules.fact import CallExecuted, RoundStarted, Warned
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.retry import delay
from pawl.agent_loop.loop.rules.run import BatchOrder, FailureClass, RoundLimitPolicy, RunOptions, UnknownOutcomePolicy
from pawl.agent_loop.loop.rules.state import MODEL
from pawl.agent_loop.model.request import Problem
from pawl.chassis.ids import CallId
from pawl.values import CallResolution, CallState, DecisionKind, RunState, WaitKind
from tests.unit.agent_loop.scenario import present
from tests.unit.agent_loop.simulation import OK, UNKNOWN, Simulation, answer, run_state, started

LIMIT = FailureClass.LIMIT


def state_of(run: Simulation, index: int) -> CallState:
    return run.calls[index].state


def running(run: Simulation) -> list[int]:
    return sorted(run.base.calls[CallId(name)].index for name in run.under_way if name in run.base.calls)


class TestOrder:
    """LOOP-9, D1: the order in which calls start."""

    def test_parallel_calls_start_together_while_serial_calls_start_in_order(self) -> None:
        run = started(("serial", "parallel", "serial", "parallel"))
        assert running(run) == [0, 1, 3]
        run.ends(run.calls[0].call_id)
        assert running(run) == [1, 2, 3]

    def test_a_serial_call_waits_for_earlier_decisions_unless_configured_otherwise(self) -> None:
        run = started(("gated", "serial", "parallel"))
        assert running(run) == [2]
        run.decides(run.calls[0], DecisionKind.REJECT)
        assert running(run) == [1, 2]
        assert running(started(("ask", "serial"), options=RunOptions(batch_order=BatchOrder.OVERTAKE_DECISIONS))) == [1]
        assert running(started(("front", "serial"))) == [1], "it does not wait for the front end"

    def test_parallel_calls_on_the_same_resource_keep_their_order(self) -> None:
        """C4: with two parallel edits of one file, one edit would be lost silently."""
        run = started(("lookup", "lookup"))
        assert running(run) == [0]
        run.ends(run.calls[0].call_id)
        assert running(run) == [1]


class TestRounds:
    """LOOP-4, C7: the last round of a run."""

    def test_after_the_last_round_the_model_answers_without_tools(self) -> None:
        run = started(("serial",), ("serial",), options=RunOptions(limits=Limits(rounds_max=2)))
        run.ends(run.calls[0].call_id)
        run.model_answers()
        run.ends(run.calls[1].call_id)

        starts = [event for event in run.events if isinstance(event, RoundStarted)]
        assert [(event.round, event.without_tools) for event in starts] == [(1, False), (2, False), (3, True)]
        run.model_answers()
        assert (run.run.state, run.run.output_text) == (RunState.COMPLETED, "done")

    @pytest.mark.parametrize("policy", [RoundLimitPolicy.FINAL_ANSWER, RoundLimitPolicy.FAIL])
    def test_a_run_that_calls_tools_at_the_round_limit_fails(self, policy: RoundLimitPolicy) -> None:
        """Calls in the final answer are not executed, and a run may choose to fail without that answer."""
        options = RunOptions(limits=Limits(rounds_max=1), round_limit_policy=policy)
        run = started(("serial",), ("serial",), options=options)
        run.ends(run.calls[0].call_id)
        if policy is RoundLimitPolicy.FINAL_ANSWER:
            run.model_answers()
            assert run.calls[1].state is CallState.FAILED
        failure = present(run.run.failure)
        assert (run.run.state, failure.reason, failure.failure_class) == (RunState.FAILED, "ROUND_LIMIT", LIMIT)

    def test_an_answer_in_the_last_round_completes_the_run(self) -> None:
        options = RunOptions(limits=Limits(rounds_max=1), round_limit_policy=RoundLimitPolicy.FAIL)
        assert started((), options=options).run.state is RunState.COMPLETED

    def test_a_warning_is_sent_at_eighty_percent(self) -> None:
        run = Simulation([answer("serial", arguments=[f'{{"n":{n}}}']) for n in range(10)])
        run.turn()
        run.finishes()
        assert [event.reason for event in run.events if isinstance(event, Warned)] == [
            "ROUND_LIMIT_NEAR",
            "FINAL_ROUND",
        ]
        assert run.run.state is RunState.COMPLETED


class TestSurplus:
    """LOOP-5: calls and arguments that exceed a limit."""

    def test_only_calls_over_the_limit_get_an_error(self) -> None:
        run = started(("parallel",) * 5, options=RunOptions(limits=Limits(calls_per_round_max=3)))
        assert running(run) == [0, 1, 2]
        refused = [(call.state, present(call.result).error_reason) for call in run.calls[3:]]
        assert refused == [(CallState.FAILED, "TOO_MANY_CALLS")] * 2
        assert "TOO_MANY_CALLS" in [event.reason for event in run.events if isinstance(event, Warned)]

    def test_arguments_over_256_kib_are_refused(self) -> None:
        run = Simulation([answer("serial", arguments=['{"a":"' + "x" * 263_000 + '"}'])])
        run.turn()
        run.model_answers()
        (call,) = run.calls
        assert (call.state, present(call.result).error_reason) == (CallState.FAILED, "INVALID_ARGUMENTS")
        assert len(call.proposed_arguments) < 5000


class TestProposals:
    """LOOP-2, LOOP-6, C14: calls as the model proposes them."""

    def test_an_inexact_tool_name_is_refused(self) -> None:
        run = Simulation([answer("serial "), answer("ser ial", "serial!")])
        run.turn()
        run.model_answers()
        assert running(run) == [0]
        run.ends(run.calls[0].call_id)
        run.model_answers()
        refused = [(call.state, present(call.result).error_reason) for call in run.calls[1:]]
        assert refused == [(CallState.FAILED, "TOOL_NOT_FOUND")] * 2


@pytest.mark.parametrize(
    ("name", "arguments", "reason", "executed"),
    [
        ("serial", ["{}"] * 6, "STUCK_LOOP", 3),
        ("refused", ["{}"] * 6, "STUCK_LOOP", 0),
        ("serial", ['{"n":0}', '{"n":1}'] * 4, "STUCK_LOOP", 5),
        ("serial", ['{"n":0}', '{"n":1}', '{"n":2}'] * 2, "", 6),
    ],
    ids=["identical calls", "refused calls", "two calls in turn", "three calls in turn"],
)
def test_a_run_that_repeats_itself_ends_before_the_next_repetition(
    name: str, arguments: list[str], reason: str, executed: int
) -> None:
    """LOOP-5, D2: repeated refusals count too."""
    run = Simulation([answer(name, arguments=[each]) for each in arguments])
    run.turn()
    run.finishes()
    failure = run.run.failure
    assert (failure.reason if failure else "") == reason
    assert run.run.state is (RunState.FAILED if reason else RunState.COMPLETED)
    assert failure is None or failure.failure_class is FailureClass.STUCK
    assert len(run.started) == executed
    assert (run.calls[-1].state is CallState.SUCCEEDED) is not bool(reason)


def test_retry_delays_double_to_ten_seconds_and_honour_the_server() -> None:
    """LOOP-7: jitter shortens a wait by at most half, and non-retryable failures are final."""
    problem = Problem(reason="HTTP_503", failure_class=FailureClass.PROVIDER, retryable=True, message="no")

    def waits(problem: Problem, *failures: int, attempts_max: int = 9, jitter: float = 0) -> list[float | None]:
        return [delay(problem, failures=n, attempts_max=attempts_max, left=100, jitter=jitter) for n in failures]

    assert (waits(problem, 1, 2, 3, 4, 5, 6), waits(problem, 1, jitter=1)) == ([1, 2, 4, 8, 10, 10], [0.5])
    assert waits(replace(problem, retry_after_seconds=30), 1, jitter=1) == [30]
    assert waits(replace(problem, retry_after_seconds=3600), 1) == [None]
    assert waits(problem, 4, attempts_max=4) == waits(replace(problem, retryable=False), 1) == [None]


class TestPeople:
    """HITL-1 to HITL-3, FE-4: calls that wait for people."""

    @pytest.mark.parametrize(
        ("kind", "state", "shown"),
        [
            (DecisionKind.REJECT, CallState.REJECTED, b"because"),
            (DecisionKind.ANSWER, CallState.SUCCEEDED, b'{"answer":"yes"}'),
        ],
    )
    def test_a_rejected_or_answered_call_is_not_executed(
        self, kind: DecisionKind, state: CallState, shown: bytes
    ) -> None:
        """The model sees the reason or the answer."""
        run = started(("gated",))
        run.decides(run.calls[0], kind)
        assert (run.calls[0].state, run.started) == (state, [])
        assert shown in present(run.calls[0].result).content_json

    def test_an_approved_front_end_call_is_offered(self) -> None:
        run = started(("gated_front",))
        run.decides(run.calls[0], DecisionKind.APPROVE)
        assert (run.calls[0].state, run.run.waits) == (CallState.OFFERED, (WaitKind.TOOL_RESULT,))

    @pytest.mark.parametrize(("name", "seconds"), [("gated", 86400), ("front", 600), ("ask", 86400)])
    def test_a_wait_ends_at_its_deadline_and_not_before(self, name: str, seconds: float) -> None:
        run = started((name,))
        run.passes(seconds - 1)
        assert run.run.state is RunState.WAITING
        run.passes(1)
        assert (run.calls[0].state, MODEL in run.under_way) == (CallState.EXPIRED, True)

    def test_an_unclaimed_front_end_call_may_become_a_question(self) -> None:
        run = started(("front_asks",))
        run.passes(600)
        assert (state_of(run, 0), run.run.waits) == (CallState.ASKED, (WaitKind.ANSWER,))
        run.decides(run.calls[0], DecisionKind.ANSWER)
        assert state_of(run, 0) is CallState.SUCCEEDED

    def test_a_backend_fallback_tool_is_checked_like_any_call(self) -> None:
        run = started(("front_falls_back",))
        run.passes(600)
        call = run.calls[0]
        assert (call.tool_name, call.state) == ("gated", CallState.AWAITING_APPROVAL)
        run.decides(call, DecisionKind.APPROVE)
        run.ends(call.call_id)
        assert "No client ran front_falls_back" in present(run.calls[0].result).note


class TestSteering:
    """LOOP-13, D12, C15: messages to an active run."""

    def test_a_message_withdraws_pending_requests_and_enters_after_the_batch(self) -> None:
        run = started(("gated", "serial", "parallel", "front"))
        assert running(run) == [2]
        run.steers("rather not")
        assert [call.state for call in run.calls] == [
            CallState.CANCELLED,
            CallState.CANCELLED,
            CallState.RUNNING,
            CallState.CANCELLED,
        ]
        run.ends(run.calls[2].call_id)
        assert [message.text for message in run.base.messages if message.role is Role.USER] == ["hello", "rather not"]
        assert MODEL in run.under_way

    def test_a_message_during_the_answer_is_answered_too(self) -> None:
        run = Simulation([answer(text="first"), answer(text="second")])
        run.turn()
        run.steers("and then?")
        run.model_answers()
        assert run.run.state is RunState.RUNNING
        run.model_answers()
        assert run.run.output_text == "second"

    def test_a_message_to_a_stopped_run_stays_in_the_conversation(self) -> None:
        run = started(("serial",))
        run.steers("and then?")
        run.cancels()
        assert (run.run.state, run.base.messages[-1].text) == (RunState.CANCELLED, "and then?")


class TestDoubt:
    """I5, D9: calls with an unknown outcome."""

    def test_by_default_the_model_sees_an_unknown_outcome(self) -> None:
        run = started(("serial",))
        run.ends(run.calls[0].call_id, UNKNOWN)
        assert (run.calls[0].state, MODEL in run.under_way) == (CallState.OUTCOME_UNKNOWN, True)

    @pytest.mark.parametrize(
        ("resolution", "state"),
        [(CallResolution.HAPPENED, CallState.SUCCEEDED), (CallResolution.TELL_MODEL, CallState.FAILED)],
    )
    def test_an_operator_may_resolve_an_unknown_outcome(self, resolution: CallResolution, state: CallState) -> None:
        options = RunOptions(unknown_outcome_policy=UnknownOutcomePolicy.NEEDS_ATTENTION)
        run = started(("serial", "parallel"), options=options)
        run.ends(run.calls[0].call_id, UNKNOWN)
        assert run_state(run) is RunState.RUNNING
        run.ends(run.calls[1].call_id)
        assert run_state(run) is RunState.NEEDS_ATTENTION
        run.is_taken_over()
        assert (run_state(run), len(run.started)) == (RunState.NEEDS_ATTENTION, 2)
        run.resolves(run.calls[0], resolution)
        assert (run.calls[0].state, MODEL in run.under_way) == (state, True)

    def test_an_operator_may_run_the_call_again(self) -> None:
        run = started(("serial",), options=RunOptions(unknown_outcome_policy=UnknownOutcomePolicy.NEEDS_ATTENTION))
        call_id = run.calls[0].call_id
        run.ends(call_id, UNKNOWN)
        run.resolves(run.calls[0], CallResolution.RUN_AGAIN)
        assert (run.started, run.base.loop.unknowns_resolved) == ([call_id, call_id], {call_id: 1})
        assert run.calls[0].attempt == 2
        run.ends(call_id)
        assert run.calls[0].state is CallState.SUCCEEDED


class TestTakeover:
    """C9, C10: runs of a dead worker."""

    def test_a_dead_workers_call_is_executed_again_with_the_same_id(self) -> None:
        run = started(("serial",))
        run.is_taken_over()
        assert (run.started, run.calls[0].attempt) == ([run.calls[0].call_id] * 2, 2)

    def test_a_settled_call_never_changes(self) -> None:
        """C5: a late result must not overwrite a cancelled execution."""
        run = started(("serial", "front"))
        run.cancels()
        before = list(run.calls)
        run.facts.append(CallExecuted(call_id=run.calls[0].call_id, ended=OK))
        run.turn()
        assert run.calls == before
