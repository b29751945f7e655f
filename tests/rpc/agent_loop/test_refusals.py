"""Refusals by public methods: invalid requests, other users' resources, reused ids, and an unavailable ledger."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2, agents_pb2, jobs_pb2, operator_pb2, steps_pb2, types_pb2, undo_pb2
from pawl.errors import RoundNotFound
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.event.v1 import conversation_pb2 as conversation_values
from pawl.values import TOKENS_MAX
from tests.fakes.images import PNG
from tests.rpc.agent_loop.asking import (
    ANSWER,
    APPROVE,
    CONTROL,
    EDIT,
    HISTORY,
    MISSING,
    NO_ID,
    REJECT,
    Api,
    Row,
    bring,
    check_refusals,
    choice,
    condition,
    decide,
    draft,
    failure,
    fork,
    form,
    get,
    importing,
    job,
    limits,
    options,
    own_tool,
    part,
    pending,
    reason,
    resolve,
    save,
    search,
    series,
    start,
    top_up,
    update,
)
from tests.rpc.agent_loop.conftest import ADMIN, APPROVER, BOSS, FOREIGN_BOSS, ME, OPERATOR, OTHER_USERS
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.refusals import raises

pytestmark = pytest.mark.usefixtures("gated_run")

# The value of a client that is newer than agent-loop (OPS-4)
UNKNOWN = 999


async def test_error_for_an_invalid_message_names_the_field(api: Api, ledger: PlayedLedger) -> None:
    """LOOP-15: no run is started."""
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
            *((request, "INVALID_FIELD") for request in (start(policy=UNKNOWN), options(batch_order=UNKNOWN))),
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


async def test_invalid_decision_has_no_effect(api: Api, ledger: PlayedLedger) -> None:
    await ledger.add_run("run_2")
    await ledger.add_call("call_2", call_pb2.CALL_STATE_AWAITING_APPROVAL, run_id="run_2")
    await ledger.add_run("run_3")
    await ledger.finish("run_3")
    await check_refusals(
        api,
        [
            *((decide(kind=kind), "INVALID_FIELD") for kind in (0, UNKNOWN)),
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


async def test_invalid_run_requests_are_rejected(api: Api, ledger: PlayedLedger) -> None:
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
            (steps_pb2.GetRoundRequest(run_id="run_1"), "INVALID_FIELD", "round"),
            (steps_pb2.GetRoundRequest(run_id="run_1", round=1), "ROUND_NOT_FOUND"),
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
            *((request, "INVALID_FIELD") for request in (*pending(tool_name="x" * 257), *pending(scope=UNKNOWN))),
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
    ledger.trim()
    await raises(RoundNotFound, api(steps_pb2.GetRoundRequest(run_id="run_1", round=1)), match="were deleted$")


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
async def test_result_that_is_not_strict_json_is_rejected(
    api: Api, ledger: PlayedLedger, content: bytes, expected: str
) -> None:
    await ledger.offer("call_2")
    (receipt,) = (await api(bring(types_pb2.ToolResult(call_id="call_2", content_json=content)))).receipts
    assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, expected)
    assert not ledger.commands


async def test_invalid_conversation_requests_are_rejected(api: Api) -> None:
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


async def test_invalid_job_is_not_started(api: Api, ledger: PlayedLedger) -> None:
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


async def test_invalid_agent_is_not_saved(api: Api) -> None:
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


async def test_invalid_page_requests_are_rejected(api: Api) -> None:
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
    """Return a valid request for every method that a user calls about a run."""
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
        steps_pb2.GetRoundRequest(run_id=run_id, round=1),
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


@pytest.mark.parametrize("other_user", [*OTHER_USERS, BOSS])
async def test_resources_of_other_users_look_exactly_like_missing_ones(
    api: Api, ledger: PlayedLedger, other_user: Any
) -> None:
    """I8, I13: the error is NOT_FOUND with the same message as for an absent id, even for operators."""
    await ledger.add_run("job_1", conversation_id="conv_of_job_1")
    ledger.put_run("job_1", reports_to="conv_1", options=run_pb2.Run(job=run_pb2.Job()).SerializeToString())
    key = (await api(start(conversation_key="k"))).run.conversation_id
    for run_id in ("run_1", "job_1"):
        for mine, absent in zip(of_run(run_id), of_run(MISSING, MISSING), strict=True):
            found, missing = [await failure(api(request, other_user)) for request in (mine, absent)]
            assert (found.reason, found.message) == (missing.reason, missing.message), type(mine).__name__
            assert found.kind.value == "NOT_FOUND"
    of_conversation = [
        *(get(conversation_id=key), get(conversation_key="k"), update(key, title="yours"), fork(key)),
        *(job(conversation_id="conv_1"), jobs_pb2.StopJobsRequest(conversation_id="conv_1")),
    ]
    await check_refusals(api, [(request, "CONVERSATION_NOT_FOUND") for request in of_conversation], other_user)
    for request, field in (
        (agent_pb2.ListRunsRequest(), "runs"),
        (agent_pb2.ListPendingRequest(), "calls"),
        (search(query="hello"), "conversations"),
        (jobs_pb2.ListJobsRequest(conversation_id="conv_1"), "jobs"),
    ):
        assert not getattr(await api(request, other_user), field)
    assert not ledger.commands


async def test_only_store_operators_act_on_other_users_runs(api: Api, ledger: PlayedLedger) -> None:
    """I13: other users are rejected whether or not the run exists; operators of another store find nothing."""
    await ledger.need_attention(run_pb2.ATTENTION_REASON_QUARANTINED)
    requests = [(request, "PERMISSION_DENIED") for request in (*of_operators("run_1"), *of_operators(MISSING))]
    for metadata in (ME, APPROVER, *OTHER_USERS):
        await check_refusals(api, [*requests], metadata)
    for mine, absent in zip(of_operators("run_1"), of_operators(MISSING), strict=True):
        found, missing = [await failure(api(request, FOREIGN_BOSS)) for request in (mine, absent)]
        assert (found.reason, found.message, found.reason) == (missing.reason, missing.message, "RUN_NOT_FOUND")
    assert not (await api(operator_pb2.ListAttentionRequest(), FOREIGN_BOSS)).runs
    assert not ledger.commands


async def test_a_request_id_identifies_one_request(api: Api, ledger: PlayedLedger) -> None:
    """I2: a repeated request gets the same response, and a different request with the id is rejected."""
    await ledger.add_run("run_0", conversation_id="conv_0")
    await ledger.finish("run_0")
    made = (await api(importing(request_id="i"))).conversation.conversation_id
    for request, other in [
        (start(request_id="s"), start("Bye", request_id="s")),
        (start(request_id="l", labels={"a": "b"}), start(request_id="l", labels={"a": "c"})),
        (start(request_id="o"), start(request_id="o", options=run_pb2.RunOptions(temperature=0.5))),
        (importing(request_id="i"), importing(request_id="i", title="other")),
        (fork(made, request_id="f"), fork(made, request_id="f", number=1)),
        (update(made, request_id="u", title="a"), update(made, request_id="u", title="b")),
        (job(request_id="j"), job(request_id="j", arguments_json=b'{"n": 2}')),
        (undo_pb2.UndoRunRequest(request_id="v", run_id="run_0"), fork(made, request_id="v", number=2)),
        (agent_pb2.CancelRunRequest(request_id="c", run_id="run_1"), top_up(request_id="c")),
    ]:
        first, again = [await api(request) for _ in range(2)]
        name = type(request).__name__
        assert getattr(first, "run", first) == getattr(again, "run", again), name
        if not isinstance(request, undo_pb2.UndoRunRequest):
            assert await reason(api(other)) == "REQUEST_ID_REUSED", name
    assert [command.WhichOneof("kind") for command in ledger.commands] == ["cancel"]


async def test_unavailable_ledger_returns_unavailable(api: Api, ledger: PlayedLedger) -> None:
    ledger.down = True
    rows: list[Row] = [(request, "DEPENDENCY_UNAVAILABLE") for request in of_run("run_1")]
    # Streams wait for the ledger after they have started.
    await check_refusals(api, [row for row in rows if "Watch" not in type(row[0]).__name__])


@pytest.mark.parametrize("run_id", ["", "a b", "x" * 65, "*", "é"])
async def test_malformed_ids_are_rejected(api: Api, run_id: str) -> None:
    await check_refusals(api, [(request, "INVALID_ID") for request in of_run(run_id)])
    await check_refusals(api, [(request, "INVALID_ID") for request in of_operators(run_id)], OPERATOR)
