"""Workflows over gRPC: saving, starting, and controlling their runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2, agents_pb2, jobs_pb2
from pawl.agent.v1 import workflow_pb2 as pb
from pawl.agent_loop.agents.rules import OfferedTool
from pawl.agent_loop.workflows.values import wait_token
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RunId
from pawl.errors import InvalidWorkflow
from pawl.event.v1 import agent_pb2 as agent_values
from pawl.event.v1 import run_pb2, workflow_pb2
from pawl.job.v1 import ledger_pb2
from tests.fakes.registry import FakeChecker
from tests.rpc.agent_loop.asking import CONTROL, MISSING, NO_ID, Api, check_refusals, failure, reason, start
from tests.rpc.agent_loop.conftest import ADMIN, ME, OTHER_USERS
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.refusals import raises
from tests.rpc.stubs import (
    AgentRegistryServiceAsyncStub,
    AgentServiceAsyncStub,
    JobServiceAsyncStub,
    WorkflowServiceAsyncStub,
)

LOOK = {"kind": "tool", "tool": "look", "arguments": {"id": "${input.ticket}"}}
INPUT = {"properties": {"ticket": {"type": "string"}}, "required": ["ticket"]}


def definition(name: str = "triage", **fields: Any) -> dict[str, Any]:
    return {"name": name, "input": INPUT, "nodes": {"fetch": LOOK}} | fields


WAITS = {"fetch": LOOK, "late": {"kind": "wait", "event": "paid", "after": ["fetch"]}}


def save(*, validate_only: bool = False, **fields: Any) -> pb.SaveWorkflowRequest:
    return pb.SaveWorkflowRequest(
        definition_json=json.dumps(definition(**fields)).encode(), validate_only=validate_only
    )


def begin(name: str = "triage", content: bytes = b'{"ticket": "7"}', **fields: Any) -> pb.StartWorkflowRequest:
    return pb.StartWorkflowRequest(name=name, input_json=content, **fields)


@pytest.fixture
async def saved(workflows: WorkflowServiceAsyncStub) -> None:
    await workflows.SaveWorkflow(save(), metadata=ADMIN)


async def test_saving_a_workflow_creates_a_version_only_if_it_has_changed(workflows: WorkflowServiceAsyncStub) -> None:
    checked = await workflows.SaveWorkflow(save(validate_only=True), metadata=ADMIN)
    assert (checked.created, checked.workflow.version, list(checked.faults)) == (True, 1, [])
    assert (
        await reason(workflows.GetWorkflow(pb.GetWorkflowRequest(name="triage"), metadata=ME)) == "WORKFLOW_NOT_FOUND"
    )
    first = await workflows.SaveWorkflow(save(description="Sort it."), metadata=ADMIN)
    found = await workflows.GetWorkflow(pb.GetWorkflowRequest(name="triage"), metadata=ME)
    assert (first.mermaid, checked.mermaid) == ("", found.mermaid), "a check draws the graph"
    assert (first.created, first.workflow.version, first.workflow.create_user_id) == (True, 1, "root")
    assert (first.workflow.description, first.workflow.node_count) == ("Sort it.", 1)
    again = await workflows.SaveWorkflow(save(description="Sort it.", concurrency=10), metadata=ADMIN)
    assert (again.created, again.workflow) == (False, first.workflow), "a default that is written out changes nothing"
    assert (await workflows.SaveWorkflow(save(description="Sort it well."), metadata=ADMIN)).workflow.version == 2
    listed = await workflows.ListWorkflowVersions(pb.ListWorkflowVersionsRequest(name="triage"), metadata=ME)
    assert [(each.version, each.definition_json) for each in listed.workflows] == [(2, b""), (1, b"")]


async def test_a_deleted_workflow_cannot_start_runs_but_keeps_its_versions(
    workflows: WorkflowServiceAsyncStub, saved: None
) -> None:
    await workflows.StartWorkflow(begin(request_id="r1"), metadata=ME)
    await workflows.DeleteWorkflow(pb.DeleteWorkflowRequest(name="triage"), metadata=ADMIN)
    assert await reason(workflows.StartWorkflow(begin(), metadata=ME)) == "WORKFLOW_NOT_FOUND"
    assert await reason(workflows.StartWorkflow(begin(version=1), metadata=ME)) == "WORKFLOW_NOT_FOUND"
    again = (await workflows.StartWorkflow(begin(request_id="r1"), metadata=ME)).run
    assert again.workflow.version == 1, "a repeated request returns the same response"
    assert (await workflows.GetWorkflow(pb.GetWorkflowRequest(name="triage", version=1), metadata=ME)).workflow.version
    assert not (await workflows.ListWorkflows(pb.ListWorkflowsRequest(), metadata=ME)).workflows
    deleted = pb.DeleteWorkflowRequest(name="triage")
    assert await reason(workflows.DeleteWorkflow(deleted, metadata=ADMIN)) == "WORKFLOW_NOT_FOUND"


async def test_a_workflow_is_a_tool_as_long_as_its_newest_version_has_as_tool(
    workflows: WorkflowServiceAsyncStub, checker: FakeChecker
) -> None:
    tool = save(as_tool=True, description="Sort it.")
    await workflows.SaveWorkflow(save(as_tool=True, description="Sort it.", validate_only=True), metadata=ADMIN)
    assert checker.workflows == {}
    await workflows.SaveWorkflow(tool, metadata=ADMIN)
    assert checker.workflows == {"triage": "Sort it."}
    await workflows.SaveWorkflow(save(), metadata=ADMIN)
    assert checker.workflows == {}
    await workflows.SaveWorkflow(tool, metadata=ADMIN)
    await workflows.DeleteWorkflow(pb.DeleteWorkflowRequest(name="triage"), metadata=ADMIN)
    assert checker.workflows == {}


async def test_workflow_with_the_name_of_another_tool_cannot_be_a_tool(workflows: WorkflowServiceAsyncStub) -> None:
    tool: dict[str, Any] = {"name": "look", "as_tool": True, "description": "Look."}
    checked = await workflows.SaveWorkflow(save(**tool, validate_only=True), metadata=ADMIN)
    assert [(fault.path, fault.message) for fault in checked.faults] == [("name", "'look' is a tool")]
    assert await reason(workflows.SaveWorkflow(save(**tool), metadata=ADMIN)) == "INVALID_WORKFLOW"
    assert (await workflows.SaveWorkflow(save(name="look"), metadata=ADMIN)).created


BAD: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "no JSON": (b"{", [("", "")]),
    "a kind that does not exist": ({"nodes": {"a": {"kind": "tol"}}}, [("nodes.a.kind", "tool")]),
    "a field that does not exist": ({"nodes": {"a": {**LOOK, "argumets": {}}}}, [("nodes.a.argumets", "arguments")]),
    "a tool that does not exist": ({"nodes": {"a": {"kind": "tool", "tool": "loook"}}}, [("nodes.a.tool", "look")]),
    "a tool that the caller may not call": ({"nodes": {"a": {"kind": "tool", "tool": "pay"}}}, [("nodes.a.tool", "")]),
    "an agent that does not exist": (
        {"nodes": {"a": {"kind": "agent", "agent": "nobody", "task": "Go"}}},
        [("nodes.a.agent", "")],
    ),
    "an agent's tool that does not exist": (
        {"nodes": {"a": {"kind": "agent", "task": "Go", "tools": ["look", "gone"]}}},
        [("nodes.a.tools[1]", "")],
    ),
    "an answer's schema that cannot be used": (
        {"nodes": {"a": {"kind": "agent", "task": "Go", "output_schema": {"type": "bad"}}}},
        [("nodes.a.output_schema", "")],
    ),
    "an input schema that cannot be used": ({"input": {"type": "bad"}}, [("input", "")]),
    "a workflow that does not exist": (
        {"nodes": {"a": {"kind": "workflow", "workflow": "other"}}},
        [("nodes.a.workflow", "")],
    ),
    "a workflow that starts itself": (
        {"nodes": {"a": {"kind": "workflow", "workflow": "triage"}}},
        [("nodes.a.workflow", "")],
    ),
    "a name that does not exist in an expression": (
        {"nodes": {"fetch": LOOK, "b": {"kind": "output", "value": "${nodes.fech.output}"}}},
        [("nodes.b.value", "fetch")],
    ),
    "an input that another workflow does not take": (
        {"nodes": {"a": {"kind": "workflow", "workflow": "known"}}},
        [("nodes.a.input.ticket", "")],
    ),
    "a cycle": (
        {"nodes": {"a": {**LOOK, "after": ["b"]}, "b": {**LOOK, "after": ["a"]}}},
        [("nodes.a", "")],
    ),
    "a fault in a branch and in a map": (
        {
            "nodes": {
                "a": {"kind": "parallel", "branches": {"x": {"kind": "tool", "tool": "gone"}}},
                "b": {"kind": "map", "items": "${[1]}", "do": {"kind": "tool", "tool": "gone"}},
            }
        },
        [("nodes.a.branches.x.tool", ""), ("nodes.b.do.tool", "")],
    ),
    "faults of form, and names that do not exist": (
        {
            "nodes": {
                "a": {"kind": "tol"},
                "b": {"kind": "tool", "tool": "loook", "arguments": 7},
                "c": {"kind": "tool"},
                "d": {"kind": "agent", "agent": "nobody", "task": "Go", "retry": {"attempts": 0}},
            }
        },
        [
            ("nodes.a.kind", "tool"),
            ("nodes.b.arguments", ""),
            ("nodes.b.tool", "look"),
            ("nodes.c.tool", ""),
            ("nodes.d.agent", ""),
            ("nodes.d.retry.attempts", ""),
        ],
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_faults_of_a_definition_are_reported_with_their_paths(
    workflows: WorkflowServiceAsyncStub, name: str
) -> None:
    fields, expected = BAD[name]
    await workflows.SaveWorkflow(save(name="known"), metadata=ADMIN)
    document = fields if isinstance(fields, bytes) else json.dumps(definition(**fields)).encode()
    checked = await workflows.SaveWorkflow(
        pb.SaveWorkflowRequest(definition_json=document, validate_only=True), metadata=ADMIN
    )
    assert [fault.path for fault in checked.faults] == [path for path, _ in expected], checked
    assert not checked.HasField("workflow")
    for fault, (_, hint) in zip(checked.faults, expected, strict=True):
        assert hint in fault.hint
        assert fault.message
    error = await failure(workflows.SaveWorkflow(pb.SaveWorkflowRequest(definition_json=document), metadata=ADMIN))
    assert (error.reason, error.metadata["fault_count"]) == ("INVALID_WORKFLOW", str(len(expected)))
    assert error.metadata["paths"] == ",".join(path for path, _ in expected)


async def test_workflows_cannot_start_each_other_in_a_cycle(workflows: WorkflowServiceAsyncStub, saved: None) -> None:
    await workflows.SaveWorkflow(
        save(name="outer", nodes={"a": {"kind": "workflow", "workflow": "triage", "input": {"ticket": "7"}}}),
        metadata=ADMIN,
    )
    circle = save(nodes={"a": {"kind": "workflow", "workflow": "outer", "input": {"ticket": "7"}}})
    await raises(InvalidWorkflow, workflows.SaveWorkflow(circle, metadata=ADMIN), match="triage -> outer -> triage")


async def test_workflows_cannot_start_themselves_through_older_versions(
    workflows: WorkflowServiceAsyncStub, saved: None
) -> None:
    await workflows.SaveWorkflow(save(name="outer", nodes={"a": LOOK}), metadata=ADMIN)
    starts_outer = save(nodes={"a": {"kind": "workflow", "workflow": "outer", "input": {"ticket": "7"}}})
    old = (await workflows.SaveWorkflow(starts_outer, metadata=ADMIN)).workflow.version
    await workflows.SaveWorkflow(save(nodes={"a": LOOK}), metadata=ADMIN)

    fixed = {"kind": "workflow", "workflow": "triage", "version": old, "input": {"ticket": "7"}}
    circle = workflows.SaveWorkflow(save(name="outer", nodes={"a": fixed}), metadata=ADMIN)
    await raises(InvalidWorkflow, circle, match="outer -> outer")
    await workflows.SaveWorkflow(save(name="outer", nodes={"a": {**fixed, "version": old + 1}}), metadata=ADMIN)


async def test_workflows_cannot_start_themselves_as_tools(
    workflows: WorkflowServiceAsyncStub, checker: FakeChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = checker.offered

    async def with_tool(caller: Principal) -> Any:
        return (*await offered(caller), OfferedTool(name="again", source="workflow"))

    monkeypatch.setattr(checker, "offered", with_tool)
    await workflows.SaveWorkflow(save(name="again", description="Do it.", as_tool=True), metadata=ADMIN)
    itself = save(name="again", description="Do it.", as_tool=True, nodes={"a": {"kind": "tool", "tool": "again"}})
    await raises(InvalidWorkflow, workflows.SaveWorkflow(itself, metadata=ADMIN), match="again -> again")


async def test_run_keeps_its_version_and_input(
    workflows: WorkflowServiceAsyncStub, stub: AgentServiceAsyncStub, saved: None
) -> None:
    run = (await workflows.StartWorkflow(begin(labels={"team": "a"}, total_tokens_max=500), metadata=ME)).run
    assert (run.workflow.name, run.workflow.version, run.workflow.input_json) == ("triage", 1, b'{"ticket":"7"}')
    assert (run.user_id, run.options.limits.total_tokens_max, run.labels["team"]) == ("me", 500, "a")
    await workflows.SaveWorkflow(save(description="New."), metadata=ADMIN)
    assert (await stub.GetRun(agent_pb2.GetRunRequest(run_id=run.run_id), metadata=ME)).run.workflow.version == 1
    assert (await workflows.StartWorkflow(begin(), metadata=ME)).run.workflow.version == 2
    assert (await workflows.StartWorkflow(begin(version=1), metadata=ME)).run.workflow.version == 1


async def test_runs_of_a_workflow_are_listed_without_large_inputs(
    workflows: WorkflowServiceAsyncStub, stub: AgentServiceAsyncStub, saved: None
) -> None:
    await stub.StartRun(start(), metadata=ME)
    run = (await workflows.StartWorkflow(begin(content=json.dumps({"ticket": "x" * 5000}).encode()), metadata=ME)).run
    listed = (await stub.ListRuns(agent_pb2.ListRunsRequest(workflow="triage"), metadata=ME)).runs
    assert [each.run_id for each in listed] == [run.run_id]
    assert (listed[0].workflow.name, listed[0].workflow.version, listed[0].workflow.input_json) == ("triage", 1, b"")
    whole = (await stub.GetRun(agent_pb2.GetRunRequest(run_id=run.run_id), metadata=ME)).run
    assert len(whole.workflow.input_json) > 5000
    assert not (await stub.ListRuns(agent_pb2.ListRunsRequest(workflow="other"), metadata=ME)).runs


async def test_repeated_start_returns_the_same_run_even_after_a_new_version(
    workflows: WorkflowServiceAsyncStub, saved: None
) -> None:
    run = (await workflows.StartWorkflow(begin(request_id="r"), metadata=ME)).run
    await workflows.SaveWorkflow(save(description="New."), metadata=ADMIN)
    again = (await workflows.StartWorkflow(begin(request_id="r", content=b'{ "ticket":"7"}'), metadata=ME)).run
    assert again.run_id == run.run_id
    for other in (begin(request_id="r", content=b'{"ticket":"8"}'), begin(request_id="r", version=1)):
        assert await reason(workflows.StartWorkflow(other, metadata=ME)) == "REQUEST_ID_REUSED"


async def test_requests_about_runs_refuse_bad_input(
    workflows: WorkflowServiceAsyncStub, api: Api, ledger: PlayedLedger
) -> None:
    await ledger.add_run("chat")
    await workflows.SaveWorkflow(save(nodes=WAITS), metadata=ADMIN)
    run_id = (await workflows.StartWorkflow(begin(), metadata=ME)).run.run_id
    event: Any = {"run_id": run_id, "name": "paid"}
    await check_refusals(
        api,
        [
            (begin(name=MISSING), "WORKFLOW_NOT_FOUND"),
            (begin(name=NO_ID), "INVALID_ID"),
            (begin(version=7), "WORKFLOW_NOT_FOUND"),
            (begin(version=2**32 - 1), "WORKFLOW_NOT_FOUND"),
            (begin(content=b"{"), "INVALID_JSON"),
            (begin(content=b'{"ticket":"' + b"x" * 300_000 + b'"}'), "TOO_LARGE"),
            (begin(content=b'{"ticket": "misfit"}'), "INVALID_ARGUMENTS"),
            (begin(reports_to_conversation_id=MISSING), "CONVERSATION_NOT_FOUND"),
            (begin(reports_to_conversation_id=NO_ID), "INVALID_ID"),
            (begin(request_id=NO_ID), "INVALID_ID"),
            (begin(labels={"pawl.workflow": "x"}), "INVALID_FIELD", "labels"),
            (begin(total_tokens_max=2**63), "INVALID_FIELD"),
            (pb.GetWorkflowRequest(name=NO_ID), "INVALID_ID"),
            (agent_pb2.ListRunsRequest(workflow="triage\0"), "INVALID_ID"),
            (pb.GetWorkflowRequest(name="triage", version=2**32 - 1), "WORKFLOW_NOT_FOUND"),
            (pb.ListWorkflowVersionsRequest(name=MISSING), "WORKFLOW_NOT_FOUND"),
            (pb.ListWorkflowVersionsRequest(name="triage", page_token="x"), "INVALID_PAGE_TOKEN"),
            (pb.ListWorkflowsRequest(page_token="x"), "INVALID_PAGE_TOKEN"),
            (pb.ListWorkflowsRequest(page_size=201), "INVALID_FIELD"),
            (pb.GetExecutionRequest(run_id=MISSING), "RUN_NOT_FOUND"),
            (pb.GetExecutionRequest(run_id="chat"), "RUN_NOT_FOUND"),
            (pb.GetExecutionRequest(run_id=run_id, node="fech"), "NODE_NOT_FOUND"),
            (pb.RerunFromRequest(run_id=run_id, node="fetch"), "RUN_NOT_ENDED"),
            (pb.RerunFromRequest(run_id="chat", node="fetch"), "RUN_NOT_FOUND"),
            (pb.PauseExecutionRequest(run_id="chat"), "RUN_NOT_FOUND"),
            (pb.ResumeExecutionRequest(run_id=NO_ID), "INVALID_ID"),
            (pb.SendEventRequest(**event | {"run_id": "chat"}), "RUN_NOT_FOUND"),
            (pb.SendEventRequest(**event | {"name": CONTROL}), "INVALID_FIELD", "name"),
            (pb.SendEventRequest(**event | {"name": "payed"}), "INVALID_FIELD", "name"),
            (pb.SendEventRequest(**event, token="a.b.c"), "INVALID_FIELD", "token"),
            (pb.SendEventRequest(token="a.b.c"), "COMPLETION_NOT_FOUND"),
            (pb.SendEventRequest(token=f"{run_id}.late.{'0' * 32}"), "COMPLETION_NOT_FOUND"),
            (pb.SendEventRequest(**event, payload_json=b"{"), "INVALID_JSON"),
            (pb.SendEventRequest(**event, payload_json=b'"' + b"x" * 70_000 + b'"'), "TOO_LARGE"),
            (pb.SendEventRequest(**event, event_id=NO_ID), "INVALID_ID"),
        ],
    )


async def test_workflow_runs_of_other_users_are_not_found(
    workflows: WorkflowServiceAsyncStub, api: Api, saved: None
) -> None:
    run_id = (await workflows.StartWorkflow(begin(), metadata=ME)).run.run_id
    for request in (
        pb.GetExecutionRequest(run_id=run_id),
        pb.RerunFromRequest(run_id=run_id, node="fetch"),
        pb.PauseExecutionRequest(run_id=run_id),
        pb.ResumeExecutionRequest(run_id=run_id),
        pb.SendEventRequest(run_id=run_id, name="paid"),
    ):
        for who in OTHER_USERS:
            assert await reason(api(request, who)) == "RUN_NOT_FOUND"


async def test_agent_that_a_workflow_names_must_be_usable(
    workflows: WorkflowServiceAsyncStub, agents: AgentRegistryServiceAsyncStub
) -> None:
    node = {"kind": "agent", "agent": "clerk", "task": "Go"}
    hidden = agent_values.AgentDefinition(name="clerk", allowed_roles=["operator"])
    await agents.UpdateAgent(agents_pb2.UpdateAgentRequest(definition=hidden), metadata=ADMIN)
    assert await reason(workflows.SaveWorkflow(save(nodes={"a": node}), metadata=ADMIN)) == "INVALID_WORKFLOW"
    shown = agent_values.AgentDefinition(name="clerk")
    await agents.UpdateAgent(agents_pb2.UpdateAgentRequest(definition=shown), metadata=ADMIN)
    assert (await workflows.SaveWorkflow(save(nodes={"a": node}), metadata=ADMIN)).created


async def test_execution_of_a_run_that_has_not_started_shows_its_nodes(
    workflows: WorkflowServiceAsyncStub, saved: None
) -> None:
    run_id = (await workflows.StartWorkflow(begin(), metadata=ME)).run.run_id
    found = await workflows.GetExecution(pb.GetExecutionRequest(run_id=run_id), metadata=ME)
    assert [(node.path, node.kind, node.state) for node in found.nodes] == [
        ("fetch", "tool", workflow_pb2.NODE_STATE_PENDING)
    ]
    assert (found.run.run_id, list(found.current_nodes), found.failed_node, found.paused) == (run_id, [], "", False)
    assert 'n0["fetch' in (await workflows.GetWorkflow(pb.GetWorkflowRequest(name="triage"), metadata=ME)).mermaid


async def test_execution_has_the_edges_of_the_graph(workflows: WorkflowServiceAsyncStub) -> None:
    await workflows.SaveWorkflow(save(nodes=WAITS), metadata=ADMIN)
    run_id = (await workflows.StartWorkflow(begin(), metadata=ME)).run.run_id
    found = await workflows.GetExecution(pb.GetExecutionRequest(run_id=run_id), metadata=ME)
    assert list(found.edges) == [workflow_pb2.WorkflowEdge(source="fetch", target="late", kind="after")]


async def test_token_sends_one_event_for_its_node_and_does_not_reveal_the_run(
    workflows: WorkflowServiceAsyncStub, stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await workflows.SaveWorkflow(save(nodes=WAITS), metadata=ADMIN)
    run = (await workflows.StartWorkflow(begin(), metadata=ME)).run
    assert not run.workflow.token_key
    for found in (run, (await stub.GetRun(agent_pb2.GetRunRequest(run_id=run.run_id), metadata=ME)).run):
        assert not found.workflow.token_key
    token = wait_token(ledger.token_key(run.run_id), RunId(run.run_id), "late")
    sent = pb.SendEventRequest(token=token, payload_json=b"7")
    for who in (OTHER_USERS[0], ME):
        assert await workflows.SendEvent(sent, metadata=who) == pb.SendEventResponse()
    assert [command.event.name for command in ledger.commands] == ["#late"]
    error = await failure(workflows.SendEvent(pb.SendEventRequest(token=token, payload_json=b"8"), metadata=ME))
    assert (error.reason, error.message) == ("REQUEST_ID_REUSED", "the token was already used with a different result")
    await stub.CancelRun(agent_pb2.CancelRunRequest(run_id=run.run_id), metadata=ME)
    await workflows.SendEvent(sent, metadata=ME)
    unused = (await workflows.StartWorkflow(begin(), metadata=ME)).run.run_id
    await stub.CancelRun(agent_pb2.CancelRunRequest(run_id=unused), metadata=ME)
    late = pb.SendEventRequest(token=wait_token(ledger.token_key(unused), RunId(unused), "late"))
    assert await reason(workflows.SendEvent(late, metadata=ME)) == "RUN_ENDED"


async def test_schema_of_definitions_describes_all_kinds_of_nodes(workflows: WorkflowServiceAsyncStub) -> None:
    schema = json.loads((await workflows.GetWorkflowSchema(pb.GetWorkflowSchemaRequest(), metadata=ME)).schema_json)
    assert "nodes" in schema["properties"]
    assert '"parallel"' in json.dumps(schema)


async def test_workflow_that_reports_to_a_conversation_is_one_of_its_jobs(
    workflows: WorkflowServiceAsyncStub, jobs: JobServiceAsyncStub, stub: AgentServiceAsyncStub, saved: None
) -> None:
    conversation_id = (await stub.StartRun(start(), metadata=ME)).run.conversation_id
    run = (await workflows.StartWorkflow(begin(reports_to_conversation_id=conversation_id), metadata=ME)).run
    assert run.conversation_id != conversation_id
    assert run.reports_to_conversation_id == conversation_id
    listed = (await jobs.ListJobs(jobs_pb2.ListJobsRequest(conversation_id=conversation_id), metadata=ME)).jobs
    assert [(job.job_id, job.definition.tool_name, job.definition.iterations_max) for job in listed] == [
        (run.run_id, "triage", 1)
    ]
    other = (await workflows.StartWorkflow(begin(), metadata=ME)).run
    assert not other.HasField("job")
    assert await reason(jobs.GetJob(jobs_pb2.GetJobRequest(job_id=other.run_id), metadata=ME)) == "RUN_NOT_FOUND"
    asked = begin(reports_to_conversation_id=conversation_id)
    for _ in range(9):
        await workflows.StartWorkflow(asked, metadata=ME)
    assert await reason(workflows.StartWorkflow(asked, metadata=ME)) == "TOO_MANY_JOBS"
    stopped = await jobs.StopJob(jobs_pb2.StopJobRequest(job_id=run.run_id), metadata=ME)
    assert stopped.job.state == run_pb2.RUN_STATE_CANCELLED


async def test_pauses_and_events_are_accepted_once(
    workflows: WorkflowServiceAsyncStub, stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await workflows.SaveWorkflow(save(nodes=WAITS), metadata=ADMIN)
    run_id = (await workflows.StartWorkflow(begin(), metadata=ME)).run.run_id
    pause = pb.PauseExecutionRequest(run_id=run_id, request_id="p")
    for _ in range(2):
        await workflows.PauseExecution(pause, metadata=ME)
    await workflows.ResumeExecution(pb.ResumeExecutionRequest(run_id=run_id), metadata=ME)
    paid = pb.SendEventRequest(run_id=run_id, name="paid", payload_json=b'{ "n": 1}', event_id="e")
    for _ in range(2):
        await workflows.SendEvent(paid, metadata=ME)
    assert [command.WhichOneof("kind") for command in ledger.commands] == ["pause", "pause", "event"]
    assert ledger.commands[-1].event == ledger_pb2.EventCommand(name="paid", payload_json=b'{"n":1}')
    error = await failure(workflows.SendEvent(pb.SendEventRequest(run_id=run_id, name="payed"), metadata=ME))
    assert "it is waiting for paid" in error.message
    other = pb.SendEventRequest(run_id=run_id, name="paid", payload_json=b"2", event_id="e")
    assert await reason(workflows.SendEvent(other, metadata=ME)) == "REQUEST_ID_REUSED"
    await stub.CancelRun(agent_pb2.CancelRunRequest(run_id=run_id), metadata=ME)
    ended: Any = {"run_id": run_id}
    assert await reason(workflows.SendEvent(pb.SendEventRequest(**ended, name="paid"), metadata=ME)) == "RUN_ENDED"
    assert await reason(workflows.PauseExecution(pb.PauseExecutionRequest(**ended), metadata=ME)) == "RUN_ENDED"
