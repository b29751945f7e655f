"""The inbox on a terminal: what is typed is done about the call that was shown, and nothing else (HITL-6, FE-3)."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.cli.inbox import Desk
from pawl.cli.lines import LineReader
from pawl.client import AsyncClient
from pawl.errors import AlreadyDecided, PermissionDenied
from pawl.event.v1 import call_pb2, run_pb2
from pawl.tool.v1 import rule_pb2

AWAITING, OFFERED, ASKED = (
    call_pb2.CALL_STATE_AWAITING_APPROVAL,
    call_pb2.CALL_STATE_OFFERED,
    call_pb2.CALL_STATE_ASKED,
)


class Agents:
    """An AgentService that takes everything but what concerns `late`; its runs are the caller's."""

    def __init__(self, late: str = "") -> None:
        self.asked: list[Any] = []
        self._late = late

    async def GetRun(self, request: agent_pb2.GetRunRequest) -> agent_pb2.GetRunResponse:
        return agent_pb2.GetRunResponse()

    def _receipt(self, call_id: str) -> types_pb2.Receipt:
        if call_id == self._late:
            return types_pb2.Receipt(
                call_id=call_id,
                status=types_pb2.RECEIPT_STATUS_LATE,
                reason="ALREADY_DECIDED",
                message="it was decided",
            )
        return types_pb2.Receipt(call_id=call_id, status=types_pb2.RECEIPT_STATUS_ACCEPTED)

    async def Decide(self, request: agent_pb2.DecideRequest) -> agent_pb2.DecideResponse:
        self.asked.append(request.decision)
        if request.decision.call_id == self._late:
            raise AlreadyDecided("it was decided")
        return agent_pb2.DecideResponse(receipt=self._receipt(request.decision.call_id))

    async def DecideCalls(self, request: agent_pb2.DecideCallsRequest) -> agent_pb2.DecideCallsResponse:
        self.asked.append(list(request.decisions))
        receipts = [self._receipt(decision.call_id) for decision in request.decisions]
        return agent_pb2.DecideCallsResponse(receipts=receipts)

    async def SubmitToolResults(
        self, request: agent_pb2.SubmitToolResultsRequest
    ) -> agent_pb2.SubmitToolResultsResponse:
        self.asked.append(request.results[0])
        receipts = [self._receipt(result.call_id) for result in request.results]
        return agent_pb2.SubmitToolResultsResponse(receipts=receipts)


def call(call_id: str, state: call_pb2.CallState.ValueType = AWAITING, **fields: Any) -> call_pb2.Call:
    made = call_pb2.Call(run_id="run_1", call_id=call_id, state=state, tool_name=f"tool_of_{call_id}", **fields)
    if state == AWAITING:
        made.approval.digest = f"digest of {call_id}"
        made.approval.approvals_required = max(1, made.approval.approvals_required)
    if state == ASKED:
        made.question.question = "When?"
    return made


class Rules:
    """A RuleService."""

    def __init__(self) -> None:
        self.made: list[rule_pb2.Rule] = []
        self.revoked: list[str] = []
        self.refuses_to: set[str] = set()

    async def CreateRule(self, request: rule_pb2.CreateRuleRequest) -> rule_pb2.CreateRuleResponse:
        if "make" in self.refuses_to:
            raise PermissionDenied("that needs the role approver")
        self.made.append(request.rule)
        request.rule.rule_id = "rule_1"
        return rule_pb2.CreateRuleResponse(rule=request.rule)

    async def RevokeRule(self, request: rule_pb2.RevokeRuleRequest) -> rule_pb2.RevokeRuleResponse:
        if "revoke" in self.refuses_to:
            raise PermissionDenied("not now")
        self.revoked.append(request.rule_id)
        return rule_pb2.RevokeRuleResponse()


async def typed(agents: Agents, text: str, *calls: call_pb2.Call | run_pb2.Run, rules: Rules | None = None) -> str:
    """Go through calls with these lines typed; return what was shown."""
    shown = io.StringIO()
    target = AsyncClient("127.0.0.1:1", environment={})
    vars(target).update(agents=agents, rules=rules or Rules())
    console = Console(file=shown, width=200, highlight=False)
    await Desk(target, console, LineReader(io.StringIO(text))).go_through(calls)
    return shown.getvalue()


async def test_all_are_approved_together_after_all_were_shown() -> None:
    agents = Agents(late="c")
    shown = await typed(agents, "all\ny\n", call("a"), call("b", ASKED), call("c"))
    ((first, second),) = agents.asked
    assert [(first.call_id, first.digest), (second.call_id, second.digest)] == [
        ("a", "digest of a"),
        ("c", "digest of c"),
    ]
    assert "tool_of_c" in shown
    assert "a: Approved." in shown
    assert "c: Not approved: it was decided." in shown


@pytest.mark.parametrize("answer", ["", "n", "no", "perhaps"])
async def test_all_are_not_approved_without_a_yes(answer: str) -> None:
    agents = Agents()
    await typed(agents, f"all\n{answer}\n\n\n", call("a"), call("b"))
    assert not agents.asked


