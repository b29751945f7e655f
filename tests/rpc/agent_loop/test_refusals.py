"""How public methods refuse: bad requests, resources of others, reused request ids, an unavailable ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
import pytest

from pawl.agent.v1 import (
    agent_pb2,
    agents_pb2,
    conversation_pb2,
    jobs_pb2,
    operator_pb2,
    steps_pb2,
    types_pb2,
    undo_pb2,
)
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent.v1.agents_pb2_grpc import AgentRegistryServiceStub
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.agent.v1.jobs_pb2_grpc import JobServiceStub
from pawl.agent.v1.operator_pb2_grpc import OperatorServiceStub
from pawl.agent_loop.domain.limits import TOKENS_MAX
from pawl.client.history import history
from pawl.event.v1 import agent_pb2 as agent_values
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.event.v1 import conversation_pb2 as conversation_values
from pawl.tool.v1 import tool_pb2
from tests.fakes.images import PNG
from tests.rpc.agent_loop.conftest import ADMIN, APPROVER, BOSS, FOREIGN_BOSS, ME, OPERATOR, STRANGERS
from tests.rpc.agent_loop.errors import failure, reason
from tests.rpc.agent_loop.ledger import PlayedLedger

Row: TypeAlias = tuple[Any, str] | tuple[Any, str, str]
Api: TypeAlias = Callable[..., Any]

MISSING = "no-such"
NO_ID = "no spaces"
CONTROL = "bell\a"
DIGEST = "digest of call_1"
HISTORY = history([{"role": "user", "content": "How warm is it?"}, {"role": "assistant", "content": "12 degrees"}])


@pytest.fixture
def api(channel: grpc.aio.Channel) -> Api:
    """Calls the method that takes this type of request; of a stream, awaits the first response."""
    services = AgentServiceStub, AgentRegistryServiceStub, ConversationServiceStub, JobServiceStub, OperatorServiceStub
    stubs = [service(channel) for service in services]

    def call(request: Any, metadata: Any = ME) -> Any:
        name = type(request).__name__.removesuffix("Request")
        answer = next(getattr(stub, name) for stub in stubs if hasattr(stub, name))(request, metadata=metadata)
        return answer.read() if isinstance(answer, grpc.aio.UnaryStreamCall) else answer

    return call


@pytest.fixture(autouse=True)
async def run(ledger: PlayedLedger) -> None:
    """A run of the first user that waits for an approval."""
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    ledger.put_run("run_1", token_budget=1000)


async def check_refusals(api: Api, rows: list[Row], metadata: Any = ME) -> None:
    """Assert that each request is refused with its reason and, where one is named, its field."""
    wrong = []
    for request, expected, *field in rows:
        error = await failure(api(request, metadata))
        if (error.reason, *field) != (expected, *([error.metadata.get("field")] if field else [])):
            wrong.append(f"{expected} expected of {type(request).__name__} {str(request)[:200]}: {error!r}")
    assert not wrong, "\n".join(wrong)


def start(text: str = "Hello", **fields: Any) -> agent_pb2.StartRunRequest:
    return agent_pb2.StartRunRequest(text=text, **fields)


def options(**fields: Any) -> agent_pb2.StartRunRequest:
    return start(options=run_pb2.RunOptions(**fields))


def limits(**fields: Any) -> agent_pb2.StartRunRequest:
    return options(limits=run_pb2.RunLimits(**fields))


def choice(mode: run_pb2.ToolChoice.Mode.ValueType, name: str = "", **fields: Any) -> agent_pb2.StartRunRequest:
    return options(tool_choice=run_pb2.ToolChoice(mode=mode, tool_name=name), **fields)


def form(schema_json: bytes, name: str = "") -> agent_pb2.StartRunRequest:
    return options(response_format=run_pb2.ResponseFormat(schema_json=schema_json, name=name))


def part(**fields: Any) -> agent_pb2.StartRunRequest:
    return start("", parts=[message_pb2.Part(**fields)])


def own_tool(name: str = "show", description: str = "Show it.") -> tool_pb2.ToolDefinition:
    return tool_pb2.ToolDefinition(name=name, description=description)


async def test_a_bad_message_is_refused_with_the_field_that_is_wrong(api: Api, ledger: PlayedLedger) -> None:
    """LOOP-15"""
    mode = run_pb2.ToolChoice
    await check_refusals(
        api,
        [
            (start(""), "INVALID_FIELD", "text"),
            (start(CONTROL), "INVALID_FIELD", "text"),
            (start("next line\x85"), "INVALID_FIELD", "text"),
            (start("x" * (256 * 1024 + 1)), "TOO_LARGE", "text"),
            (start(request_id=NO_ID), "INVALID_ID", "request_id"),
            (start(conversation_id="../etc"), "INVALID_ID", "conversation_id"),
            (start(conversation_id="x" * 65), "INVALID_ID", "conversation_id"),
            (start(conversation_id=MISSING), "CONVERSATION_NOT_FOUND"),
            (start(conversation_key="é" * 101), "TOO_LARGE"),
            (start(conversation_key="k", conversation_id="c1"), "INVALID_FIELD"),
            (start(policy=types_pb2.MESSAGE_POLICY_STEER), "INVALID_FIELD", "policy"),
            (start(agent="draft/a/b"), "INVALID_ID"),
            (start(agent="nobody"), "AGENT_NOT_FOUND"),
            (limits(rounds_max=1001), "INVALID_FIELD", "options.limits.rounds_max"),
            (limits(rounds_max=0), "INVALID_FIELD", "options.limits.rounds_max"),
            (limits(run_timeout_seconds=float("nan")), "INVALID_FIELD", "options.limits.run_timeout_seconds"),
            (limits(run_timeout_seconds=-1), "INVALID_FIELD", "options.limits.run_timeout_seconds"),
            (options(temperature=2.1), "INVALID_FIELD", "options.temperature"),
            (options(output_tokens_max=0), "INVALID_FIELD", "options.output_tokens_max"),
            (options(instructions="x" * (64 * 1024 + 1)), "TOO_LARGE", "options.instructions"),
            (options(instructions="nul\0"), "INVALID_FIELD", "options.instructions"),
            (options(model="nul\0"), "INVALID_FIELD", "options.model"),
            (options(tool_names=[""]), "INVALID_FIELD", "options.tool_names"),
            (choice(mode.MODE_TOOL), "INVALID_FIELD", "options.tool_choice.tool_name"),
            (choice(mode.MODE_AUTO, "f"), "INVALID_FIELD", "options.tool_choice.tool_name"),
            (choice(mode.MODE_TOOL, "f", tool_names=["g"]), "INVALID_FIELD", "options.tool_choice.tool_name"),
            (choice(mode.MODE_REQUIRED, without_tools=True), "INVALID_FIELD", "options.tool_choice.mode"),
            (form(b"{}", name="two words"), "INVALID_FIELD", "options.response_format.name"),
            (form(b" " * 70_000), "TOO_LARGE", "options.response_format.schema_json"),
            (form(b"{"), "INVALID_SCHEMA"),
            (part(), "INVALID_FIELD"),
            (part(image=message_pb2.ImagePart(data=PNG + bytes(1024 * 1024))), "TOO_LARGE"),
            (part(file=message_pb2.FilePart(document_name="absent")), "DOCUMENT_NOT_FOUND"),
            (start(front_end_tools=[own_tool(f"t{number}") for number in range(65)]), "INVALID_FIELD"),
            (start(front_end_tools=[own_tool("big", "x" * 70_000)]), "TOO_LARGE"),
            (start(front_end_tools=[own_tool("look")]), "TOOL_EXISTS"),
            (start(front_end_tools=[own_tool()], options=run_pb2.RunOptions(without_tools=True)), "INVALID_FIELD"),
            (start(labels={"Env": ""}), "INVALID_FIELD"),
            (agent_pb2.SendMessageRequest(text="x"), "INVALID_ID"),
            (agent_pb2.SendMessageRequest(conversation_id=MISSING, text="x"), "CONVERSATION_NOT_FOUND"),
        ],
    )
    assert list(ledger.runs) == ["run_1"]


def decide(call_id: str = "call_1", run_id: str = "run_1", **fields: Any) -> agent_pb2.DecideRequest:
    decision = types_pb2.CallDecision(**{"call_id": call_id, "digest": DIGEST, **fields})
    return agent_pb2.DecideRequest(run_id=run_id, decision=decision)


APPROVE = call_pb2.DECISION_KIND_APPROVE
EDIT = call_pb2.DECISION_KIND_EDIT
REJECT = call_pb2.DECISION_KIND_REJECT
ANSWER = call_pb2.DECISION_KIND_ANSWER


async def test_a_bad_decision_changes_nothing(api: Api, ledger: PlayedLedger) -> None:
    await ledger.add_run("run_2")
    await ledger.add_call("call_2", call_pb2.CALL_STATE_AWAITING_APPROVAL, run_id="run_2")
    await ledger.add_run("run_3")
    await ledger.finish("run_3")
    await check_refusals(
        api,
        [
            (decide(), "INVALID_FIELD"),
            (decide(kind=APPROVE, digest=""), "DIGEST_REQUIRED"),
            (decide(kind=APPROVE, digest="another"), "DIGEST_MISMATCH"),
            (decide(kind=APPROVE, digest="x" * 129), "TOO_LARGE"),
            (decide(kind=APPROVE, arguments_json=b"{}"), "INVALID_FIELD"),
            (decide(kind=APPROVE, answer="yes"), "INVALID_FIELD"),
            (decide(kind=EDIT), "INVALID_JSON"),
            (decide(kind=EDIT, arguments_json=b"[1]"), "INVALID_JSON"),
            (decide(kind=EDIT, arguments_json=b'{"a":1,"a":1}'), "INVALID_JSON"),
            (decide(kind=EDIT, arguments_json=b'"' + b"x" * (256 * 1024) + b'"'), "TOO_LARGE"),
            (decide("call_2", kind=EDIT, arguments_json=b"{}"), "CALL_NOT_FOUND"),
            (decide(kind=REJECT, reason="x" * 4097), "TOO_LARGE"),
            (decide(kind=REJECT, reason=CONTROL), "INVALID_FIELD"),
            (decide(kind=ANSWER), "INVALID_FIELD"),
            (decide(kind=ANSWER, answer="x" * (64 * 1024 + 1)), "TOO_LARGE"),
            (decide(MISSING, kind=APPROVE), "CALL_NOT_FOUND"),
            (decide("a b", kind=APPROVE), "INVALID_ID"),
            (decide(run_id="run_3", kind=APPROVE), "CALL_NOT_PENDING"),
        ],
        APPROVER,
    )
    assert ledger.runs["run_1"].calls["call_1"].state == call_pb2.CALL_STATE_AWAITING_APPROVAL


def bring(*results: types_pb2.ToolResult) -> agent_pb2.SubmitToolResultsRequest:
    return agent_pb2.SubmitToolResultsRequest(run_id="run_1", results=results)


def resolve(resolution: agent_pb2.Resolution.ValueType, content: bytes = b"", **more: Any) -> Any:
    fields = {"run_id": "run_1", "call_id": "call_1"} | more
    return agent_pb2.ResolveCallRequest(**fields, resolution=resolution, content_json=content)


def top_up(tokens: int = 500, run_id: str = "run_1", request_id: str = "") -> agent_pb2.TopUpRunRequest:
    return agent_pb2.TopUpRunRequest(request_id=request_id, run_id=run_id, tokens=tokens)


def pending(**fields: Any) -> list[Any]:
    wanted = agent_pb2.PendingFilter(**fields)
    return [agent_pb2.ListPendingRequest(filter=wanted), agent_pb2.WatchPendingRequest(filter=wanted)]


async def test_bad_requests_about_runs_are_refused(api: Api) -> None:
    result = types_pb2.ToolResult(call_id="call_1", content_json=b"1")
    elsewhere = types_pb2.ToolResult(run_id="run_2", call_id="call_1", content_json=b"1")
    of_store = agent_pb2.PENDING_SCOPE_STORE
    await check_refusals(
        api,
        [
            (bring(), "INVALID_FIELD", "results"),
            (bring(*[result] * 65), "INVALID_FIELD", "results"),
            (bring(elsewhere), "INVALID_FIELD", "tool_result.run_id"),
            (top_up(0), "INVALID_FIELD"),
            (top_up(TOKENS_MAX + 1), "INVALID_FIELD"),
            *((agent_pb2.GetRunRequest(run_id="run_1", wait_seconds=wait), "INVALID_FIELD") for wait in (-1, 60.1)),
            (agent_pb2.GetRunRequest(run_id="run_1", wait_seconds=float("nan")), "INVALID_FIELD"),
            (agent_pb2.WatchRunRequest(run_id="run_1", after_seq=2**64 - 1), "INVALID_FIELD"),
            (agent_pb2.WatchRunRequest(run_id="run_1", after_seq=9), "SEQ_BEYOND_END"),
            (steps_pb2.WatchStepsRequest(run_id="run_1", after_seq=99), "SEQ_BEYOND_END"),
            (agent_pb2.ListRunsRequest(states=[0]), "INVALID_FIELD"),  # type: ignore[list-item]
            (agent_pb2.ListRunsRequest(agent=NO_ID), "INVALID_ID"),
            (agent_pb2.ListRunsRequest(labels={"env": "a\nb"}), "INVALID_FIELD"),
            (
                agent_pb2.ListRunsRequest(waits=[run_pb2.WAIT_KIND_APPROVAL], states=[run_pb2.RUN_STATE_QUEUED]),
                "INVALID_FIELD",
            ),
            *((request, "PERMISSION_DENIED") for request in pending(scope=of_store)),
            *((request, "INVALID_FIELD") for request in pending(scope=of_store, conversation_id="conv_1")),
            *((request, "INVALID_ID") for request in pending(conversation_id="a b")),
            *((request, "INVALID_FIELD") for request in pending(tool_name="x" * 257)),
            (agent_pb2.LeaseCallRequest(run_id="run_1", call_id="call_1"), "INVALID_ID"),
            (agent_pb2.LeaseCallRequest(run_id="run_1", call_id=MISSING, client_id="tab"), "CALL_NOT_FOUND"),
            (undo_pb2.GetUndoReportRequest(run_id="run_1"), "INVALID_FIELD"),
            (undo_pb2.UndoRunRequest(run_id="run_1"), "RUN_NOT_ENDED"),
            (undo_pb2.PreviewUndoRequest(run_id="run_1"), "RUN_NOT_ENDED"),
            (resolve(agent_pb2.RESOLUTION_HAPPENED, b"1"), "PERMISSION_DENIED"),
        ],
    )
    await check_refusals(
        api,
        [
            (resolve(agent_pb2.RESOLUTION_UNSPECIFIED), "INVALID_FIELD"),
            (resolve(agent_pb2.RESOLUTION_HAPPENED), "INVALID_JSON"),
            (resolve(agent_pb2.RESOLUTION_RUN_AGAIN, b"1"), "INVALID_FIELD"),
            (resolve(agent_pb2.RESOLUTION_TELL_MODEL, call_id=MISSING), "CALL_NOT_FOUND"),
            (operator_pb2.RedriveRunRequest(run_id="run_1", request_id=NO_ID), "INVALID_ID"),
            (operator_pb2.EndRunRequest(run_id="run_1", reason="x" * (4 * 1024 + 1)), "TOO_LARGE"),
            (operator_pb2.EndRunRequest(run_id="run_1", reason="nul\0"), "INVALID_FIELD"),
            (operator_pb2.ListAttentionRequest(run_id="a b"), "INVALID_ID"),
        ],
        OPERATOR,
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "INVALID_JSON"),
        (b'{"a":1,"a":2}', "INVALID_JSON"),
        (b"NaN", "INVALID_JSON"),
        (b"[" * 40 + b"]" * 40, "INVALID_JSON"),
        (b'"\xff"', "INVALID_JSON"),
        (b'"' + b"x" * (1024 * 1024) + b'"', "TOO_LARGE"),
    ],
)
async def test_a_result_that_is_not_strict_json_is_refused(
    api: Api, ledger: PlayedLedger, content: bytes, expected: str
) -> None:
    await ledger.offer("call_2")
    (receipt,) = (await api(bring(types_pb2.ToolResult(call_id="call_2", content_json=content)))).receipts
    assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, expected)
    assert not ledger.commands


def get(**fields: Any) -> conversation_pb2.GetConversationRequest:
    return conversation_pb2.GetConversationRequest(**fields)


def search(**fields: Any) -> conversation_pb2.ListConversationsRequest:
    return conversation_pb2.ListConversationsRequest(**fields)


def update(conversation_id: str = MISSING, **fields: Any) -> conversation_pb2.UpdateConversationRequest:
    return conversation_pb2.UpdateConversationRequest(conversation_id=conversation_id, **fields)


def fork(conversation_id: str = "c", **fields: Any) -> conversation_pb2.ForkConversationRequest:
    return conversation_pb2.ForkConversationRequest(conversation_id=conversation_id, **fields)


def importing(messages: Any = HISTORY, **fields: Any) -> conversation_pb2.ImportConversationRequest:
    return conversation_pb2.ImportConversationRequest(messages=messages, **fields)


async def test_bad_requests_about_conversations_are_refused(api: Api) -> None:
    bad_labels = conversation_values.Labels(labels={"pawl.x": ""})
    await check_refusals(
        api,
        [
            (get(), "INVALID_FIELD"),
            (get(conversation_id="a b"), "INVALID_ID"),
            (get(conversation_id=MISSING), "CONVERSATION_NOT_FOUND"),
            (get(conversation_key=MISSING), "CONVERSATION_NOT_FOUND"),
            (get(conversation_key="x" * 201), "TOO_LARGE"),
            (search(query="?!"), "INVALID_FIELD"),
            (search(query="a\0b"), "INVALID_FIELD"),
            (search(query="x" * 201), "TOO_LARGE"),
            (search(labels={"env": "x" * 257}), "INVALID_FIELD"),
            (update("", title="x"), "INVALID_ID"),
            (update(), "INVALID_FIELD"),
            (update(labels=bad_labels), "INVALID_FIELD"),
            (update(title="x"), "CONVERSATION_NOT_FOUND"),
            *((update(title=title), "INVALID_FIELD") for title in ("x" * 201, "two\nlines", " ", CONTROL, "l\u2028s")),
            (fork(""), "INVALID_ID"),
            (fork(MISSING), "CONVERSATION_NOT_FOUND"),
            (fork(number=2**63), "INVALID_FIELD"),
            (fork(request_id="a b"), "INVALID_ID"),
            (importing(()), "INVALID_HISTORY"),
            (importing(HISTORY[:1]), "INVALID_HISTORY"),
            (importing(title="a\nb"), "INVALID_FIELD"),
            (importing(conversation_key="x" * 201), "TOO_LARGE"),
            (importing(request_id="a b"), "INVALID_ID"),
        ],
    )
    conversation_id = (await api(start(conversation_key="k"))).run.conversation_id
    await check_refusals(
        api,
        [(fork(conversation_id), "FORK_POINT_OPEN"), (importing(conversation_key="k"), "CONVERSATION_EXISTS")],
    )
    assert len((await api(search())).conversations) == 2


def job(**fields: Any) -> jobs_pb2.StartJobRequest:
    return jobs_pb2.StartJobRequest(**{"tool_name": "probe"} | fields)


def series(**fields: Any) -> jobs_pb2.StartJobRequest:
    return job(**{"interval_seconds": 60, "iterations_max": 5} | fields)


def condition(**fields: Any) -> run_pb2.JobCondition:
    return run_pb2.JobCondition(**fields)


async def test_a_job_that_makes_no_sense_is_not_started(api: Api, ledger: PlayedLedger) -> None:
    await check_refusals(
        api,
        [
            (job(tool_name="missing"), "TOOL_NOT_FOUND"),
            (job(tool_name="denied"), "PERMISSION_DENIED"),
            (job(tool_name="show"), "INVALID_ARGUMENTS"),
            (job(tool_name="here"), "INVALID_ARGUMENTS"),
            (job(tool_name=""), "INVALID_FIELD"),
            (job(arguments_json=b'{"bad":1}'), "INVALID_ARGUMENTS"),
            (job(arguments_json=b'{"n": "\xff"}'), "INVALID_FIELD"),
            (job(iterations_max=2), "INVALID_FIELD"),
            (job(interval_seconds=5), "INVALID_FIELD"),
            (job(reports=99), "INVALID_FIELD"),
            (job(agent="nobody"), "AGENT_NOT_FOUND"),
            (job(conversation_id="conv_9"), "CONVERSATION_NOT_FOUND"),
            (job(conversation_key="build", conversation_id="conv_1"), "INVALID_FIELD"),
            (job(until=condition(expression="value <")), "INVALID_FIELD"),
            (series(interval_seconds=0.1), "INVALID_FIELD"),
            (series(report_seconds=9), "INVALID_FIELD"),
            (series(failures_told=101, until=condition(expression="value")), "INVALID_FIELD"),
            *(
                (series(until=condition(equals_json=said)), "INVALID_FIELD")
                for said in (b"", b"null", b"\xff", b"1e999")
            ),
            (series(until=condition(equals_json=b"[" * 10_000)), "INVALID_FIELD"),
            (series(when=run_pb2.JobMonitor(condition=condition(equals_json=b"{"))), "INVALID_FIELD"),
            (jobs_pb2.PauseJobRequest(job_id="run_1"), "RUN_NOT_FOUND"),
        ],
    )
    assert list(ledger.runs) == ["run_1"]


def agent(name: str = "clerk", tools: tuple[str, ...] = (), **fields: Any) -> agent_values.AgentDefinition:
    return agent_values.AgentDefinition(name=name, tools=agent_values.ToolSelection(names=tools), **fields)


def save(*args: Any, **fields: Any) -> agents_pb2.UpdateAgentRequest:
    return agents_pb2.UpdateAgentRequest(definition=agent(*args, **fields))


def draft(*args: Any, **fields: Any) -> agents_pb2.UpdateDraftRequest:
    return agents_pb2.UpdateDraftRequest(definition=agent(*args, **fields))


async def test_an_agent_that_cannot_be_is_not_saved(api: Api) -> None:
    for saving, metadata in ((save, ADMIN), (draft, ME)):
        await check_refusals(
            api,
            [
                (saving("no name"), "INVALID_ID"),
                (saving("draft/clerk"), "INVALID_ID"),
                (saving(options=run_pb2.RunOptions(instructions="x" * 70_000)), "TOO_LARGE"),
                (saving(tools=("fly",)), "TOOL_NOT_FOUND"),
                (saving(tools=("pay",)), "TOOL_NOT_FOUND"),
                (saving(delegates_to=["nobody"]), "AGENT_NOT_FOUND"),
                (saving(delegates_to=["clerk"]), "AGENT_CYCLE"),
                (saving(daily_tokens_max=2**53 + 1), "INVALID_FIELD"),
                (saving(labels={"Env": ""}), "INVALID_FIELD"),
            ],
            metadata,
        )
    await check_refusals(
        api,
        [
            (draft(allowed_roles=["member"]), "INVALID_FIELD"),
            (draft(daily_tokens_max=1), "INVALID_FIELD"),
            (agents_pb2.ListAgentsRequest(labels={"Env": ""}), "INVALID_FIELD"),
            (agents_pb2.ListAgentVersionsRequest(name="default", page_token="x"), "INVALID_PAGE_TOKEN"),
        ],
    )
    await check_refusals(
        api,
        [
            (agents_pb2.GetAgentUsageRequest(name="other"), "AGENT_NOT_FOUND"),
            (agents_pb2.GetAgentUsageRequest(name="draft/clerk"), "INVALID_ID"),
            (agents_pb2.GetAgentUsageRequest(name="default", days=401), "INVALID_FIELD"),
        ],
        ADMIN,
    )


async def test_bad_pages_are_refused(api: Api) -> None:
    rows: list[Row] = []
    for fields, expected in (({"page_size": 201}, "INVALID_FIELD"), ({"page_token": "made up"}, "INVALID_PAGE_TOKEN")):
        page: dict[str, Any] = fields
        rows += [
            (agent_pb2.ListRunsRequest(**page), expected),
            (agent_pb2.ListPendingRequest(**page), expected),
            (agent_pb2.ListCallsRequest(run_id="run_1", **page), expected),
            (agent_pb2.ListMessagesRequest(conversation_id="conv_1", **page), expected),
            (steps_pb2.ListStepsRequest(run_id="run_1", **page), expected),
            (search(**page), expected),
            (jobs_pb2.ListJobsRequest(**page), expected),
            (agents_pb2.ListAgentsRequest(**page), expected),
        ]
    await check_refusals(api, rows)
    await check_refusals(api, [(operator_pb2.ListAttentionRequest(page_size=201), "INVALID_FIELD")], OPERATOR)


def of_run(run_id: str, call_id: str = "call_1") -> list[Any]:
    """Every method that a user calls about a run, with an otherwise good request."""
    result = types_pb2.ToolResult(call_id=call_id, content_json=b"1")
    return [
        agent_pb2.GetRunRequest(run_id=run_id),
        agent_pb2.CancelRunRequest(run_id=run_id),
        agent_pb2.ListCallsRequest(run_id=run_id),
        decide(call_id, run_id, kind=EDIT, arguments_json=b"{}"),
        agent_pb2.SubmitToolResultsRequest(run_id=run_id, results=[result]),
        agent_pb2.WatchRunRequest(run_id=run_id),
        steps_pb2.ListStepsRequest(run_id=run_id),
        steps_pb2.WatchStepsRequest(run_id=run_id),
        top_up(run_id=run_id),
        undo_pb2.PreviewUndoRequest(run_id=run_id),
        undo_pb2.UndoRunRequest(run_id=run_id),
        undo_pb2.UndoCallRequest(run_id=run_id, call_id=call_id),
        undo_pb2.GetUndoReportRequest(run_id=run_id),
        jobs_pb2.GetJobRequest(job_id=run_id),
        jobs_pb2.StopJobRequest(job_id=run_id),
        jobs_pb2.PauseJobRequest(job_id=run_id),
        jobs_pb2.ResumeJobRequest(job_id=run_id),
    ]


def of_operators(run_id: str) -> list[Any]:
    return [
        operator_pb2.RedriveRunRequest(run_id=run_id),
        operator_pb2.EndRunRequest(run_id=run_id),
        resolve(agent_pb2.RESOLUTION_TELL_MODEL, run_id=run_id),
    ]


@pytest.mark.parametrize("stranger", [*STRANGERS, BOSS])
async def test_what_belongs_to_others_looks_exactly_like_nothing(api: Api, ledger: PlayedLedger, stranger: Any) -> None:
    """I8, I13: not found, with the same words as for an id that does not exist; operators are no exception."""
    await ledger.add_run("job_1", conversation_id="conv_of_job_1")
    ledger.put_run("job_1", reports_to="conv_1", options=run_pb2.Run(job=run_pb2.Job()).SerializeToString())
    key = (await api(start(conversation_key="k"))).run.conversation_id
    for run_id in ("run_1", "job_1"):
        for mine, absent in zip(of_run(run_id), of_run(MISSING, MISSING), strict=True):
            found, missing = [await failure(api(request, stranger)) for request in (mine, absent)]
            assert (found.reason, found.message) == (missing.reason, missing.message), type(mine).__name__
            assert found.kind.value == "NOT_FOUND"
    of_conversation = [
        *(get(conversation_id=key), get(conversation_key="k"), update(key, title="yours"), fork(key)),
        *(job(conversation_id="conv_1"), jobs_pb2.StopJobsRequest(conversation_id="conv_1")),
    ]
    await check_refusals(api, [(request, "CONVERSATION_NOT_FOUND") for request in of_conversation], stranger)
    assert not (await api(agent_pb2.ListRunsRequest(), stranger)).runs
    assert not (await api(agent_pb2.ListPendingRequest(), stranger)).calls
    assert not (await api(search(query="hello"), stranger)).conversations
    assert not (await api(jobs_pb2.ListJobsRequest(conversation_id="conv_1"), stranger)).jobs
    assert not ledger.commands


async def test_only_operators_of_the_store_act_on_runs_of_others(api: Api, ledger: PlayedLedger) -> None:
    """I13: others are refused whether or not the run exists, and those of another store find nothing."""
    await ledger.need_attention(run_pb2.ATTENTION_REASON_QUARANTINED)
    requests = [*of_operators("run_1"), *of_operators(MISSING)]
    listing = operator_pb2.ListAttentionRequest()
    ending = operator_pb2.EndJobsRequest(request_id="e1")
    for metadata in (ME, APPROVER, *STRANGERS):
        refused = [(request, "PERMISSION_DENIED") for request in (*requests, listing, ending)]
        await check_refusals(api, [*refused], metadata)
    for mine, absent in zip(of_operators("run_1"), of_operators(MISSING), strict=True):
        found, missing = [await failure(api(request, FOREIGN_BOSS)) for request in (mine, absent)]
        assert (found.reason, found.message) == (missing.reason, missing.message)
        assert found.reason == "RUN_NOT_FOUND"
    assert not (await api(listing, FOREIGN_BOSS)).runs
    assert not ledger.commands


async def test_a_request_id_is_used_for_one_request(api: Api, ledger: PlayedLedger) -> None:
    """I2: the same request again has the same answer, and the id is refused for every other one."""
    await ledger.add_run("run_0", conversation_id="conv_0")
    await ledger.finish("run_0")
    made = (await api(importing(request_id="i"))).conversation.conversation_id
    pairs: list[tuple[Any, Any]] = [
        (start(request_id="s"), start("Bye", request_id="s")),
        (start(request_id="l", labels={"a": "b"}), start(request_id="l", labels={"a": "c"})),
        (start(request_id="o"), start(request_id="o", options=run_pb2.RunOptions(temperature=0.5))),
        (importing(request_id="i"), importing(request_id="i", title="other")),
        (fork(made, request_id="f"), fork(made, request_id="f", number=1)),
        (update(made, request_id="u", title="a"), update(made, request_id="u", title="b")),
        (job(request_id="j"), job(request_id="j", arguments_json=b'{"n": 2}')),
        (undo_pb2.UndoRunRequest(request_id="v", run_id="run_0"), fork(made, request_id="v", number=2)),
        (agent_pb2.CancelRunRequest(request_id="c", run_id="run_1"), top_up(request_id="c")),
    ]
    for request, other in pairs:
        first, again = [await api(request) for _ in range(2)]
        name = type(request).__name__
        assert getattr(first, "run", first) == getattr(again, "run", again), name
        if not isinstance(request, undo_pb2.UndoRunRequest):
            assert await reason(api(other)) == "REQUEST_ID_REUSED", name
    assert [type(command).__name__ for command in ledger.commands] == ["Cancel"]


async def test_a_ledger_that_is_away_is_unavailable(api: Api, ledger: PlayedLedger) -> None:
    ledger.down = True
    rows: list[Row] = [(request, "DEPENDENCY_UNAVAILABLE") for request in of_run("run_1")]
    # Streams wait for the ledger once they have begun.
    await check_refusals(api, [row for row in rows if "Watch" not in type(row[0]).__name__])


@pytest.mark.parametrize("run_id", ["", "a b", "x" * 65, "*", "é"])
async def test_ids_of_another_form_are_refused(api: Api, run_id: str) -> None:
    await check_refusals(api, [(request, "INVALID_ID") for request in of_run(run_id)])
    await check_refusals(api, [(request, "INVALID_ID") for request in of_operators(run_id)], OPERATOR)


async def test_bytes_that_are_no_message_are_refused(channel: grpc.aio.Channel) -> None:
    for name in ("StartRun", "SubmitToolResults", "Decide", "GetRun"):
        method: Any = channel.unary_unary(f"/pawl.agent.v1.AgentService/{name}")
        assert await reason(method(b"\xff\xff\xff", metadata=ME)) == "MALFORMED_REQUEST"


async def test_nobody_gets_in_without_a_key(stub: Any) -> None:
    assert await reason(stub.ListRuns(agent_pb2.ListRunsRequest())) == "UNAUTHENTICATED"
