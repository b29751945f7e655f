"""Several people and one run: two approvals, products that act for their users, and agents that are handed tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from pawl.agent.v1 import agent_pb2, agents_pb2, types_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.agents_pb2_grpc import AgentRegistryServiceStub
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.event.v1 import agent_pb2 as values
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job_store.bootstrap import bootstrap
from pawl.launcher.suite import Suite
from pawl.tool.v1 import audit_pb2, rule_pb2
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from pawl.tool.v1.rule_pb2_grpc import RuleServiceStub
from tests.keys import keyed_channel
from tests.poll import until
from tests.system.suite import refusals
from tests.system.suite.client import Agent, addresses, key_for, mails_sent

pytestmark = pytest.mark.asyncio(loop_scope="session")

APPROVE, REJECT, EDIT = call_pb2.DECISION_KIND_APPROVE, call_pb2.DECISION_KIND_REJECT, call_pb2.DECISION_KIND_EDIT
AWAITING = call_pb2.CALL_STATE_AWAITING_APPROVAL
COMPLETED = run_pb2.RUN_STATE_COMPLETED
MAIL = "e-mail ann@example.com about Lunch: See you at noon"
BY_TWO = run_pb2.RunOptions(approvals_required=2)
KEYS = {
    "shop": ("delegate", "member", "approver"),
    "desk": ("delegate", "member", "approver"),
    "cyd": ("approver",),
    "dan": ("approver",),
    "otto": ("operator", "approver"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def people(suite: Suite) -> AsyncIterator[dict[str, Agent]]:
    """Clients with keys of their own; `shop for abe` and so on with that of a delegate: desk decides for its users."""
    address = addresses(suite)[0]
    async with AsyncExitStack() as stack:
        by = (("authorization", f"Bearer {(await bootstrap(suite.database_url)).secret}"),)
        keys = {user: await key_for(suite, user, *KEYS[user], by=by, decides=user == "desk") for user in KEYS}
        made = {user: Agent(address, user="", key=key) for user, key in keys.items()}
        for delegate in ("shop", "desk"):
            for user in ("abe", "bea", "eve"):
                made[f"{delegate} for {user}"] = Agent(address, user=user, key=keys[delegate])
        for agent in made.values():
            await stack.enter_async_context(agent)
        yield made


def with_roles(agent: Agent, roles: str) -> Agent:
    """Have a delegate hand on more than `member`."""
    agent.metadata = (*agent.metadata, ("pawl-roles", roles))
    return agent


async def refusal(agent: Agent, call: call_pb2.Call, kind: call_pb2.DecisionKind.ValueType = APPROVE) -> str:
    return (await refusals.outcome(agent.decide(call, kind))).reason


async def chain(suite: Suite, call_id: str) -> list[audit_pb2.AuditEntry]:
    """What the audit says about a call, the oldest first."""
    async with keyed_channel(addresses(suite, "tool-registry")[0]) as channel:
        entries = (await AuditServiceStub(channel).ListAudit(audit_pb2.ListAuditRequest(call_id=call_id))).entries
        return sorted(entries, key=lambda entry: entry.seq)


async def test_an_edit_begins_the_approvals_anew_and_what_two_approved_is_sent(
    suite: Suite, agent: Agent, people: dict[str, Agent]
) -> None:
    """HITL-3, HITL-4, TOOL-6, D6"""
    cyd, dan = people["cyd"], people["dan"]
    before = mails_sent(suite)
    run = await agent.start(MAIL, options=BY_TWO)
    call = await agent.until_pending(run.run_id, AWAITING)
    assert await refusal(agent, call) == "PERMISSION_DENIED", "not by who started it"
    await cyd.decide(call, APPROVE)
    edited = json.dumps(json.loads(call.arguments_json) | {"subject": "Dinner"}).encode()
    await dan.decide(call, EDIT, arguments_json=edited)
    shown_again = await agent.until(
        run.run_id, lambda seen: any(b"Dinner" in pending.arguments_json for pending in seen.pending_calls)
    )
    (again,) = shown_again.pending_calls
    assert [approval.user_id for approval in again.approval.approvals] == ["dan"]
    assert await refusal(cyd, call) == "DIGEST_MISMATCH"
    assert mails_sent(suite) == before
    await cyd.decide(again, APPROVE)
    assert (await agent.until_ended(run.run_id)).state == COMPLETED
    assert len(mails_sent(suite) - before) == 1
    decided = [entry for entry in await chain(suite, call.call_id) if entry.kind == audit_pb2.AUDIT_KIND_DECIDED]
    story = [(entry.verdict, entry.by_user_id) for entry in decided]
    assert story == [("APPROVE", "cyd"), ("EDIT", "dan"), ("APPROVE", "cyd")]
    first, *others = [entry.arguments_sha256 for entry in decided]
    assert first != others[0] == others[1]


async def test_users_of_a_delegate_see_their_own_runs_and_it_decides_none_of_them(
    suite: Suite, people: dict[str, Agent]
) -> None:
    """OPS-1, HITL-4"""
    of_abe, of_bea = people["shop for abe"], people["shop for bea"]
    runs = {agent: await agent.start(MAIL) for agent in (of_abe, of_bea)}
    for agent, run in runs.items():
        listed = (await agent.stub.ListRuns(agent_pb2.ListRunsRequest(), metadata=agent.metadata)).runs
        assert [each.run_id for each in listed] == [run.run_id]
        assert (run.delegate_user_id, list(run.user_roles)) == ("shop", ["member"])
    assert (await refusals.outcome(of_bea.get(runs[of_abe].run_id))).reason == "RUN_NOT_FOUND"
    call = await of_abe.until_pending(runs[of_abe].run_id, AWAITING)
    others = await of_bea.until_pending(runs[of_bea].run_id, AWAITING)
    eve = with_roles(people["shop for eve"], "approver")
    for agent in (of_abe, of_bea, people["shop"], eve):
        for kind in (APPROVE, REJECT):
            assert await refusal(agent, call, kind) == "PERMISSION_DENIED"
    async with keyed_channel(addresses(suite, "tool-registry")[0]) as channel:
        rule = rule_pb2.Rule(effect=rule_pb2.RULE_EFFECT_ALLOW, scope=rule_pb2.RULE_SCOPE_USER, tool_name="send_email")
        asked = RuleServiceStub(channel).CreateRule(rule_pb2.CreateRuleRequest(rule=rule), metadata=eve.metadata)
        assert (await refusals.outcome(asked)).reason == "PERMISSION_DENIED", "nor by a rule"
    async with of_abe.session() as session:
        decision = types_pb2.CallDecision(
            run_id=call.run_id, call_id=call.call_id, kind=APPROVE, digest=call.approval.digest
        )
        receipt = await session.receipt(decision=decision)
        assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, "PERMISSION_DENIED")
    await people["cyd"].decide(call, APPROVE)
    assert (await of_abe.until_ended(call.run_id)).state == COMPLETED
    assert (await of_bea.cancel(others.run_id)).state == run_pb2.RUN_STATE_CANCELLED
    entries = await chain(suite, call.call_id)
    assert {(entry.user_id, entry.delegate_user_id) for entry in entries} == {("abe", "shop")}
    (started_with,) = {entry.credential_id for entry in entries}
    (decided,) = [entry for entry in entries if entry.kind == audit_pb2.AUDIT_KIND_DECIDED]
    assert (decided.by_user_id, decided.by_delegate_user_id) == ("cyd", "")
    assert decided.by_credential_id not in {"", started_with}


async def test_one_credential_is_one_person_and_so_are_the_keys_that_it_makes(
    suite: Suite, people: dict[str, Agent]
) -> None:
    """HITL-4: a delegate that decides for its users is one person; an operator is none more by keys it has made."""
    of_abe, of_bea, of_eve = (with_roles(people[f"desk for {user}"], "approver") for user in ("abe", "bea", "eve"))
    run = await of_abe.start(f"call run_agent with {json.dumps({'task': MAIL})}", options=BY_TWO)
    call = await of_abe.until_pending(run.run_id, AWAITING)
    below = await of_abe.get(call.run_id)
    assert (below.user_id, below.credential_id, below.delegate_user_id) == ("abe", run.credential_id, "desk")
    for agent in (of_bea, of_eve, people["desk"]):
        assert await refusal(agent, call) == "PERMISSION_DENIED"
    await of_abe.cancel(run.run_id)

    cyd, dan, otto = people["cyd"], people["dan"], people["otto"]
    run = await cyd.start(MAIL, options=BY_TWO)
    call = await cyd.until_pending(run.run_id, AWAITING)
    reasons = await asyncio.gather(*(refusal(agent, call) for agent in (of_bea, of_eve)))
    assert sorted(reasons) == ["", "PERMISSION_DENIED"]
    await dan.decide(call, APPROVE)
    assert (await cyd.until_ended(run.run_id)).state == COMPLETED

    zoe_key = await key_for(suite, "zoe", "operator", "approver", by=otto.metadata)
    async with Agent(addresses(suite)[0], user="", key=zoe_key) as zoe:
        for starter, first, refused in ((cyd, otto, zoe), (zoe, cyd, otto)):
            run = await starter.start(MAIL, options=BY_TWO)
            call = await starter.until_pending(run.run_id, AWAITING)
            await first.decide(call, APPROVE)
            assert await refusal(refused, call) == "PERMISSION_DENIED"
            await dan.decide(call, APPROVE)
            assert (await starter.until_ended(run.run_id)).state == COMPLETED


def definition(name: str, *tools: str, delegates_to: tuple[str, ...] = ()) -> values.AgentDefinition:
    return values.AgentDefinition(name=name, tools=values.ToolSelection(names=tools), delegates_to=delegates_to)


async def texts(agent: Agent, conversation_id: str) -> str:
    request = agent_pb2.ListMessagesRequest(conversation_id=conversation_id)
    return "\n".join(each.text for each in (await agent.stub.ListMessages(request, metadata=agent.metadata)).messages)


async def test_a_conversation_is_imported_continued_forked_and_erased_while_agents_delegate(
    agent: Agent, other_agent: Agent
) -> None:
    register, conversations = AgentRegistryServiceStub(agent.channel), ConversationServiceStub(agent.channel)
    for made in (definition("summer", "calculate"), definition("booker", "send_email", delegates_to=("summer",))):
        await register.UpdateAgent(agents_pb2.UpdateAgentRequest(definition=made), metadata=agent.metadata)
    history = [
        pb.HistoryMessage(role=pb.HISTORY_ROLE_USER, text="How warm is it in Oslo?"),
        pb.HistoryMessage(
            role=pb.HISTORY_ROLE_ASSISTANT,
            calls=[pb.HistoryCall(call_id="abc", tool_name="weather", arguments_json='{"city": "Oslo"}')],
        ),
        pb.HistoryMessage(role=pb.HISTORY_ROLE_TOOL, call_id="abc", text='{"degrees": 12}'),
        pb.HistoryMessage(role=pb.HISTORY_ROLE_ASSISTANT, text="12 degrees, says the thermometer."),
    ]
    request = pb.ImportConversationRequest(messages=history, request_id="import")
    imported = (await conversations.ImportConversation(request, metadata=agent.metadata)).conversation.conversation_id
    start = agent_pb2.StartRunRequest(
        text='call run_agent with {"task": "what is 6 * 7?", "agent": "summer"}',
        conversation_id=imported,
        agent="booker",
    )
    first = (await agent.stub.StartRun(start, metadata=agent.metadata)).run
    done = await other_agent.until_ended(first.run_id)
    assert (done.state, done.agent.name, "42" in done.output_text) == (COMPLETED, "booker", True)
    below = agent_pb2.ListRunsRequest(parent_run_id=first.run_id)
    (child,) = (await agent.stub.ListRuns(below, metadata=agent.metadata)).runs
    assert (child.agent.name, [found.agent_name for found in child.above]) == ("summer", ["booker"])

    fork = pb.ForkConversationRequest(conversation_id=imported, number=3, request_id="fork")
    forked = (await conversations.ForkConversation(fork, metadata=agent.metadata)).conversation.conversation_id
    other = await agent.start("what is 400 * 2", conversation_id=forked)
    assert "800" in (await agent.until_ended(other.run_id)).output_text
    past = await texts(agent, forked)
    assert ("12 degrees" in past, "6 * 7" in past) == (True, False)

    erase = pb.EraseConversationRequest(conversation_id=imported)

    async def is_erased() -> bool:
        answer = await conversations.EraseConversation(erase, metadata=agent.metadata)
        return answer.erasure.HasField("end_time")

    await until(is_erased)
    assert not (await agent.stub.ListRuns(below, metadata=agent.metadata)).runs
    assert (await refusals.outcome(texts(agent, imported))).reason == "CONVERSATION_ERASED"
    left = await texts(agent, forked)
    assert ("12 degrees" in left, "400 * 2" in left) == (False, True)
    again = await agent.start("what is 3 * 3", conversation_id=forked)
    assert "9" in (await agent.until_ended(again.run_id)).output_text
