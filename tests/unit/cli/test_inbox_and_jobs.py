"""Command output for the inbox, jobs, schedules, undos and events."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from pawl.agent.v1 import agent_pb2, jobs_pb2, steps_pb2, types_pb2, undo_pb2
from pawl.agent.v1.workflow_pb2 import GetExecutionResponse
from pawl.cli import wording
from pawl.cli.command import LineReader
from pawl.cli.decisions import find_pending
from pawl.cli.executions import execution_lines, node_lines
from pawl.cli.failure import CommandError
from pawl.cli.inbox import Reviewer
from pawl.cli.jobs import job_lines, paused_text, progress_text, put_reports
from pawl.cli.operating import undo_line
from pawl.cli.runs import COLUMNS, show_step, without_old_progress
from pawl.client import AsyncClient
from pawl.errors import AlreadyDecided, PermissionDenied, RunNotFound
from pawl.event.v1 import call_pb2, event_pb2, run_pb2, waiting_pb2
from pawl.event.v1.event_pb2 import RunEvent
from pawl.event.v1.workflow_pb2 import (
    NODE_STATE_FAILED,
    NODE_STATE_PENDING,
    NODE_STATE_RUNNING,
    NODE_STATE_SKIPPED,
    NODE_STATE_SUCCEEDED,
    MapChunkExecution,
    MapExecution,
    NodeAttempt,
    NodeError,
    NodeExecution,
    PinnedWorkflow,
)
from pawl.tool.v1 import rule_pb2
from tests.tables import for_each

AWAITING, OFFERED, ASKED = (
    call_pb2.CALL_STATE_AWAITING_APPROVAL,
    call_pb2.CALL_STATE_OFFERED,
    call_pb2.CALL_STATE_ASKED,
)


class Agents:
    def __init__(self, late: str = "") -> None:
        self.asked: list[Any] = []
        self._late = late

    async def GetRun(self, request: agent_pb2.GetRunRequest) -> agent_pb2.GetRunResponse:
        return agent_pb2.GetRunResponse()

    def _receipt(self, call_id: str) -> types_pb2.Receipt:
        if call_id != self._late:
            return types_pb2.Receipt(call_id=call_id, status=types_pb2.RECEIPT_STATUS_ACCEPTED)
        late = types_pb2.RECEIPT_STATUS_LATE
        return types_pb2.Receipt(call_id=call_id, status=late, reason="ALREADY_DECIDED", message="it was decided")

    async def Decide(self, request: agent_pb2.DecideRequest) -> agent_pb2.DecideResponse:
        self.asked.append(request.decision)
        if request.decision.call_id == self._late:
            raise AlreadyDecided("it was decided")
        return agent_pb2.DecideResponse(receipt=self._receipt(request.decision.call_id))

    async def DecideCalls(self, request: agent_pb2.DecideCallsRequest) -> agent_pb2.DecideCallsResponse:
        self.asked.append(list(request.decisions))
        return agent_pb2.DecideCallsResponse(receipts=[self._receipt(each.call_id) for each in request.decisions])

    async def SubmitToolResults(
        self, request: agent_pb2.SubmitToolResultsRequest
    ) -> agent_pb2.SubmitToolResultsResponse:
        self.asked.append(request.results[0])
        return agent_pb2.SubmitToolResultsResponse(receipts=[self._receipt(each.call_id) for each in request.results])


def call(call_id: str, state: call_pb2.CallState.ValueType = AWAITING, **fields: Any) -> call_pb2.Call:
    made = call_pb2.Call(run_id="run_1", call_id=call_id, state=state, tool_name=f"tool_of_{call_id}", **fields)
    if state == AWAITING:
        made.approval.digest = f"digest of {call_id}"
        made.approval.approvals_required = max(1, made.approval.approvals_required)
    if state == ASKED:
        made.question.question = "When?"
    return made


class Rules:
    def __init__(self) -> None:
        self.made: list[rule_pb2.Rule] = []
        self.revoked: list[str] = []
        self.refuses_to: set[str] = set()

    async def CreateRule(self, request: rule_pb2.CreateRuleRequest) -> rule_pb2.CreateRuleResponse:
        if "make" in self.refuses_to:
            raise PermissionDenied("that requires the approver role")
        self.made.append(request.rule)
        request.rule.rule_id = "rule_1"
        return rule_pb2.CreateRuleResponse(rule=request.rule)

    async def RevokeRule(self, request: rule_pb2.RevokeRuleRequest) -> rule_pb2.RevokeRuleResponse:
        if "revoke" in self.refuses_to:
            raise PermissionDenied("not now")
        self.revoked.append(request.rule_id)
        return rule_pb2.RevokeRuleResponse()


async def typed(agents: Agents, text: str, *calls: call_pb2.Call | run_pb2.Run, rules: Rules | None = None) -> str:
    shown = io.StringIO()
    target = AsyncClient("127.0.0.1:1", environment={})
    vars(target).update(agents=agents, rules=rules or Rules())
    await Reviewer(target, Console(file=shown, width=200, highlight=False), LineReader(io.StringIO(text))).review(calls)
    return shown.getvalue()


async def test_all_calls_are_shown_before_they_are_approved_together() -> None:
    agents = Agents(late="c")
    shown = await typed(agents, "all\ny\n", call("a"), call("b", ASKED), call("c"))
    ((first, second),) = agents.asked
    assert [(first.call_id, first.digest), (second.call_id, second.digest)] == [
        ("a", "digest of a"),
        ("c", "digest of c"),
    ]
    assert [
        part for part in ("tool_of_c", "a: Approved.", "c: Not approved: it was decided.") if part not in shown
    ] == []


@for_each(
    ("answers", "approved", "asks_again"),
    [
        ("all\n\n\n\n", [], False),
        ("all\nn\n\n\n", [], False),
        ("all\nno\n\n\n", [], False),
        ("all\nperhaps\n\n\n", [], True),
        ("ALL\nyes but not the first\ny\n", [["a", "b"]], True),
    ],
)
async def test_nothing_is_approved_without_an_explicit_yes(
    answers: str, approved: list[list[str]], asks_again: bool
) -> None:
    """An unclear answer is asked for again."""
    agents = Agents()
    shown = await typed(agents, answers, call("a"), call("b"))
    assert [[decision.call_id for decision in decisions] for decisions in agents.asked] == approved
    assert ("Type y or n." in shown) is asks_again


async def test_each_line_decides_on_the_call_shown() -> None:
    """HITL-1: a question can be refused.

    An empty line skips a call, and the end of input leaves the remaining calls.
    """
    agents, rules = Agents(), Rules()
    decided = call_pb2.Decision(user_id="cyd")
    two = call("d", approval=call_pb2.ApprovalRequest(approvals_required=2, approvals=[decided], escalated=True))
    text = "\na\n/refuse not now\nalways\na\n"
    shown = await typed(agents, text, call("a"), call("b"), call("c", ASKED), two, call("e"), rules=rules)
    approved, refused, also = agents.asked
    assert [each.call_id for each in agents.asked] == ["b", "c", "d"]
    assert (refused.kind, refused.reason) == (call_pb2.DECISION_KIND_REJECT, "not now")
    assert approved.kind == also.kind == call_pb2.DECISION_KIND_APPROVE
    assert ("approved by 1 of 2: cyd" in shown, "the deadline was extended" in shown) == (True, True)
    assert ("needs two approvers" in shown, rules.made) == (True, []), "two-person decisions create no rule"


async def test_a_front_end_call_accepts_a_json_result_or_an_error() -> None:
    """FE-3, FE-5: after invalid JSON, the command asks again."""
    agents = Agents()
    shown = await typed(agents, 'hello\n{"x": 1}\n! no such panel\n', call("a", OFFERED), call("b", OFFERED))
    assert [(each.call_id, each.content_json, each.is_error) for each in agents.asked] == [
        ("a", b'{"x": 1}', False),
        ("b", b'"no such panel"', True),
    ]
    assert "is not JSON" in shown


async def test_an_always_answer_approves_the_call_and_allows_its_tool_in_the_conversation() -> None:
    """HITL-5: the output shows how to revoke the rule."""
    agents, rules = Agents(), Rules()
    shown = await typed(agents, "always\n", call("a", conversation_id="conv_1"), rules=rules)
    assert [(each.effect, each.tool_name, each.scope, each.scope_id) for each in rules.made] == [
        (rule_pb2.RULE_EFFECT_ALLOW, "tool_of_a", rule_pb2.RULE_SCOPE_CONVERSATION, "conv_1")
    ]
    decisions = [(each.kind, each.digest) for each in agents.asked]
    assert decisions == [(call_pb2.DECISION_KIND_APPROVE, "digest of a")]
    assert [
        part
        for part in ("Approved. New rule: allow tool_of_a, in conv_1.", "pawl rules revoke rule_1")
        if part not in shown
    ] == []
    assert not rules.revoked


async def test_an_always_answer_that_partly_fails_reports_what_succeeded() -> None:
    agents, rules = Agents(), Rules()
    rules.refuses_to.add("make")
    shown = await typed(agents, "always\n", call("a"), rules=rules)
    assert (agents.asked, "requires the approver role" in shown) == ([], True)
    agents, rules = Agents(late="a"), Rules()
    shown = await typed(agents, "always\n", call("a"), rules=rules)
    assert (rules.revoked, "New rule" in shown) == (["rule_1"], False)
    rules.refuses_to.add("revoke")
    shown = await typed(agents, "always\n", call("a"), rules=rules)
    assert [part for part in ("still active: Not now", "`pawl rules revoke rule_1`") if part not in shown] == []


def test_job_lines_show_only_fields_that_are_set() -> None:
    """ASYNC-7: the lines show the progress, the wait and the pending calls."""
    definition = run_pb2.Job(tool_name="probe", arguments_json=b"{}", interval_seconds=60, iterations_max=5)
    definition.end_time.CopyFrom(Timestamp(seconds=1_900_000_000))
    job = jobs_pb2.BackgroundJob(
        job_id="run_2",
        conversation_id="conv_1",
        parent_run_id="run_1",
        definition=definition,
        state=run_pb2.RUN_STATE_WAITING,
        iterations=3,
        failures=1,
        last_result='{"up":\x1btrue}',
        waiting=waiting_pb2.Waiting(sentence="It is waiting for an approval of probe."),
        pending_calls=[
            call_pb2.Call(run_id="run_2", call_id="call_4", state=call_pb2.CALL_STATE_AWAITING_APPROVAL),
            call_pb2.Call(run_id="run_2", call_id="call_5", state=call_pb2.CALL_STATE_OFFERED),
        ],
    )
    output = "\n".join(job_lines(job))
    shown = (
        "run_2: waiting",
        "progress: 3 of 5 (1 failed)",
        "interval seconds: 60",
        "It is waiting for an approval of probe.",
        "parent run id: run_1",
        "conversation id: conv_1",
        "decide with: pawl approve run_2 call_4",
    )
    hidden = ("\x1b", "call_5", "next:", "end time: 2026", "failure:", "stopped by", "trimmed")
    assert [part for part in (*shown, *hidden) if (part in output) is (part in hidden)] == []
    job.waiting.reason = waiting_pb2.WAIT_REASON_PAUSED
    assert "run_2: paused" in job_lines(job)
    assert paused_text(job) == "run_2 (probe) is paused. Resume it with: pawl jobs resume run_2"
    once = jobs_pb2.BackgroundJob(job_id="run_3")
    once.definition.iterations_max = once.iterations = once.failures = 1
    assert "is a single call" in paused_text(once)
    once.progress.CopyFrom(run_pb2.JobProgress(fraction=0.996, message="page 9"))
    once.state, once.stop_cause = run_pb2.RUN_STATE_CANCELLING, run_pb2.STOP_CAUSE_USER
    assert job_lines(once)[:2] == ["run_3: being stopped by its user", "progress: 99% page 9"]
    assert not any("last result" in line for line in job_lines(once))
    job.ClearField("waiting")
    job.state, job.stop_cause = run_pb2.RUN_STATE_CANCELLED, run_pb2.STOP_CAUSE_USER
    job.iterations, job.trimmed_iterations = 5_101, 5_000
    assert {"run_2: stopped by its user", "trimmed iterations: 5000"} <= set(job_lines(job))
    job.state = run_pb2.RUN_STATE_CANCELLING
    assert "run_2: being stopped by its user" in job_lines(job)


def test_stopped_job_with_one_call_shows_only_the_calls_progress() -> None:
    job = jobs_pb2.BackgroundJob(job_id="run_1", state=run_pb2.RUN_STATE_CANCELLED, iterations=1, failures=1)
    job.definition.iterations_max = 1
    assert (job_lines(job)[:1], progress_text(job)) == (["run_1: stopped"], "")
    for fraction, text in ((0.01, "1% shelf 53 of 3600"), (0.996, "99% shelf 53 of 3600")):
        job.progress.fraction, job.progress.message = fraction, "shelf 53 of 3600"
        assert progress_text(job) == text, "100% means that the call has ended"


def test_the_reports_option_accepts_a_word_or_json_and_refuses_other_values() -> None:
    for given in ("every=10", '{"every": 10}'):
        request = jobs_pb2.StartJobRequest()
        put_reports(request, given)
        assert (request.reports, request.report_iterations) == (run_pb2.JOB_REPORTS_EVERY, 10)
    for given in ("sometimes", "every=x", "every=", "every=2.5", '{"each": 2}', "digest", "change=2"):
        with pytest.raises(CommandError, match=r'or as JSON, \{"every": 10\}'):
            put_reports(jobs_pb2.StartJobRequest(), given)


def shown_of_undo_and_steps(step: steps_pb2.Step, *, full: bool = False) -> str:
    output = io.StringIO()
    show_step(Console(file=output, width=60, highlight=False, color_system=None), step, full=full)
    return output.getvalue()


def test_a_step_is_shown_folded_or_in_full_without_control_codes() -> None:
    step = steps_pb2.Step(type=steps_pb2.STEP_TYPE_REASONING, round=2, content="First I look at the files.\n" * 20)
    assert (shown_of_undo_and_steps(step).count("\n"), "…" in shown_of_undo_and_steps(step)) == (1, True)
    assert shown_of_undo_and_steps(step, full=True).count("First I look at the files.") == 20
    step = steps_pb2.Step(type=steps_pb2.STEP_TYPE_ANSWER, content="a\x1b[2Jb", tool_name="\x1b]0;x")
    assert "\x1b" not in shown_of_undo_and_steps(step) + shown_of_undo_and_steps(step, full=True)
    step = steps_pb2.Step(type=steps_pb2.STEP_TYPE_RESULT, tool_name="read", content_omitted_bytes=70_000)
    assert shown_of_undo_and_steps(step) == "  0 result read: 70000 bytes\n"


def test_every_undo_state_has_a_description_and_every_inverse_names_its_call() -> None:
    for state in undo_pb2.UndoState.values()[1:]:
        undo = undo_pb2.CallUndo(call_id="call_1", tool_name="write", state=state, summary="Take it back", reason="why")
        line, _ = undo_line(undo)
        assert ("does not know" in line, "call_1  write" in line) == (False, True), state
    call = call_pb2.Call(call_id="undo_1", undoes_call_id="call_1", arguments_json=b"{}")
    assert "undoes: call call_1" in wording.call_lines(call, datetime.now(tz=UTC))


async def test_watching_shows_only_the_newest_of_earlier_progress() -> None:
    def progress(seq: int, call_id: str) -> event_pb2.RunEvent:
        return event_pb2.RunEvent(seq=seq, tool_progress=event_pb2.ToolProgress(call_id=call_id))

    def settled(seq: int, call_id: str) -> event_pb2.RunEvent:
        return event_pb2.RunEvent(seq=seq, call_changed=event_pb2.CallChanged(call=call_pb2.Call(call_id=call_id)))

    events = [progress(1, "a"), progress(2, "b"), settled(3, "a"), progress(4, "b"), progress(5, "c")]
    events += [settled(6, "d"), progress(7, "b"), progress(8, "b")]

    async def watched(last_seq: int, *, after: int = 0) -> list[int]:
        async def stream() -> AsyncIterator[Any]:
            for event in events[after:]:
                yield event

        return [event.seq async for event in without_old_progress(stream(), last_seq) if isinstance(event, RunEvent)]

    rows = {(0, 0): [1, 2, 3, 4, 5, 6, 7, 8], (6, 0): [3, 6, 4, 5, 7, 8], (8, 0): [3, 6, 8, 5], (5, 6): [7, 8]}
    assert {(last_seq, after): await watched(last_seq, after=after) for last_seq, after in rows} == rows


def test_runs_of_workflows_and_goals_are_listed_with_their_name_or_aim() -> None:
    runs = [run_pb2.Run(workflow=PinnedWorkflow(name="offer")), run_pb2.Run(), run_pb2.Run()]
    runs[1].goal.aim = "Fix\nall links of the page, and then tell me about it."
    program: Any = COLUMNS["program"]
    assert list(map(program, runs)) == ["workflow: offer", "goal: Fix all links of the page, and then tel…", ""]


# The tree of a workflow run's nodes.


NOW = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)


def node(path: str, kind: str, state: Any, **fields: Any) -> NodeExecution:
    made = NodeExecution(path=path, kind=kind, state=state, **fields)
    if state not in {NODE_STATE_PENDING, NODE_STATE_SKIPPED}:
        made.start_time.FromJsonString("2026-01-01T00:00:00Z")
    if state in {NODE_STATE_SUCCEEDED, NODE_STATE_FAILED}:
        made.end_time.FromJsonString("2026-01-01T00:00:02.500Z")
    return made


def execution(*nodes: NodeExecution, state: Any = run_pb2.RUN_STATE_RUNNING, **fields: Any) -> GetExecutionResponse:
    run = run_pb2.Run(run_id="run_1", state=state, workflow=PinnedWorkflow(name="triage", version=3), **fields)
    return GetExecutionResponse(run=run, nodes=nodes)


def test_nodes_have_states_times_progress_and_branches() -> None:
    branches = [node("both.a", "agent", NODE_STATE_SUCCEEDED), node("both.long_b", "tool", NODE_STATE_RUNNING)]
    items = MapExecution(items=200, succeeded=95, failed=5)
    lines = execution_lines(
        execution(
            node("fetch", "tool", NODE_STATE_SUCCEEDED, attempt=2),
            node("check", "human", NODE_STATE_SUCCEEDED, decided_by="ann"),
            node("both", "parallel", NODE_STATE_RUNNING, nodes=branches),
            node("each", "map", NODE_STATE_RUNNING, map=items, iteration=3),
            node("other", "agent", NODE_STATE_SKIPPED),
            node("answer", "output", NODE_STATE_PENDING),
        ),
        NOW,
    )
    assert lines == [
        "triage version 3: running  run_1",
        "✓ fetch   tool       succeeded, 2.5 s, attempt 2",
        "✓ check   human      succeeded, by ann, 2.5 s",
        "● both    parallel   running, 1 min",
        "  ├ ✓ a       agent      succeeded, 2.5 s",
        "  └ ● long_b  tool       running, 1 min",
        "● each    map        running, ━━━━━━━━━━────────── 100 of 200 (5 failed), 1 min, iteration 3",
        "- other   agent      skipped",
        "· answer  output     pending",
    ]


def test_the_failed_node_and_the_outcome_are_shown_as_plain_text() -> None:
    error = NodeError(reason="TOOL_ERROR", message="no \x1b[31m disk")
    failed = node("fetch", "tool", NODE_STATE_FAILED, error=error, child_run_id="run_2")
    failure = run_pb2.RunFailure(reason="NODE_FAILED", message="fetch failed:\n✓ all is well")
    heading, line, *rest = execution_lines(execution(failed, state=run_pb2.RUN_STATE_FAILED, failure=failure), NOW)
    assert heading == "triage version 3: failed  run_1"
    assert line.startswith("✗ fetch  tool       failed, 2.5 s, TOOL_ERROR: no ")
    assert "\x1b" not in line
    assert rest == ["NODE_FAILED: fetch failed:", "  | ✓ all is well"]


def test_a_reason_that_the_message_contains_is_not_repeated() -> None:
    failure = run_pb2.RunFailure(reason="EXPIRED", message="Node check: EXPIRED")
    assert execution_lines(execution(failure=failure), NOW)[1:] == ["Node check: EXPIRED"]


def test_a_node_is_shown_with_labels_and_the_names_of_states() -> None:
    attempt = NodeAttempt(attempt=2, call_id="node_1", state=NODE_STATE_FAILED, error=NodeError(reason="TOOL_ERROR"))
    attempt.start_time.FromJsonString("2026-01-01T00:00:00Z")
    attempt.end_time.FromJsonString("2026-01-01T00:00:02Z")
    chunk = MapChunkExecution(run_id="run_9", first_index=50, state=NODE_STATE_SUCCEEDED)
    shown = node("each", "map", NODE_STATE_RUNNING, attempts=[attempt], output_json=b"[1]")
    shown.map.MergeFrom(MapExecution(items=60, succeeded=60, chunks=[chunk]))
    shown.nodes.append(node("each.a", "tool", NODE_STATE_PENDING))
    lines = node_lines(shown, NOW)
    assert lines[:3] == ["path: each", "kind: map", "state: running"]
    assert lines[-4:] == [
        "  └ · a  tool       pending",
        "items: ━━━━━━━━━━━━━━━━━━━━ 60 of 60",
        "  from 50: run run_9, succeeded",
        "attempt 2: failed, call node_1, 2026-01-01 00:00:00Z to 2026-01-01 00:00:02Z, TOOL_ERROR",
    ]


def test_questions_of_a_workflow_are_shown_without_json() -> None:
    asked = call_pb2.Call(context=call_pb2.EXECUTION_CONTEXT_HUMAN, arguments_json=b'{"question":"Pay?"}')
    asked.approval.preview = "Pay?"
    shown = "\n".join(wording.call_lines(asked, NOW))
    assert ("Pay?" in shown, "{" in shown) == (True, False)


async def test_a_call_of_ones_own_run_that_asks_another_user_is_found() -> None:
    """The server says who can decide."""
    target: Any = MagicMock()
    target.pending.return_value.__aiter__.return_value = []
    asked = call_pb2.Call(run_id="run_1", call_id="call_1", asked_user_id="bob")
    target.get = AsyncMock(return_value=run_pb2.Run(pending_calls=[asked]))
    assert await find_pending(target, "run_1", "call_1") == asked
    with pytest.raises(CommandError, match="is not pending"):
        await find_pending(target, "run_1", "call_2")
    target.get.side_effect = RunNotFound
    with pytest.raises(CommandError, match="is not pending"):
        await find_pending(target, "run_1", "call_1")
