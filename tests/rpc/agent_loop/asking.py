"""Short forms of client requests, and a check of how they are rejected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import pytest

from pawl.agent.v1 import (
    agent_pb2,
    agents_pb2,
    conversation_pb2,
    jobs_pb2,
    types_pb2,
)
from pawl.chassis.rpc.status import from_rpc_error
from pawl.client.history import history
from pawl.errors import PawlError
from pawl.event.v1 import agent_pb2 as agent_values
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.tool.v1 import tool_pb2
from tests.rpc.agent_loop.conftest import ME

Row: TypeAlias = tuple[Any, str] | tuple[Any, str, str]
Api: TypeAlias = Callable[..., Any]
MISSING = "no-such"
NO_ID = "no spaces"
CONTROL = "bell\a"
DIGEST = "digest of call_1"
HISTORY = history([{"role": "user", "content": "How warm is it?"}, {"role": "assistant", "content": "12 degrees"}])
APPROVE = call_pb2.DECISION_KIND_APPROVE
EDIT = call_pb2.DECISION_KIND_EDIT
REJECT = call_pb2.DECISION_KIND_REJECT
ANSWER = call_pb2.DECISION_KIND_ANSWER


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
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is not grpc.StatusCode.UNKNOWN
    return from_rpc_error(caught.value)


async def reason(call: Awaitable[Any]) -> str:
    return (await failure(call)).reason
