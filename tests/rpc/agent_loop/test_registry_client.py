"""The loop's gRPC client of the registry, and the Python client of an agent-loop."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from pawl.agent.v1 import agent_pb2
from pawl.agent_loop.loop.ports import CallContext
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules.fact import OutputChecked
from pawl.agent_loop.loop.rules.run import PinnedTool
from pawl.agent_loop.loop.rules.tool import ExecutionResult, ProposedCall, RecordedDecision, RecordedResult, Tool
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, ConversationId, IdSource, RunId, StoreId, UserId
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.rpc.client import open_channel
from pawl.client import AsyncClient, Client, NoAnswer
from pawl.errors import InvalidArguments, InvalidSchema, MethodNotFound, RunNotFound, ToolNotFound
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.launcher.ports import free_port
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.server import RpcServer
from pawl.tool.v1 import execution_pb2, execution_pb2_grpc, tool_pb2
from pawl.values import CallState, DecisionKind, Execution, ExecutionContext, Outcome, Progress
from tests.fakes.session_agent import FakeLive, OpenAuthenticator
from tests.rpc.agent_loop.conftest import client_side, new_server
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.refusals import raises

CONTEXT = CallContext(
    store_id=StoreId("s"),
    user_id=UserId("u"),
    conversation_id=ConversationId("c"),
    run_id=RunId("r"),
    user_roles=frozenset(
        {
            "member",
        }
    ),
    approvals_required=2,
)
EXECUTION = Execution(
    call_id=CallId("call_1"),
    tool_name="write",
    tool_version=2,
    arguments_json=b"{}",
    earlier_attempts=1,
    unknowns_resolved=3,
    timeout_seconds=5,
    rule_id="",
    approved_digest="d",
)


class FakeService(execution_pb2_grpc.ExecutionServiceServicer):
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.left = asyncio.Event()

    async def ResolveTools(self, request: Any, context: Any) -> execution_pb2.ResolveToolsResponse:
        self.asked.append(request)
        if "absent" in request.tool_names:
            raise ToolNotFound(tool_name="absent")
        definition = tool_pb2.ToolDefinition(name="write", description="Writes.", fallback_tool_name="other")
        return execution_pb2.ResolveToolsResponse(tools=[tool_pb2.Tool(definition=definition, version=2)])

    async def CheckOwnTools(self, request: Any, context: Any) -> execution_pb2.CheckOwnToolsResponse:
        self.asked.append(request)
        tools = [tool_pb2.OwnTool(definition=each, definition_sha256="ab" * 32) for each in request.definitions]
        return execution_pb2.CheckOwnToolsResponse(tools=tools)

    async def CheckCalls(self, request: Any, context: Any) -> execution_pb2.CheckCallsResponse:
        self.asked.append(request)
        known = execution_pb2.Verdict(
            call_id="call_1",
            disposition=execution_pb2.DISPOSITION_RUN,
            context=call_pb2.EXECUTION_CONTEXT_BACKEND,
            effect_class=call_pb2.EFFECT_CLASS_IDEMPOTENT,
            resource_keys=["a"],
        )
        return execution_pb2.CheckCallsResponse(verdicts=[known])

    async def CheckAnswer(self, request: Any, context: Any) -> execution_pb2.CheckAnswerResponse:
        self.asked.append(request)
        if request.answer == "bad":
            raise InvalidArguments("it must be a number")
        return execution_pb2.CheckAnswerResponse()

    async def CheckOutput(self, request: Any, context: Any) -> execution_pb2.CheckOutputResponse:
        self.asked.append(request)
        if not request.HasField("output"):
            raise InvalidSchema("it must be an object")
        return execution_pb2.CheckOutputResponse(faults=["the answer is not JSON"])

    async def PutWorkflowTool(self, request: Any, context: Any) -> execution_pb2.PutWorkflowToolResponse:
        raise MethodNotFound

    async def ReadDocument(self, request: Any, context: Any) -> execution_pb2.ReadDocumentResponse:
        raise MethodNotFound

    async def ExecuteTool(self, request: Any, context: Any) -> AsyncIterator[execution_pb2.ExecuteToolResponse]:
        self.asked.append(request)
        try:
            yield execution_pb2.ExecuteToolResponse(
                progress=execution_pb2.ExecutionProgress(fraction=0.5, message="half")
            )
            if request.call_id == "endless":
                await asyncio.Event().wait()
            yield execution_pb2.ExecuteToolResponse(
                result=execution_pb2.ExecutionResult(
                    outcome=execution_pb2.EXECUTION_OUTCOME_FAILED,
                    result=call_pb2.CallResult(content_json=b"1", is_error=True, error_reason="TOOL_ERROR"),
                )
            )
        finally:
            self.left.set()

    async def RecordDecisions(self, request: Any, context: Any) -> execution_pb2.RecordDecisionsResponse:
        self.asked.append(request)
        return execution_pb2.RecordDecisionsResponse()

    async def RecordResults(self, request: Any, context: Any) -> execution_pb2.RecordResultsResponse:
        self.asked.append(request)
        return execution_pb2.RecordResultsResponse()

    async def CancelExecution(self, request: Any, context: Any) -> execution_pb2.CancelExecutionResponse:
        self.asked.append(request)
        return execution_pb2.CancelExecutionResponse(stopped=True)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def channel(service: FakeService, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer(
        f"unix:{tmp_path}/registry",
        authenticator=OpenAuthenticator(),
        ids=IdSource(SystemClock()),
        metrics=Metrics("test"),
        drain_seconds=0,
    )
    server.add(execution_pb2_grpc.add_ExecutionServiceServicer_to_server, service, service_only=True)
    async with server, open_channel(server.address, batches=True) as channel:
        assert isinstance(channel, grpc.aio.Channel)
        yield channel


@pytest.fixture
def registry(channel: grpc.aio.Channel) -> RegistryClient:
    return RegistryClient(channel)


async def test_tools_have_their_versions_and_fallbacks(registry: RegistryClient, service: FakeService) -> None:
    assert (await registry.resolve(CONTEXT, ["write"], [PinnedTool(name="write", version=2)])).tools == (
        Tool(name="write", version=2, description="Writes.", arguments_schema_json=b"", fallback_tool_name="other"),
    )
    assert (dict(service.asked[0].pinned_versions), service.asked[0].context.run_id) == ({"write": 2}, "r")
    assert list(service.asked[0].context.user_roles) == ["member"]


async def test_run_tools_are_sent_with_their_calls(registry: RegistryClient, service: FakeService) -> None:
    definition = tool_pb2.ToolDefinition(name="show", description="Shows.", arguments_schema_json=b"{}", parallel=True)
    caller = Principal(store_id=StoreId("s"), user_id=UserId("u"), roles=frozenset({"member"}))
    (own,) = await registry.check_own(caller, [definition.SerializeToString()])
    assert (own.name, own.version, own.context) == ("show", 1, ExecutionContext.FRONTEND)
    assert (own.description, own.arguments_schema_json, own.is_own) == ("Shows.", b"{}", True)
    proposed = ProposedCall(
        call_id=CallId("call_1"), tool_name="show", tool_version=1, arguments_json=b"", own_tool=own
    )
    await registry.check(CONTEXT, [proposed], ["show"])
    asked = service.asked[0].context
    assert (asked.store_id, asked.user_id, list(asked.user_roles)) == ("s", "u", ["member"])
    (call,) = service.asked[1].calls
    assert call.own_tool == tool_pb2.OwnTool(definition=definition, definition_sha256="ab" * 32)


async def test_decisions_are_reported_with_their_author(registry: RegistryClient, service: FakeService) -> None:
    note = RecordedDecision(
        call_id=CallId("call_1"),
        tool_name="write",
        tool_version=2,
        kind=DecisionKind.EDIT,
        user_id=UserId("bob"),
        arguments_json=b"{}",
    )
    await registry.record_decisions(CONTEXT, [note])
    (decision,) = service.asked[0].decisions
    assert (decision.kind, decision.user_id, decision.tool_version) == (call_pb2.DECISION_KIND_EDIT, "bob", 2)


async def test_front_end_results_are_reported_by_digest(registry: RegistryClient, service: FakeService) -> None:
    note = RecordedResult(
        call_id=CallId("call_1"),
        tool_name="show",
        tool_version=2,
        user_id=UserId("bob"),
        arguments_json=b"{}",
        content_json=b"[1]",
        state=CallState.EXPIRED,
        duration_seconds=1.5,
    )
    await registry.record_results(CONTEXT, [note])
    assert list(service.asked[0].results) == [
        execution_pb2.RecordedResult(
            call_id="call_1",
            tool_name="show",
            tool_version=2,
            user_id="bob",
            arguments_sha256=hashlib.sha256(b"{}").hexdigest(),
            state=call_pb2.CALL_STATE_EXPIRED,
            result_sha256=hashlib.sha256(b"[1]").hexdigest(),
            result_bytes=3,
            duration_seconds=1.5,
        )
    ]


async def test_execution_returns_its_progress_and_its_result(registry: RegistryClient, service: FakeService) -> None:
    async with aclosing(registry.execute(CONTEXT, EXECUTION)) as pieces:
        progress, result = [piece async for piece in pieces]
    assert progress == Progress(fraction=0.5, message="half")
    assert isinstance(result, ExecutionResult)
    assert (result.outcome, result.result.error_reason) == (Outcome.FAILED, "TOOL_ERROR")
    asked = service.asked[0]
    assert (asked.earlier_attempts, asked.unknowns_resolved, asked.approved_digest) == (1, 3, "d")


async def test_leaving_an_execution_cancels_its_rpc(registry: RegistryClient, service: FakeService) -> None:
    """C11: otherwise the tool would continue after a timeout."""
    endless = Execution(
        call_id=CallId("endless"),
        tool_name="look",
        tool_version=1,
        arguments_json=b"{}",
        earlier_attempts=0,
        unknowns_resolved=0,
        timeout_seconds=600,
        rule_id="",
        approved_digest="",
    )
    async with aclosing(registry.execute(CONTEXT, endless)) as pieces:
        async for _ in pieces:
            break
    await asyncio.wait_for(service.left.wait(), 60)


async def test_registry_validates_answers(channel: grpc.aio.Channel, service: FakeService) -> None:
    checker = RegistryClient(channel)
    await checker.check_answer(StoreId("acme"), b"{}", "5")
    await raises(InvalidArguments, checker.check_answer(StoreId("acme"), b"{}", "bad"), match="it must be a number")
    assert service.asked[-1] == execution_pb2.CheckAnswerRequest(
        store_id="acme", answer_schema_json=b"{}", answer="bad"
    )


async def test_output_schema_is_always_checked(channel: grpc.aio.Channel) -> None:
    checker = RegistryClient(channel)
    found = await checker.check_output(StoreId("acme"), b"{}", "many")
    assert found == OutputChecked(faults=("the answer is not JSON",))
    await raises(InvalidSchema, checker.check_output(StoreId("acme"), b"{}", None), match="it must be an object")


async def test_edit_is_checked_with_its_runs_permissions(channel: grpc.aio.Channel, service: FakeService) -> None:
    options = run_pb2.RunOptions(approvals_required=2)
    whose: dict[str, Any] = {"conversation_id": "c", "user_id": "u", "user_roles": ["member"]}
    run = run_pb2.Run(store_id="s", run_id="r", state=run_pb2.RUN_STATE_WAITING, options=options, **whose)
    waits = call_pb2.CALL_STATE_AWAITING_APPROVAL
    call = call_pb2.Call(run_id="r", call_id="call_1", tool_name="write", tool_version=2, state=waits)
    await RegistryClient(channel).check_edit(ledger_pb2.GetRunResponse(run=run), call, b"{}")

    (request,) = service.asked
    assert request.context == execution_pb2.CallContext(
        store_id="s",
        user_id="u",
        conversation_id="c",
        run_id="r",
        user_roles=["member"],
        approvals_required=2,
        agent_name="default",
    )
    assert [(call.call_id, call.edited) for call in request.calls] == [("call_1", True)]


KEY = "key-of-me-0123456789"


class Endpoint:
    """An agent-loop that can stop and restart at one address."""

    def __init__(self, ledger: PlayedLedger, live: FakeLive, ids: IdSource) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._ledger, self._live, self._ids = ledger, live, ids

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        clock: Any = SystemClock()  # The inbox is polled repeatedly
        clients = client_side(self._ledger, self._live, clock, self._ids)
        async with clients.watches, new_server(clients, self.address, self._ids):
            yield

    def client(self, key: str = KEY, **options: Any) -> AsyncClient:
        return AsyncClient(self.address, api_key=key, environment={}, **options)


@pytest.fixture
def endpoint(ledger: PlayedLedger, live: FakeLive, ids: IdSource) -> Endpoint:
    return Endpoint(ledger, live, ids)


async def test_request_with_a_lost_response_takes_effect_once(endpoint: Endpoint, ledger: PlayedLedger) -> None:
    """I2: the client retries with the same request id."""
    async with endpoint.open(), endpoint.client() as pawl:
        method, lost = pawl.agents.StartRun, 0

        async def lossy(request: agent_pb2.StartRunRequest) -> agent_pb2.StartRunResponse:
            nonlocal lost
            response: agent_pb2.StartRunResponse = await method(request)
            if lost < 3:
                lost += 1
                raise NoAnswer
            return response

        started = await pawl.once(lossy, agent_pb2.StartRunRequest(text="hello"))
    assert (lost, list(ledger.runs)) == (3, [started.run.run_id])


async def test_a_run_continues_the_trace_of_its_caller(endpoint: Endpoint) -> None:
    """Repeated requests need not be in the same trace."""
    first, second = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1)), SpanContext(3, 4, is_remote=True)
    async with endpoint.open(), endpoint.client() as pawl:
        runs = []
        for context in (first, second):
            with use_span(NonRecordingSpan(context)):
                runs.append((await pawl.agents.StartRun(agent_pb2.StartRunRequest(request_id="r", text="hello"))).run)
        garbage = (("traceparent", "garbage"),)
        other = (await pawl.agents.StartRun(agent_pb2.StartRunRequest(text="hello"), metadata=garbage)).run
    expected = f"00-{1:032x}-{2:016x}-01"
    assert {(run.run_id, run.traceparent, run.trace) for run in runs} == {(runs[0].run_id, expected, expected)}
    assert (other.traceparent, other.trace) == ("", "")


# The synchronous client.


async def test_synchronous_client_behaves_like_the_async_one(endpoint: Endpoint, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    await ledger.append(count=3, text="ab")
    await ledger.finish()

    def program() -> tuple[str, int, list[str]]:
        with Client(endpoint.address, api_key=KEY, environment={}) as pawl:
            text = "".join(pawl.text("run_1"))
            events = sum(1 for _ in pawl.watch("run_1"))
            with pytest.raises(RunNotFound):
                pawl.get("run_2")
            with pytest.raises(RunNotFound):
                next(pawl.watch("run_2"))
            pawl.start("hello", request_id="r1")
            pawl.start("hello", request_id="r1")
            return text, events, [run.run_id for run in pawl.runs()]

    async with endpoint.open():
        text, events, runs = await asyncio.to_thread(program)
    assert (text, events, sorted(runs), len(runs)) == ("ababab", 5, sorted(ledger.runs), 2)


async def test_a_closed_client_raises_and_leaves_no_thread(endpoint: Endpoint) -> None:
    pawl = Client(endpoint.address, api_key=KEY, environment={})
    assert "pawl-client" in [thread.name for thread in threading.enumerate()]
    await asyncio.to_thread(pawl.close)
    pawl.close()
    assert "pawl-client" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="the client is closed"):
        pawl.get("run_1")


async def test_followed_conversation_survives_a_restart_of_the_server(endpoint: Endpoint, ledger: PlayedLedger) -> None:
    """ASYNC-5: each message and event is yielded once, also those added while no server was running."""
    await ledger.add_run("run_1")
    seen: list[int] = []
    async with endpoint.client() as pawl, aclosing(pawl.follow("conv_1")) as following:
        for count in (1, 3):
            async with endpoint.open(), asyncio.timeout(60):
                while len(seen) < count:
                    seen += [event.seq for event in (await anext(following)).events]
            await ledger.append(count=2)
    assert seen == [1, 2, 3]