async def test_all_are_asked_about_again_after_an_unclear_answer() -> None:
    agents = Agents()
    shown = await typed(agents, "ALL\nyes but not the first\ny\n", call("a"), call("b"))
    assert [[decision.call_id for decision in decisions] for decisions in agents.asked] == [["a", "b"]]
    assert "Type y or n." in shown


async def test_a_front_end_call_takes_its_result_as_json_or_an_error() -> None:
    """FE-3, FE-5: what is no JSON is asked for again."""
    agents = Agents()
    shown = await typed(agents, 'hello\n{"x": 1}\n! no such panel\n', call("a", OFFERED), call("b", OFFERED))
    first, second = agents.asked
    assert (first.call_id, first.content_json, first.is_error) == ("a", b'{"x": 1}', False)
    assert (second.call_id, second.content_json, second.is_error) == ("b", b'"no such panel"', True)
    assert "is not JSON" in shown


async def test_an_empty_line_skips_and_the_end_of_the_input_leaves() -> None:
    agents = Agents()
    await typed(agents, "\na\n", call("a"), call("b"), call("c"))
    assert [decision.call_id for decision in agents.asked] == ["b"]


async def test_a_question_can_be_refused() -> None:
    """HITL-1"""
    agents = Agents()
    await typed(agents, "/refuse not now\n", call("a", ASKED))
    (decision,) = agents.asked
    assert (decision.kind, decision.reason) == (call_pb2.DECISION_KIND_REJECT, "not now")


async def test_who_approved_so_far_is_shown() -> None:
    """D6"""
    approval = call_pb2.ApprovalRequest(
        approvals_required=2, approvals=[call_pb2.Decision(user_id="cyd")], escalated=True
    )
    shown = await typed(Agents(), "a\n", call("a", approval=approval, user_id="ann"))
    assert "approved by 1 of 2: cyd" in shown
    assert "escalated" in shown
    assert "of ann" in shown
    assert "Approved: 2 of 2." in shown


async def test_always_approves_and_allows_the_tool_in_its_conversation() -> None:
    """HITL-5: one answer, both done, and how to end it."""
    agents, rules = Agents(), Rules()
    shown = await typed(agents, "always\n", call("a", conversation_id="conv_1"), rules=rules)
    (rule,) = rules.made
    assert (rule.effect, rule.tool_name) == (rule_pb2.RULE_EFFECT_ALLOW, "tool_of_a")
    assert (rule.scope, rule.scope_id) == (rule_pb2.RULE_SCOPE_CONVERSATION, "conv_1")
    (decision,) = agents.asked
    assert (decision.kind, decision.digest) == (call_pb2.DECISION_KIND_APPROVE, "digest of a")
    assert "Approved. From now on: allow tool_of_a, in conv_1." in shown
    assert "pawl rules revoke rule_1" in shown
    assert not rules.revoked


async def test_a_rule_that_cannot_be_made_leaves_the_call_as_it_is() -> None:
    agents, rules = Agents(), Rules()
    rules.refuses_to.add("make")
    shown = await typed(agents, "always\n", call("a"), rules=rules)
    assert not agents.asked
    assert "needs the role approver" in shown


async def test_a_rule_whose_approval_is_not_taken_is_revoked() -> None:
    agents, rules = Agents(late="a"), Rules()
    shown = await typed(agents, "always\n", call("a"), rules=rules)
    assert rules.revoked == ["rule_1"]
    assert "It was decided" in shown
    assert "From now on" not in shown


async def test_a_rule_that_stays_without_its_approval_is_said() -> None:
    agents, rules = Agents(late="a"), Rules()
    rules.refuses_to.add("revoke")
    shown = await typed(agents, "always\n", call("a"), rules=rules)
    assert "It was decided" in shown
    assert "still in force: Not now" in shown
    assert "`pawl rules revoke rule_1`" in shown


async def test_what_two_people_decide_is_not_remembered_and_can_still_be_approved() -> None:
    agents, rules = Agents(), Rules()
    two = call("a")
    two.approval.approvals_required = 2
    shown = await typed(agents, "always\na\n", two, rules=rules)
    assert not rules.made
    assert "needs two people" in shown
    assert [decision.call_id for decision in agents.asked] == ["a"]


async def test_a_run_that_waits_for_tokens_says_how_it_goes_on() -> None:
    fields: dict[str, Any] = {"token_budget": 100, "usage": run_pb2.Usage(input_tokens=90, output_tokens=9)}
    mine = run_pb2.Run(run_id="run_1", conversation_id="conv_1", **fields)
    of_ann = run_pb2.Run(run_id="run_2", user_id="ann", **fields)
    shown = await typed(Agents(), "", mine, of_ann)
    assert "run_1 waits for more tokens" in shown
    assert "may use 100 tokens; it has used 99" in shown
    assert "pawl top-up run_1 TOKENS" in shown
    assert "waits for its user, ann" in shown
    assert "top-up run_2" not in shown
    mine.tokens_needed = 70
    assert "add at least 70 with: pawl top-up run_1 70" in await typed(Agents(), "", mine)
