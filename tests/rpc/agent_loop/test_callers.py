"""WhoAmI, what delegates may not do, what operators see and do in a store, and agents for their authors and users."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2, agents_pb2, jobs_pb2, operator_pb2, types_pb2, whoami_pb2
from pawl.agent.v1 import whoami_pb2 as pb
from pawl.agent_loop.api.whoami import caller_info
from pawl.chassis.identity.auth import Principal, service_principal, user_principal
from pawl.chassis.identity.roles import CALLERS, ROLES, Role
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import PermissionDenied
from pawl.event.v1 import agent_pb2 as event
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from tests.rpc.agent_loop.asking import ANSWER, APPROVE, DIGEST, EDIT, REJECT, decide, failure, reason
from tests.rpc.agent_loop.conftest import ADMIN, APPROVER, BOSS, DELEGATE, ME, OPERATOR, OTHER_USERS
from tests.rpc.agent_loop.ledger import YOU, PlayedLedger
from tests.rpc.refusals import raises
from tests.rpc.stubs import (
    AgentRegistryServiceAsyncStub,
    AgentServiceAsyncStub,
    JobServiceAsyncStub,
    OperatorServiceAsyncStub,
)


async def ask(stub: AgentServiceAsyncStub, metadata: Any) -> pb.WhoAmIResponse:
    return await stub.WhoAmI(pb.WhoAmIRequest(), metadata=metadata)


async def test_whoami_returns_the_caller(stub: AgentServiceAsyncStub) -> None:
    caller = (await ask(stub, ME)).caller
    assert (caller.store_id, caller.user_id, list(caller.roles)) == ("local", "me", ["member"])
    assert caller.credential_id.startswith("file-")
    assert not caller.HasField("expire_time")
    assert "/pawl.agent.v1.AgentService/StartRun" in caller.methods
    assert "/pawl.agent.v1.OperatorService/EndRun" not in caller.methods


@pytest.mark.parametrize(
    ("metadata", "right"),
    [
        (ME, pb.DECISION_RIGHT_QUESTIONS),
        (OPERATOR, pb.DECISION_RIGHT_QUESTIONS),
        (APPROVER, pb.DECISION_RIGHT_STORE),
        (ADMIN, pb.DECISION_RIGHT_STORE),
        (DELEGATE, pb.DECISION_RIGHT_UNSPECIFIED),
    ],
)
async def test_whoami_returns_what_the_caller_may_decide_on(
    stub: AgentServiceAsyncStub, metadata: Any, right: int
) -> None:
    """HITL-4: what a caller may decide depends on its roles."""
    assert (await ask(stub, metadata)).caller.decision_right == right


async def test_whoami_returns_the_features_of_the_deployment(stub: AgentServiceAsyncStub) -> None:
    offer = (await ask(stub, ME)).deployment
    assert (offer.model, offer.approvals_required, offer.tool_count) == ("the-model", 1, 7)
    assert list(offer.agent_names) == ["default"]
    assert offer.version
    assert (offer.limits.rounds_max, offer.ceilings.rounds_max) == (10, 1000)
    names = {field.name for field in offer.limits.DESCRIPTOR.fields}
    for limits in (offer.limits, offer.ceilings):
        assert {field.name for field, _ in limits.ListFields()} == names


def test_whoami_lists_exactly_the_methods_that_the_caller_may_call() -> None:
    """The methods are those in the table that every service uses. Every role may call WhoAmI."""
    for role in ROLES:
        names = caller_info(user_principal(StoreId("acme"), UserId("ann"), frozenset({role}))).methods
        assert set(names) == {name for name, callers in CALLERS.items() if role in callers}
        assert "/pawl.agent.v1.AgentService/WhoAmI" in names
    without = caller_info(user_principal(StoreId("acme"), UserId("ann"), frozenset())).methods
    assert set(without) == {name for name, callers in CALLERS.items() if Role.MEMBER in callers}
    assert "/pawl.agent.v1.AgentService/WhoAmI" not in caller_info(service_principal("agent-loop")).methods


# A delegate without the right to decide cannot approve or reject anything for a person.


@pytest.mark.parametrize(
    "for_whom", [(), (("pawl-user", "me"),), (("pawl-user", "me"), ("pawl-roles", "approver,operator"))]
)
async def test_delegate_cannot_decide(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, for_whom: tuple[tuple[str, str], ...]
) -> None:
    """HITL-4: a delegate cannot decide for a user or in its own name, by any method, but it may cancel runs.

    Frames of a session are handled like `Decide`.
    """
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    await ledger.add_call("call_2", call_pb2.CALL_STATE_ASKED)
    metadata = (*DELEGATE, *for_whom)
    call_1: dict[str, Any] = {"run_id": "run_1", "call_id": "call_1", "digest": DIGEST}
    both = [
        types_pb2.CallDecision(kind=call_pb2.DECISION_KIND_APPROVE, **call_1),
        types_pb2.CallDecision(run_id="run_1", call_id="call_2", kind=ANSWER, answer="yes"),
    ]
    refused: list[Any] = [
        stub.Decide(decide(kind=APPROVE), metadata=metadata),
        stub.Decide(decide(kind=REJECT), metadata=metadata),
        stub.Decide(decide(kind=EDIT, arguments_json=b'{"to": "ann"}'), metadata=metadata),
        stub.Decide(decide(kind=ANSWER, answer="it is done"), metadata=metadata),
        stub.DecideCalls(agent_pb2.DecideCallsRequest(decisions=both), metadata=metadata),
    ]
    if metadata[-1][0] != "pawl-user":
        refused.append(
            stub.ResolveCall(
                agent_pb2.ResolveCallRequest(
                    run_id="run_1", call_id="call_1", resolution=agent_pb2.RESOLUTION_RUN_AGAIN
                ),
                metadata=metadata,
            )
        )
    await raises(PermissionDenied, *refused, match="their own key or token")
    assert not ledger.commands
    if for_whom:
        cancel = agent_pb2.CancelRunRequest(run_id="run_1")
        assert (await stub.CancelRun(cancel, metadata=metadata)).run.state == run_pb2.RUN_STATE_CANCELLING


QUARANTINED, UNKNOWN_OUTCOME = run_pb2.ATTENTION_REASON_QUARANTINED, run_pb2.ATTENTION_REASON_UNKNOWN_OUTCOME


def redrive(run_id: str = "run_1", request_id: str = "", reason: str = "") -> operator_pb2.RedriveRunRequest:
    return operator_pb2.RedriveRunRequest(request_id=request_id, run_id=run_id, reason=reason)


async def test_operator_sees_runs_that_need_attention_without_their_content(
    operators: OperatorServiceAsyncStub, ledger: PlayedLedger
) -> None:
    mine, foreign = (Principal(store_id=StoreId(store), user_id=UserId("me")) for store in ("local", "elsewhere"))
    for run_id, caller in (("run_1", mine), ("run_2", YOU), ("run_3", mine), ("run_4", foreign)):
        await ledger.add_run(run_id, caller)
    ledger.put_run("run_2", output=run_pb2.Run(output_text="a secret").SerializeToString(), crashes=3)
    for run_id, why in (("run_2", QUARANTINED), ("run_3", UNKNOWN_OUTCOME), ("run_4", QUARANTINED)):
        await ledger.need_attention(why, run_id)
    page = await operators.ListAttention(operator_pb2.ListAttentionRequest(), metadata=BOSS)
    assert [(run.run_id, run.user_id, run.attention.reason, run.crash_count) for run in page.runs] == [
        ("run_2", "you", QUARANTINED, 3),
        ("run_3", "me", UNKNOWN_OUTCOME, 0),
    ]
    assert b"a secret" not in page.SerializeToString()
    only = operator_pb2.ListAttentionRequest(run_id="run_3")
    assert [run.run_id for run in (await operators.ListAttention(only, metadata=BOSS)).runs] == ["run_3"]
    assert not (await operators.ListAttention(operator_pb2.ListAttentionRequest(run_id="run_1"), metadata=BOSS)).runs
    for absent in ("run_absent", "run_4"):  # The last run is of another store
        request = operator_pb2.ListAttentionRequest(run_id=absent)
        assert await reason(operators.ListAttention(request, metadata=BOSS)) == "RUN_NOT_FOUND"


async def test_quarantined_run_is_redriven_once(operators: OperatorServiceAsyncStub, ledger: PlayedLedger) -> None:
    """I2: a repeated request has no further effect."""
    await ledger.add_run()
    await ledger.need_attention(QUARANTINED)
    request = redrive(request_id="r1", reason="mended")
    for _ in range(2):
        assert (await operators.RedriveRun(request, metadata=BOSS)).state == run_pb2.RUN_STATE_QUEUED
    assert ledger.commands == [ledger_pb2.Command(redrive=ledger_pb2.RedriveCommand(reason="mended"))]
    assert await reason(operators.RedriveRun(redrive(request_id="r2"), metadata=BOSS)) == "ATTENTION_NOT_NEEDED"


async def test_an_approval_without_arguments_cannot_be_edited(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    spec = call_pb2.Call(context=call_pb2.EXECUTION_CONTEXT_HUMAN)
    await ledger.add_run("run_2")
    await ledger.add_call("asks", call_pb2.CALL_STATE_AWAITING_APPROVAL, run_id="run_2", spec=spec)
    edit = types_pb2.CallDecision(call_id="asks", kind=EDIT, digest="digest of asks", arguments_json=b"{}")
    error = await failure(stub.Decide(agent_pb2.DecideRequest(run_id="run_2", decision=edit), metadata=ME))
    assert error.message == "the call only asks people, so it has no arguments to edit"


def clerk(name: str = "clerk", **fields: Any) -> agents_pb2.UpdateAgentRequest:
    options = run_pb2.RunOptions(instructions="Book it.", limits=run_pb2.RunLimits(rounds_max=3))
    return agents_pb2.UpdateAgentRequest(definition=event.AgentDefinition(name=name, **{"options": options} | fields))


def tools(*patterns: str, names: tuple[str, ...] = ()) -> event.ToolSelection:
    return event.ToolSelection(names=names, patterns=patterns)


def start(text: str = "Go", agent: str = "clerk", **fields: Any) -> agent_pb2.StartRunRequest:
    return agent_pb2.StartRunRequest(text=text, agent=agent, **fields)


async def test_saving_an_agent_returns_the_tools_that_match_its_patterns(agents: AgentRegistryServiceAsyncStub) -> None:
    saved = await agents.UpdateAgent(clerk(tools=tools("l*", "gone_*", names=("mail",))), metadata=ADMIN)
    assert (saved.created, saved.agent.version, list(saved.agent.tool_names)) == (True, 1, ["look", "mail"])
    assert (list(saved.unmatched), saved.agent.create_user_id) == (["gone_*"], "root")
    again = await agents.UpdateAgent(clerk(tools=tools("l*", "gone_*", names=("mail",))), metadata=ADMIN)
    assert (again.created, again.agent) == (False, saved.agent)
    read = await agents.GetAgent(agents_pb2.GetAgentRequest(name="clerk"), metadata=ME)
    assert (read.agent, read.agent.definition.options.limits.rounds_max) == (saved.agent, 3)
    assert not read.agent.definition.options.limits.HasField("calls_per_round_max"), "unset options stay unset"


async def test_agent_run_names_its_agent(
    agents: AgentRegistryServiceAsyncStub, stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await agents.UpdateAgent(clerk(tools=tools("l*")), metadata=ADMIN)
    run = (await stub.StartRun(start(), metadata=ME)).run
    assert (run.agent.name, run.agent.version, run.agent.gives_tools) == ("clerk", 1, True)
    assert (run.options.instructions, run.options.limits.rounds_max) == ("Book it.", 3)
    assert (list(run.options.tool_names), ledger.log()[0].run_changed.run.agent) == (["look"], run.agent)
    await agents.UpdateAgent(clerk(tools=tools("mail")), metadata=ADMIN)
    kept = (await stub.GetRun(agent_pb2.GetRunRequest(run_id=run.run_id), metadata=ME)).run
    assert (kept.agent.version, list(kept.options.tool_names)) == (1, ["look"])
    message = agent_pb2.SendMessageRequest(conversation_id=run.conversation_id, text="And?", agent="clerk")
    assert (await stub.SendMessage(message, metadata=ME)).run.agent.version == 2


async def test_agent_is_not_found_by_users_without_access(
    agents: AgentRegistryServiceAsyncStub, stub: AgentServiceAsyncStub
) -> None:
    await agents.UpdateAgent(clerk(allowed_roles=["operator"]), metadata=ADMIN)
    read, listed = agents_pb2.GetAgentRequest(name="clerk"), agents_pb2.ListAgentVersionsRequest(name="clerk")
    for caller in (ME, *OTHER_USERS):
        assert await reason(agents.GetAgent(read, metadata=caller)) == "AGENT_NOT_FOUND"
        assert await reason(agents.ListAgentVersions(listed, metadata=caller)) == "AGENT_NOT_FOUND"
        assert await reason(stub.StartRun(start(), metadata=caller)) == "AGENT_NOT_FOUND"
    page = await agents.ListAgents(agents_pb2.ListAgentsRequest(), metadata=ME)
    assert [agent.definition.name for agent in page.agents] == ["default"]
    assert (await stub.StartRun(start(), metadata=OPERATOR)).run.agent.name == "clerk"
    assert (await agents.GetAgent(read, metadata=ADMIN)).agent.version == 1, "its author sees it"
    assert await reason(stub.StartRun(start(), metadata=ADMIN)) == "AGENT_NOT_FOUND", "but may not use it"


def draft(name: str = "clerk", **fields: Any) -> agents_pb2.UpdateDraftRequest:
    return agents_pb2.UpdateDraftRequest(definition=clerk(name, **fields).definition)


async def test_a_draft_is_visible_only_to_its_owner(
    agents: AgentRegistryServiceAsyncStub, stub: AgentServiceAsyncStub
) -> None:
    await agents.UpdateAgent(clerk(tools=tools("l*")), metadata=ADMIN)
    saved = await agents.UpdateDraft(draft(tools=tools("mail", "gone_*")), metadata=ME)
    assert (saved.created, saved.agent.version, saved.agent.draft) == (True, 1, True)
    assert list(saved.unmatched) == ["gone_*"]
    read = agents_pb2.GetAgentRequest(name="draft/clerk")
    assert (await agents.GetAgent(read, metadata=ME)).agent == saved.agent
    run = (await stub.StartRun(start(agent="draft/clerk"), metadata=ME)).run
    assert (run.agent.name, run.agent.version, list(run.options.tool_names)) == ("draft/clerk", 1, ["mail"])
    assert list((await stub.StartRun(start(), metadata=ME)).run.options.tool_names) == ["look"], "it overrides no agent"
    assert list((await agents.ListAgents(agents_pb2.ListAgentsRequest(drafts=True), metadata=ME)).agents) == [
        saved.agent
    ]
    whoami = await stub.WhoAmI(whoami_pb2.WhoAmIRequest(), metadata=ME)
    assert list(whoami.deployment.agent_names) == ["clerk", "default", "draft/clerk"]
    for caller in (ADMIN, *OTHER_USERS):
        assert await reason(agents.GetAgent(read, metadata=caller)) == "AGENT_NOT_FOUND"
        assert await reason(stub.StartRun(start(agent="draft/clerk"), metadata=caller)) == "AGENT_NOT_FOUND"
        assert await reason(agents.DeleteDraft(agents_pb2.DeleteDraftRequest(name="clerk"), metadata=caller)) == (
            "AGENT_NOT_FOUND"
        )
        assert not (await agents.ListAgents(agents_pb2.ListAgentsRequest(drafts=True), metadata=caller)).agents
    await agents.DeleteDraft(agents_pb2.DeleteDraftRequest(name="clerk"), metadata=ME)
    assert await reason(stub.StartRun(start(agent="draft/clerk"), metadata=ME)) == "AGENT_NOT_FOUND"
    assert (await agents.GetAgent(agents_pb2.GetAgentRequest(name="clerk"), metadata=ME)).agent.version == 1


async def test_an_agents_job_cannot_call_tools_that_the_agent_cannot_call(
    agents: AgentRegistryServiceAsyncStub, jobs: JobServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """Only jobs of the agent `default` may call every tool that their user may call."""
    for definition in (
        clerk(tools=tools(names=("look",))),
        clerk("mute", options=run_pb2.RunOptions(without_tools=True)),
        clerk("default", tools=tools(names=("look",))),
    ):
        await agents.UpdateAgent(definition, metadata=ADMIN)
    for agent, tool in (("clerk", "mail"), ("mute", "look")):
        error = await failure(jobs.StartJob(jobs_pb2.StartJobRequest(agent=agent, tool_name=tool), metadata=ME))
        assert (error.reason, error.message) == ("INVALID_FIELD", f"the agent {agent} does not have the tool {tool}")
    assert not ledger.runs
    for agent, tool in (("clerk", "look"), ("default", "mail"), ("", "mail")):
        await jobs.StartJob(jobs_pb2.StartJobRequest(agent=agent, tool_name=tool), metadata=ME)


async def test_draft_delegates_only_to_agents_that_its_user_may_use(agents: AgentRegistryServiceAsyncStub) -> None:
    await agents.UpdateAgent(clerk("hidden", allowed_roles=["operator"]), metadata=ADMIN)
    for name, why in (("nobody", "AGENT_NOT_FOUND"), ("hidden", "AGENT_NOT_FOUND"), ("clerk", "AGENT_CYCLE")):
        assert await reason(agents.UpdateDraft(draft(delegates_to=[name]), metadata=ME)) == why
