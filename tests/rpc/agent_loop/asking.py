"""Clients of an agent-loop: short requests, a check of refusals, and a Session stream controlled frame by frame."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from pawl.agent.v1 import agent_pb2, agents_pb2, conversation_pb2, jobs_pb2, session_pb2, types_pb2
from pawl.client.history import history
from pawl.errors import PawlError
from pawl.event.v1 import agent_pb2 as agent_values
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.tool.v1 import tool_pb2
from tests.rpc.agent_loop.conftest import ME
from tests.rpc.refusals import raises
from tests.rpc.stubs import AgentServiceAsyncStub

Row: TypeAlias = tuple[Any, str] | tuple[Any, str, str]
Api: TypeAlias = Callable[..., Any]
MISSING = "no-such"
NO_ID = "no spaces"
CONTROL = "bell\a"
DIGEST = "digest of call_1"
HISTORY = history([{"role": "user", "content": "How warm is it?"}, {"role": "assistant", "content": "12 degrees"}])
APPROVE, EDIT = call_pb2.DECISION_KIND_APPROVE, call_pb2.DECISION_KIND_EDIT
REJECT, ANSWER = call_pb2.DECISION_KIND_REJECT, call_pb2.DECISION_KIND_ANSWER


async def check_refusals(api: Api, rows: list[Row], metadata: Any = ME) -> None:
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


def decide(
    call_id: str = "call_1", run_id: str = "run_1", request_id: str = "", **fields: Any
) -> agent_pb2.DecideRequest:
    decision = types_pb2.CallDecision(**{"call_id": call_id, "digest": DIGEST, **fields})
    return agent_pb2.DecideRequest(request_id=request_id, run_id=run_id, decision=decision)


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


def job(**fields: Any) -> jobs_pb2.StartJobRequest:
    return jobs_pb2.StartJobRequest(**{"tool_name": "probe"} | fields)


def series(**fields: Any) -> jobs_pb2.StartJobRequest:
    return job(**{"interval_seconds": 60, "iterations_max": 5} | fields)


def condition(**fields: Any) -> run_pb2.JobCondition:
    return run_pb2.JobCondition(**fields)


def agent(name: str = "clerk", tools: tuple[str, ...] = (), **fields: Any) -> agent_values.AgentDefinition:
    return agent_values.AgentDefinition(name=name, tools=agent_values.ToolSelection(names=tools), **fields)


def save(*args: Any, **fields: Any) -> agents_pb2.UpdateAgentRequest:
    return agents_pb2.UpdateAgentRequest(definition=agent(*args, **fields))


def draft(*args: Any, **fields: Any) -> agents_pb2.UpdateDraftRequest:
    return agents_pb2.UpdateDraftRequest(definition=agent(*args, **fields))


async def failure(call: Awaitable[Any]) -> PawlError:
    return await raises(PawlError, call)


async def reason(call: Awaitable[Any]) -> str:
    return (await failure(call)).reason


ACCEPTED, REFUSED = types_pb2.RECEIPT_STATUS_ACCEPTED, types_pb2.RECEIPT_STATUS_REFUSED


class Client:
    """One stream. Its frames get the ids f1, f2, and so on; responses that arrive early are kept for later."""

    def __init__(self, stub: AgentServiceAsyncStub, *, metadata: Any = ME) -> None:
        self.stream: Any = stub.Session(metadata=metadata)
        self._numbers = itertools.count(1)
        self._kept: list[session_pb2.SessionResponse] = []

    async def hello(self, client_id: str = "cli_a", *tools: str, calls_max: int = 1, versions: Any = ()) -> str:
        hello = session_pb2.Hello(
            client_id=client_id,
            calls_max=calls_max,
            tools=[session_pb2.ClientTool(name=name, versions=versions) for name in tools],
        )
        frame_id = await self.send(hello=hello)
        welcome = (await self.next("welcome")).welcome
        assert (await self.receipt(frame_id)).status == ACCEPTED
        return str(welcome.client_id)

    async def send(self, frame_id: str = "", **frame: Any) -> str:
        frame_id = frame_id or f"f{next(self._numbers)}"
        await self.stream.write(session_pb2.SessionRequest(frame_id=frame_id, **frame))
        return frame_id

    async def ask(self, frame_id: str = "", **frame: Any) -> types_pb2.Receipt:
        return await self.receipt(await self.send(frame_id, **frame))

    async def attach(self, run_id: str = "run_1", after_seq: int = 0) -> types_pb2.Receipt:
        return await self.ask(attach=session_pb2.Attach(run_id=run_id, after_seq=after_seq))

    async def receipt(self, frame_id: str) -> types_pb2.Receipt:
        while True:
            response = await self.next("receipt")
            if response.receipt.frame_id == frame_id:
                return response.receipt

    async def next(self, *kinds: str) -> session_pb2.SessionResponse:
        for position, kept in enumerate(self._kept):
            if kept.WhichOneof("frame") in kinds:
                return self._kept.pop(position)
        while True:
            response = await self.stream.read()
            assert isinstance(response, session_pb2.SessionResponse), "the stream has ended"
            if response.WhichOneof("frame") in kinds:
                return response
            self._kept.append(response)

    async def events(self, count: int, run_id: str = "run_1") -> list[int]:
        seqs: list[int] = []
        while len(seqs) < count:
            event = (await self.next("event")).event
            if event.run_id == run_id:
                seqs.append(event.seq)
        return seqs

    async def offer(self) -> session_pb2.Offer:
        return (await self.next("offer")).offer

    async def heartbeat(self) -> None:
        await self.stream.write(session_pb2.SessionRequest(heartbeat=session_pb2.ClientHeartbeat()))

    async def answer(self, offer: session_pb2.Offer, content: bytes = b'"done"') -> types_pb2.Receipt:
        result = types_pb2.ToolResult(
            run_id=offer.call.run_id,
            call_id=offer.call.call_id,
            content_json=content,
            offer_epoch=offer.offer_epoch,
        )
        return await self.ask(tool_result=result)

    async def end(self) -> None:
        """Read to the end of the stream, and raise the error if it ended with one."""
        while isinstance(await self.stream.read(), session_pb2.SessionResponse):
            pass

    def leave(self) -> None:
        self.stream.cancel()


async def connected(stub: AgentServiceAsyncStub, *hello: str, metadata: Any = ME, **more: Any) -> Client:
    client = Client(stub, metadata=metadata)
    await client.hello(*hello, **more)
    return client
