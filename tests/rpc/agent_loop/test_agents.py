"""Agents over gRPC, for their authors and users."""

from __future__ import annotations

from typing import Any

from pawl.agent.v1 import agent_pb2, jobs_pb2, whoami_pb2
from pawl.agent.v1 import agents_pb2 as pb
from pawl.event.v1 import agent_pb2 as event
from pawl.event.v1 import run_pb2
from tests.rpc.agent_loop.asking import failure, reason
from tests.rpc.agent_loop.conftest import ADMIN, ME, OPERATOR, OTHER_USERS
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.stubs import AgentRegistryServiceAsyncStub, AgentServiceAsyncStub, JobServiceAsyncStub


def clerk(name: str = "clerk", **fields: Any) -> pb.UpdateAgentRequest:
    options = run_pb2.RunOptions(instructions="Book it.", limits=run_pb2.RunLimits(rounds_max=3))
    return pb.UpdateAgentRequest(definition=event.AgentDefinition(name=name, **{"options": options} | fields))


def tools(*patterns: str, names: tuple[str, ...] = ()) -> event.ToolSelection:
    return event.ToolSelection(names=names, patterns=patterns)


def start(text: str = "Go", agent: str = "clerk", **fields: Any) -> agent_pb2.StartRunRequest:
    return agent_pb2.StartRunRequest(text=text, agent=agent, **fields)


async def test_saving_an_agent_returns_the_tools_that_match_its_patterns(agents: AgentRegistryServiceAsyncStub) -> None:
    saved = await agents.UpdateAgent(clerk(tools=tools("l*", "gone_*", names=("mail",))), metadata=ADMIN)
    assert (saved.created, saved.agent.version, list(saved.agent.tool_names)) == (True, 1, ["look", "mail"])
    assert list(saved.unmatched) == ["gone_*"]
    assert saved.agent.create_user_id == "root"
    again = await agents.UpdateAgent(clerk(tools=tools("l*", "gone_*", names=("mail",))), metadata=ADMIN)
    assert (again.created, again.agent) == (False, saved.agent)
    read = await agents.GetAgent(pb.GetAgentRequest(name="clerk"), metadata=ME)
    assert read.agent == saved.agent
    assert read.agent.definition.options.limits.rounds_max == 3
    assert not read.agent.definition.options.limits.HasField("calls_per_round_max"), "unset options stay unset"


async def test_agent_run_names_its_agent(
    agents: AgentRegistryServiceAsyncStub, stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await agents.UpdateAgent(clerk(tools=tools("l*")), metadata=ADMIN)
    run = (await stub.StartRun(start(), metadata=ME)).run
    assert (run.agent.name, run.agent.version, run.agent.gives_tools) == ("clerk", 1, True)
    assert (run.options.instructions, run.options.limits.rounds_max) == ("Book it.", 3)
    assert list(run.options.tool_names) == ["look"]
    assert ledger.log()[0].run_changed.run.agent == run.agent
    await agents.UpdateAgent(clerk(tools=tools("mail")), metadata=ADMIN)
    kept = (await stub.GetRun(agent_pb2.GetRunRequest(run_id=run.run_id), metadata=ME)).run
    assert (kept.agent.version, list(kept.options.tool_names)) == (1, ["look"])
    message = agent_pb2.SendMessageRequest(conversation_id=run.conversation_id, text="And?", agent="clerk")
    assert (await stub.SendMessage(message, metadata=ME)).run.agent.version == 2


async def test_agent_is_not_found_by_users_without_access(
    agents: AgentRegistryServiceAsyncStub, stub: AgentServiceAsyncStub
) -> None:
    await agents.UpdateAgent(clerk(allowed_roles=["operator"]), metadata=ADMIN)
    read, listed = pb.GetAgentRequest(name="clerk"), pb.ListAgentVersionsRequest(name="clerk")
    for caller in (ME, *OTHER_USERS):
        assert await reason(agents.GetAgent(read, metadata=caller)) == "AGENT_NOT_FOUND"
        assert await reason(agents.ListAgentVersions(listed, metadata=caller)) == "AGENT_NOT_FOUND"
        assert await reason(stub.StartRun(start(), metadata=caller)) == "AGENT_NOT_FOUND"
    page = await agents.ListAgents(pb.ListAgentsRequest(), metadata=ME)
    assert [agent.definition.name for agent in page.agents] == ["default"]
    assert (await stub.StartRun(start(), metadata=OPERATOR)).run.agent.name == "clerk"
    assert (await agents.GetAgent(read, metadata=ADMIN)).agent.version == 1, "its author sees it"
    assert await reason(stub.StartRun(start(), metadata=ADMIN)) == "AGENT_NOT_FOUND", "but may not use it"


def draft(name: str = "clerk", **fields: Any) -> pb.UpdateDraftRequest:
    return pb.UpdateDraftRequest(definition=clerk(name, **fields).definition)


async def test_a_draft_is_visible_only_to_its_owner(
    agents: AgentRegistryServiceAsyncStub, stub: AgentServiceAsyncStub
) -> None:
    await agents.UpdateAgent(clerk(tools=tools("l*")), metadata=ADMIN)
    saved = await agents.UpdateDraft(draft(tools=tools("mail", "gone_*")), metadata=ME)
    assert (saved.created, saved.agent.version, saved.agent.draft) == (True, 1, True)
    assert list(saved.unmatched) == ["gone_*"]
    read = pb.GetAgentRequest(name="draft/clerk")
    assert (await agents.GetAgent(read, metadata=ME)).agent == saved.agent
    run = (await stub.StartRun(start(agent="draft/clerk"), metadata=ME)).run
    assert (run.agent.name, run.agent.version, list(run.options.tool_names)) == ("draft/clerk", 1, ["mail"])
    assert list((await stub.StartRun(start(), metadata=ME)).run.options.tool_names) == ["look"], "it overrides no agent"
    listed = await agents.ListAgents(pb.ListAgentsRequest(drafts=True), metadata=ME)
    assert list(listed.agents) == [saved.agent]
    whoami = await stub.WhoAmI(whoami_pb2.WhoAmIRequest(), metadata=ME)
    assert list(whoami.deployment.agent_names) == ["clerk", "default", "draft/clerk"]
    for caller in (ADMIN, *OTHER_USERS):
        assert await reason(agents.GetAgent(read, metadata=caller)) == "AGENT_NOT_FOUND"
        assert await reason(stub.StartRun(start(agent="draft/clerk"), metadata=caller)) == "AGENT_NOT_FOUND"
        assert await reason(agents.DeleteDraft(pb.DeleteDraftRequest(name="clerk"), metadata=caller)) == (
            "AGENT_NOT_FOUND"
        )
        assert not (await agents.ListAgents(pb.ListAgentsRequest(drafts=True), metadata=caller)).agents
    await agents.DeleteDraft(pb.DeleteDraftRequest(name="clerk"), metadata=ME)
    assert await reason(stub.StartRun(start(agent="draft/clerk"), metadata=ME)) == "AGENT_NOT_FOUND"
    assert (await agents.GetAgent(pb.GetAgentRequest(name="clerk"), metadata=ME)).agent.version == 1


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
