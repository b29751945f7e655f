"""Several people and one run, through the whole suite: two approvals, an edit between them, and escalation (D6)."""

from __future__ import annotations

import asyncio
import email
import email.policy
import json

import pytest

from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.tool.v1 import audit_pb2
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from tests.keys import keyed_channel
from tests.rpc.tool_registry.digests import digest_of
from tests.system.suite import refusals
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

APPROVE, EDIT = call_pb2.DECISION_KIND_APPROVE, call_pb2.DECISION_KIND_EDIT
AWAITING = call_pb2.CALL_STATE_AWAITING_APPROVAL


async def test_an_edit_begins_the_approvals_anew_and_what_two_approved_is_sent(suite: Suite, agent: Agent) -> None:
    """HITL-3, HITL-4"""
    outbox = suite.folder.path / "outbox"
    before = set(outbox.glob("**/*.eml"))
    addresses = [replica.grpc for replica in suite.endpoints.services["agent-loop"]]
    async with Agent(addresses[0], user="cyd") as cyd, Agent(addresses[1], user="dan") as dan:
        options = run_pb2.RunOptions(approvals_required=2)
        run = await agent.start("e-mail ann@example.com about Lunch: See you at noon", options=options)
        call = await agent.until_pending(run.run_id, AWAITING)
        assert call.approval.approvals_required == 2
        assert (await refusals.outcome(agent.decide(call, APPROVE))).reason == "PERMISSION_DENIED"
        await cyd.decide(call, APPROVE)
        edited = json.loads(call.arguments_json) | {"subject": "Dinner"}
        await dan.decide(call, EDIT, arguments_json=json.dumps(edited).encode())
        shown_again = await agent.until(
            run.run_id, lambda seen: any(b"Dinner" in pending.arguments_json for pending in seen.pending_calls)
        )
        (again,) = shown_again.pending_calls
        assert [approval.user_id for approval in again.approval.approvals] == ["dan"]
        assert "Dinner" in again.approval.preview
        assert (await refusals.outcome(cyd.decide(call, APPROVE))).reason == "DIGEST_MISMATCH"
        assert set(outbox.glob("**/*.eml")) == before
        await cyd.decide(again, APPROVE)
        assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    (sent,) = set(outbox.glob("**/*.eml")) - before
    message = email.message_from_bytes(sent.read_bytes(), policy=email.policy.default)
    assert message["subject"] == "Dinner"
    (settled,) = await agent.calls(run.run_id)
    assert [approval.user_id for approval in settled.approval.approvals] == ["dan", "cyd"]
    assert "edited" in settled.result.note
    chain = await decided(suite, call.call_id)
    assert [(entry.verdict, entry.by_user_id) for entry in chain] == [
        ("APPROVE", "cyd"),
        ("EDIT", "dan"),
        ("APPROVE", "cyd"),
    ]
    about = [entry.arguments_sha256 for entry in chain]
    digests = [
        await digest_of(suite.database_url, each.arguments_json, run.conversation_id) for each in (call, settled)
    ]
    assert about == [digests[0], digests[1], digests[1]]


async def test_an_approval_is_audited_though_the_call_is_never_made(suite: Suite, agent: Agent) -> None:
    """TOOL-6: who approved, and not only who approved last."""
    options = run_pb2.RunOptions(approvals_required=2)
    run = await agent.start("e-mail ann@example.com about Lunch: See you at noon", options=options)
    call = await agent.until_pending(run.run_id, AWAITING)
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc, user="cyd") as cyd:
        await cyd.decide(call, APPROVE)
    await agent.cancel(run.run_id)
    assert [(entry.verdict, entry.by_user_id) for entry in await decided(suite, call.call_id)] == [("APPROVE", "cyd")]


async def decided(suite: Suite, call_id: str) -> list[audit_pb2.AuditEntry]:
    """What the audit chain says of decisions about a call."""
    async with keyed_channel(suite.endpoints.services["tool-registry"][0].grpc) as channel:
        request = audit_pb2.ListAuditRequest(call_id=call_id, kind=audit_pb2.AUDIT_KIND_DECIDED)
        entries = (await AuditServiceStub(channel).ListAudit(request)).entries
    return sorted(entries, key=lambda entry: entry.seq)


async def test_a_request_that_nobody_decides_is_escalated_once_and_then_denied(agent: Agent) -> None:
    """HITL-4"""
    options = run_pb2.RunOptions(
        limits=run_pb2.RunLimits(approval_expiry_seconds=1.5),
        approval_expiry_policy=run_pb2.APPROVAL_EXPIRY_POLICY_ESCALATE,
    )
    run = await agent.start("e-mail ann@example.com about Lunch: See you at noon", options=options)
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    events = await agent.events(run.run_id)
    requests = [event.call_changed.call for event in events if event.type == "tool.awaiting_approval"]
    assert [request.approval.escalated for request in requests] == [False, True]
    assert requests[0].deadline_time.ToSeconds() < requests[1].deadline_time.ToSeconds()
    (settled,) = await agent.calls(run.run_id)
    assert settled.state == call_pb2.CALL_STATE_EXPIRED


async def test_an_escalated_request_can_still_be_approved(suite: Suite, agent: Agent) -> None:
    options = run_pb2.RunOptions(
        limits=run_pb2.RunLimits(approval_expiry_seconds=6.0),
        approval_expiry_policy=run_pb2.APPROVAL_EXPIRY_POLICY_ESCALATE,
    )
    run = await agent.start("e-mail ann@example.com about Lunch: See you at noon", options=options)
    seen = await agent.until(run.run_id, lambda seen: any(call.approval.escalated for call in seen.pending_calls))
    async with Agent(suite.endpoints.services["agent-loop"][1].grpc, user="cyd") as cyd:
        await cyd.decide(seen.pending_calls[0], APPROVE)
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    (settled,) = await agent.calls(run.run_id)
    assert settled.state == call_pb2.CALL_STATE_SUCCEEDED


async def test_two_approvals_at_once_run_the_call_once(suite: Suite, agent: Agent) -> None:
    """D6, I5"""
    outbox = suite.folder.path / "outbox"
    before = set(outbox.glob("**/*.eml"))
    run = await agent.start(
        "e-mail ann@example.com about Lunch: See you at noon", options=run_pb2.RunOptions(approvals_required=2)
    )
    call = await agent.until_pending(run.run_id, AWAITING)
    addresses = [replica.grpc for replica in suite.endpoints.services["agent-loop"]]
    async with Agent(addresses[0], user="cyd") as cyd, Agent(addresses[1], user="dan") as dan:
        asked = [refusals.outcome(person.decide(call, APPROVE)) for person in (cyd, dan, cyd, dan)]
        outcomes = await asyncio.gather(*asked)
    assert sorted(outcome.reason for outcome in outcomes)[:2] == ["", ""]
    assert {outcome.reason for outcome in outcomes} <= {"", "ALREADY_DECIDED", "CALL_NOT_PENDING"}
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    assert len(set(outbox.glob("**/*.eml")) - before) == 1
