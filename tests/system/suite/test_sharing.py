"""I13: how other users of the store, and users of another store, can access a shared conversation with each method."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.event.v1 import call_pb2, conversation_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.system.suite.client import Agent, addresses, key_for, outcome

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "what is 4711 * 17 then ask me which ostrich"
ANSWER = call_pb2.DECISION_KIND_ANSWER
# Further fields that methods need before they look up a conversation, run or call.
REST: dict[str, dict[str, Any]] = {
    "StartRun": {"text": "mine now"},
    "SendMessage": {"text": "mine now"},
    "LeaseCall": {"client_id": "window"},
    "SubmitToolResults": {"results": [types_pb2.ToolResult(call_id="CALL", content_json=b"1")]},
    "Decide": {"decision": types_pb2.CallDecision(call_id="CALL", kind=ANSWER, answer="x")},
    "ResolveCall": {"resolution": agent_pb2.RESOLUTION_TELL_MODEL},
    "TopUpRun": {"tokens": 5},
    "GetRound": {"round": 1},
    "UpdateConversation": {"title": "mine now"},
}
# Methods that name no objects and return only the caller's own, and a stream whose frames are tested
# separately.
OF_THE_CALLER = {
    *("WhoAmI", "ListPending", "WatchPending", "ListConversations", "ImportConversation", "DecideCalls", "Session")
}
METHODS = {
    method.name: method
    for file in (agent_pb2.DESCRIPTOR, pb.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
    if method.name not in OF_THE_CALLER
}
# A list of the caller's own runs.
NOTHING = {"ListRuns"}
READS = NOTHING | {"GetConversation", "ListMessages", "WatchConversation", "ExportConversation"}
ABSENT_CLIENT = {"CONVERSATION_NOT_FOUND", "RUN_NOT_FOUND", "CALL_NOT_FOUND"}


async def ask(agent: Agent, name: str, named: dict[str, str]) -> str:
    method, rest = METHODS[name], REST.get(name, {})
    fields = {name: value for name, value in named.items() if name in method.input_type.fields_by_name}
    for value in rest.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, types_pb2.ToolResult | types_pb2.CallDecision):
                each.run_id, each.call_id = named["run_id"], named["call_id"]
    request = GetMessageClass(method.input_type)(**fields, **rest)
    behaviour: Any = agent.channel.unary_stream(f"/{method.containing_service.full_name}/{name}")
    call = behaviour(request.SerializeToString(), metadata=agent.metadata, timeout=60)
    try:
        return (await outcome(call.read())).reason
    finally:
        call.cancel()


async def allowed(agent: Agent, named: dict[str, str]) -> set[str]:
    """Return the methods that succeed. Any other method must fail as not found or without permission."""
    found = {name: await ask(agent, name, named) for name in METHODS}
    assert set(found.values()) <= {"", "PERMISSION_DENIED", *ABSENT_CLIENT}, found
    return {name for name, reason in found.items() if not reason}


async def share(agent: Agent, conversation_id: str, **fields: Any) -> None:
    request = pb.UpdateConversationRequest(conversation_id=conversation_id, **fields)
    await ConversationServiceStub(agent.channel).UpdateConversation(request, metadata=agent.metadata)


async def shared(agent: Agent, **fields: Any) -> list[str]:
    request = pb.ListConversationsRequest(page_size=200, shared=True, **fields)
    answer = await ConversationServiceStub(agent.channel).ListConversations(request, metadata=agent.metadata)
    return [each.conversation_id for each in answer.conversations]


async def check_session(reader: Agent, named: dict[str, str]) -> None:
    """Check that each frame about another user's run is refused like a frame about an unknown run."""
    conversation_id, run_id, call_id = named.values()
    frames: dict[str, Any] = {
        "start": session_pb2.Start(conversation_id=conversation_id, text="mine now"),
        "message": session_pb2.UserMessage(conversation_id=conversation_id, text="mine now"),
        "attach": session_pb2.Attach(run_id=run_id),
        "tool_result": types_pb2.ToolResult(run_id=run_id, call_id=call_id, content_json=b"1", offer_epoch=1),
        "decision": types_pb2.CallDecision(run_id=run_id, call_id=call_id, kind=ANSWER, answer="x"),
        "cancel": session_pb2.Cancel(run_id=run_id),
    }
    async with reader.session() as session:
        for name, frame in frames.items():
            assert (await session.receipt(**{name: frame})).reason in ABSENT_CLIENT, name


async def test_other_users_access_only_what_is_shared(suite: Suite, agent: Agent) -> None:
    """I13: the frames of sessions are refused too."""
    run = await agent.start(TEXT)
    question = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    named = {"conversation_id": run.conversation_id, "run_id": run.run_id, "call_id": question.call_id}
    key = await key_for(suite, "rita", "member")
    address = addresses(suite)[1]
    async with Agent(address, user="", key=key) as reader, Agent(address, user="me", store="elsewhere") as other_user:
        for other in (reader, other_user):
            assert (await allowed(other, named), await shared(other)) == (NOTHING, [])

        await share(agent, run.conversation_id, sharing=conversation_pb2.SHARING_READ)
        assert await allowed(reader, named) == READS
        assert (await allowed(other_user, named), await shared(other_user)) == (NOTHING, [])
        assert await shared(reader) == [run.conversation_id]

        await check_session(reader, named)

        await share(agent, run.conversation_id, shows_arguments=True)
        assert await allowed(reader, named) == READS | {"ListCalls"}
        await check_session(reader, named)

        await share(agent, run.conversation_id, sharing=conversation_pb2.SHARING_PRIVATE)
        assert (await allowed(reader, named), await shared(reader)) == (NOTHING, [])

        await share(agent, run.conversation_id, sharing=conversation_pb2.SHARING_READ)
        assert (await agent.get(run.run_id)).state == run_pb2.RUN_STATE_WAITING

        await share(agent, run.conversation_id, sharing=conversation_pb2.SHARING_WRITE)
        assert await allowed(other_user, named) == NOTHING
        assert await allowed(reader, named) == READS | {"ListCalls", "StartRun", "SendMessage"}
