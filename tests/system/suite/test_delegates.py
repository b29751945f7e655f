"""A product that acts for its users with one key, and people who decide with keys of their own."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import pytest_asyncio

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.identity.v1 import key_pb2
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.tool.v1 import audit_pb2, rule_pb2
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from pawl.tool.v1.rule_pb2_grpc import RuleServiceStub
from tests.keys import keyed_channel
from tests.system.suite import refusals
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="module")

APPROVE, REJECT = call_pb2.DECISION_KIND_APPROVE, call_pb2.DECISION_KIND_REJECT
AWAITING = call_pb2.CALL_STATE_AWAITING_APPROVAL
MAIL: Final = "e-mail ann@example.com about Lunch: See you at noon"
KEYS: Final[dict[str, dict[str, Any]]] = {
    "shop": {"roles": ["delegate", "member", "approver"]},
    "desk": {"roles": ["delegate", "member", "approver"], "decides_for_users": True},
    "cyd": {"roles": ["approver"]},
    "dan": {"roles": ["approver"]},
    "olga": {"roles": ["operator"]},
    "otto": {"roles": ["operator", "approver"]},
    "zoe": {"roles": ["approver"]},
}


def key_of(user: str) -> str:
    return f"the-key-of-{user}-0123456789"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite() -> AsyncIterator[Suite]:
    """A suite with a file of keys."""
    with tempfile.TemporaryDirectory(prefix="pawl-delegates-") as folder:
        keys = Path(folder) / "keys.json"
        entries = [{"key": key_of(user), "store_id": "acme", "user_id": user} | more for user, more in KEYS.items()]
        keys.write_text(json.dumps(entries))
        async with Suite(
            SuiteOptions(data=Path(folder) / "data", environment={"PAWL_API_KEYS_FILE": str(keys)})
        ) as suite:
            yield suite


@pytest_asyncio.fixture(loop_scope="module")
async def people(suite: Suite) -> AsyncIterator[dict[str, Agent]]:
    """Clients: with keys of their own, and `shop for ann` and so on with that of a delegate."""
    address = suite.endpoints.services["agent-loop"][0].grpc
    async with AsyncExitStack() as stack:
        made = {user: Agent(address, user="", key=key_of(user)) for user in KEYS}
        for delegate in ("shop", "desk"):
            for user in ("ann", "bob", "eve"):
                made[f"{delegate} for {user}"] = Agent(address, user=user, key=key_of(delegate))
        for agent in made.values():
            await stack.enter_async_context(agent)
        yield made


def with_roles(agent: Agent, roles: str) -> Agent:
    """Have a delegate hand on more than `member`."""
    agent.metadata = (*agent.metadata, ("pawl-roles", roles))
    return agent


async def chain(suite: Suite, call_id: str) -> list[audit_pb2.AuditEntry]:
    """What the audit says about a call, the oldest first."""
    metadata = (("authorization", f"Bearer {key_of('olga')}"),)
    async with keyed_channel(suite.endpoints.services["tool-registry"][0].grpc) as channel:
        request = audit_pb2.ListAuditRequest(call_id=call_id)
        return list((await AuditServiceStub(channel).ListAudit(request, metadata=metadata)).entries)[::-1]


async def test_users_of_a_delegate_see_their_own_runs_and_it_decides_none_of_them(
    suite: Suite, people: dict[str, Agent]
) -> None:
    """OPS-1, HITL-4"""
    of_ann, of_bob = people["shop for ann"], people["shop for bob"]
    runs = {agent: await agent.start(MAIL) for agent in (of_ann, of_bob)}
    for agent, run in runs.items():
        listed = (await agent.stub.ListRuns(agent_pb2.ListRunsRequest(), metadata=agent.metadata)).runs
        assert [each.run_id for each in listed] == [run.run_id]
        assert (run.delegate_user_id, list(run.user_roles)) == ("shop", ["member"])
    assert (await refusals.outcome(of_bob.get(runs[of_ann].run_id))).reason == "RUN_NOT_FOUND"
    call = await of_ann.until_pending(runs[of_ann].run_id, AWAITING)
    others = await of_bob.until_pending(runs[of_bob].run_id, AWAITING)
    for agent in (of_ann, of_bob, people["shop"], with_roles(people["shop for eve"], "approver")):
        for kind in (APPROVE, REJECT):
            refused = await refusals.outcome(agent.decide(call, kind))
            assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    async with of_ann.session() as session:
        decision = types_pb2.CallDecision(
            run_id=call.run_id, call_id=call.call_id, kind=APPROVE, digest=call.approval.digest
        )
        receipt = await session.receipt(decision=decision)
        assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, "PERMISSION_DENIED")
        await session.receipt(cancel=session_pb2.Cancel(run_id=others.run_id))
    assert (await of_bob.get(others.run_id)).state == run_pb2.RUN_STATE_WAITING, "it is not ann's to stop"
    await people["cyd"].decide(call, APPROVE)
    assert (await of_ann.until_ended(call.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    assert (await of_bob.cancel(others.run_id)).state == run_pb2.RUN_STATE_CANCELLED
    entries = await chain(suite, call.call_id)
    assert {(entry.user_id, entry.delegate_user_id) for entry in entries} == {("ann", "shop")}
    (started_with,) = {entry.credential_id for entry in entries}
    (decided,) = [entry for entry in entries if entry.kind == audit_pb2.AUDIT_KIND_DECIDED]
    assert (decided.by_user_id, decided.by_delegate_user_id) == ("cyd", "")
    assert decided.by_credential_id not in {"", started_with}


async def test_one_credential_is_one_person_however_many_it_names(suite: Suite, people: dict[str, Agent]) -> None:
    """HITL-4: a delegate that decides for users starts it for ann: then nobody approves with its key."""
    options = run_pb2.RunOptions(approvals_required=2)
    of_ann, of_bob, of_eve = (with_roles(people[f"desk for {user}"], "approver") for user in ("ann", "bob", "eve"))
    run = await of_ann.start(MAIL, options=options)
    call = await of_ann.until_pending(run.run_id, AWAITING)
    refused = [await refusals.outcome(agent.decide(call, APPROVE)) for agent in (of_bob, of_eve, people["desk"])]
    assert {each.reason for each in refused} == {"PERMISSION_DENIED"}
    for approver in ("cyd", "dan"):
        await people[approver].decide(call, APPROVE)
    assert (await of_ann.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    run = await people["cyd"].start(MAIL, options=options)
    call = await people["cyd"].until_pending(run.run_id, AWAITING)
    asked = [refusals.outcome(agent.decide(call, APPROVE)) for agent in (of_bob, of_eve)]
    reasons = sorted(each.reason for each in await asyncio.gather(*asked))
    assert reasons == ["", "PERMISSION_DENIED"]
    await people["dan"].decide(call, APPROVE)
    assert (await people["cyd"].until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    decided = [entry for entry in await chain(suite, call.call_id) if entry.kind == audit_pb2.AUDIT_KIND_DECIDED]
    assert [(entry.by_user_id, entry.by_delegate_user_id) for entry in decided][1:] == [("dan", "")]
    assert decided[0].by_delegate_user_id == "desk"


async def made_key(suite: Suite, maker: Agent, user: str, *roles: str) -> str:
    """Return the secret of a key that somebody makes for somebody."""
    asked = key_pb2.CreateKeyRequest(key=key_pb2.Key(user_id=user, roles=roles))
    async with keyed_channel(suite.endpoints.services["job-store"][0].grpc) as channel:
        return (await KeyServiceStub(channel).CreateKey(asked, metadata=maker.metadata)).secret


async def test_who_makes_keys_is_no_second_person_with_them(suite: Suite, people: dict[str, Agent]) -> None:
    """HITL-4: nor with a key that such a key has made, nor for what somebody started with one, nor by another key."""
    address = suite.endpoints.services["agent-loop"][0].grpc
    otto, options = people["otto"], run_pb2.RunOptions(approvals_required=2)
    zoe = Agent(address, user="", key=await made_key(suite, otto, "zoe", "operator", "approver"))
    async with zoe, Agent(address, user="", key=await made_key(suite, zoe, "zed", "approver")) as zed:
        every = (zoe, zed, otto)
        cases = ((people["cyd"], otto, every), (zed, people["cyd"], every), (people["cyd"], people["zoe"], (zed,)))
        for starter, allowed, others in cases:
            run = await starter.start(MAIL, options=options)
            call = await starter.until_pending(run.run_id, AWAITING)
            await allowed.decide(call, APPROVE)
            for refused in others:
                outcome = await refusals.outcome(refused.decide(call, APPROVE))
                assert outcome.reason == ("ALREADY_DECIDED" if refused is allowed else "PERMISSION_DENIED")
            await people["dan"].decide(call, APPROVE)
            assert (await starter.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_a_run_that_a_run_starts_keeps_user_roles_and_credential(people: dict[str, Agent]) -> None:
    of_ann = people["shop for ann"]
    run = await of_ann.start(f"call run_agent with {json.dumps({'task': MAIL})}")
    waiting = await of_ann.until(run.run_id, lambda seen: any(call.state == AWAITING for call in seen.pending_calls))
    (call,) = [call for call in waiting.pending_calls if call.state == AWAITING]
    below = await of_ann.get(call.run_id)
    assert below.run_id != run.run_id
    assert (below.user_id, list(below.user_roles)) == ("ann", list(run.user_roles))
    assert (below.credential_id, below.delegate_user_id) == (run.credential_id, "shop")
    assert (await refusals.outcome(of_ann.decide(call, APPROVE))).reason == "PERMISSION_DENIED"
    await of_ann.cancel(run.run_id)


async def test_a_delegate_makes_no_rule_that_allows(suite: Suite, people: dict[str, Agent]) -> None:
    metadata = with_roles(people["shop for ann"], "approver").metadata
    rule = rule_pb2.Rule(effect=rule_pb2.RULE_EFFECT_ALLOW, scope=rule_pb2.RULE_SCOPE_USER, tool_name="send_email")
    async with keyed_channel(suite.endpoints.services["tool-registry"][0].grpc) as channel:
        asked = RuleServiceStub(channel).CreateRule(rule_pb2.CreateRuleRequest(rule=rule), metadata=metadata)
        assert (await refusals.outcome(asked)).reason == "PERMISSION_DENIED"
