"""I13: what others of a store, and of another one, may do with a conversation that is shared: every method is asked."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.chassis.status import from_rpc_error
from pawl.event.v1 import call_pb2, conversation_pb2, run_pb2
from pawl.identity.v1 import key_pb2
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.launcher.suite import Suite
from tests.keys import keyed_channel
from tests.poll import until
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "what is 4711 * 17 then ask me which ostrich"
# Of methods that name a conversation, a run or a call: what else they need to get as far as that.
REST: dict[str, dict[str, Any]] = {
    "StartRun": {"text": "mine now"},
    "SendMessage": {"text": "mine now"},
    "LeaseCall": {"client_id": "window"},
    "SubmitToolResults": {"results": [types_pb2.ToolResult(call_id="CALL", content_json=b"1")]},
    "Decide": {"decision": types_pb2.CallDecision(call_id="CALL", kind=call_pb2.DECISION_KIND_ANSWER, answer="x")},
    "ResolveCall": {"resolution": agent_pb2.RESOLUTION_TELL_MODEL},
    "TopUpRun": {"tokens": 5},
    "UpdateConversation": {"title": "mine now"},
}
# Those that name none of others, and answer with the caller's own only.
OF_THE_CALLER = {"WhoAmI", "ListPending", "WatchPending", "ListConversations", "ImportConversation", "DecideCalls"}
# A stream, whose frames have receipts: asked apart.
APART = {"Session"}
# A list of the caller's own runs, which has none of others.
NOTHING = {"ListRuns": "OK"}
READS = NOTHING | {"GetConversation": "OK", "ListMessages": "OK"}
NOT_THERE = {"CONVERSATION_NOT_FOUND", "RUN_NOT_FOUND", "CALL_NOT_FOUND"}


def methods() -> dict[str, Any]:
    services = (agent_pb2.DESCRIPTOR, pb.DESCRIPTOR)
    return {
        method.name: method
        for file in services
        for service in file.services_by_name.values()
        for method in service.methods
        if method.name not in OF_THE_CALLER | APART
    }


async def ask(agent: Agent, method: Any, named: dict[str, str]) -> str:
    """Ask a method about what is named; returns the reason of its refusal, or OK."""
    fields = {name: value for name, value in named.items() if name in method.input_type.fields_by_name}
    rest = {name: _named(value, named) for name, value in REST.get(method.name, {}).items()}
    request = method.input_type._concrete_class(**fields, **rest)
    path = f"/{method.containing_service.full_name}/{method.name}"
    call: Any = agent.channel.unary_stream(path)(request.SerializeToString(), metadata=agent.metadata, timeout=60)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    finally:
        call.cancel()
    return "OK"


def _named(value: Any, named: dict[str, str]) -> Any:
    """Return a part of a request about the call."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, types_pb2.ToolResult | types_pb2.CallDecision):
            each.call_id = named["call_id"]
            if isinstance(each, types_pb2.ToolResult):
                each.run_id = named["run_id"]
    return value


async def answers(agent: Agent, named: dict[str, str]) -> dict[str, str]:
    return {name: await ask(agent, method, named) for name, method in methods().items()}


def allowed(found: dict[str, str]) -> dict[str, str]:
    """Return what was not refused as what is not there, or is for operators."""
    return {name: reason for name, reason in found.items() if reason not in {*NOT_THERE, "PERMISSION_DENIED"}}


async def member_key(suite: Suite, agent: Agent, user_id: str) -> str:
    """A key of somebody who governs nothing."""
    async with keyed_channel(suite.endpoints.services["job-store"][0].grpc) as channel:
        key = key_pb2.Key(name=user_id, user_id=user_id, roles=["member"])
        made = await KeyServiceStub(channel).CreateKey(key_pb2.CreateKeyRequest(key=key), metadata=agent.metadata)
    return made.secret


async def share(agent: Agent, conversation_id: str, **fields: Any) -> conversation_pb2.Conversation:
    request = pb.UpdateConversationRequest(conversation_id=conversation_id, **fields)
    answer = await ConversationServiceStub(agent.channel).UpdateConversation(request, metadata=agent.metadata)
    return answer.conversation


async def listed(agent: Agent, **fields: Any) -> list[conversation_pb2.Conversation]:
    request = pb.ListConversationsRequest(page_size=200, **fields)
    answer = await ConversationServiceStub(agent.channel).ListConversations(request, metadata=agent.metadata)
    return list(answer.conversations)


async def said(agent: Agent, conversation_id: str) -> list[Any]:
    request = agent_pb2.ListMessagesRequest(conversation_id=conversation_id)
    return list((await agent.stub.ListMessages(request, metadata=agent.metadata)).messages)


async def test_others_read_what_is_shared_and_nothing_else(suite: Suite, agent: Agent) -> None:
    run = await agent.start(TEXT)
    question = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    named = {"conversation_id": run.conversation_id, "run_id": run.run_id, "call_id": question.call_id}
    address = suite.endpoints.services["agent-loop"][1].grpc
    key = await member_key(suite, agent, "rita")
    async with Agent(address, user="", key=key) as reader, Agent(address, user="me", store="elsewhere") as stranger:
        # Nobody but its user sees anything of a private one.
        for other in (reader, stranger):
            found = await answers(other, named)
            assert allowed(found) == NOTHING
            assert await listed(other, shared=True) == []

        shared = await share(agent, run.conversation_id, sharing=conversation_pb2.SHARING_READ)
        assert (shared.sharing, shared.active_run_id) == (conversation_pb2.SHARING_READ, run.run_id)
        found = await answers(reader, named)
        assert allowed(found) == READS
        found = await answers(stranger, named)
        assert allowed(found) == NOTHING
        assert await listed(stranger, shared=True) == await listed(agent, shared=True) == []
        (seen,) = [each for each in await listed(reader, shared=True) if each.conversation_id == run.conversation_id]
        assert (seen.user_id, seen.active_run_id, seen.title) == ("me", "", TEXT)
        assert run.conversation_id not in [each.conversation_id for each in await listed(reader)]

        async def is_found() -> bool:
            return [each.conversation_id for each in await listed(reader, shared=True, query="4711 ostr")] == [
                run.conversation_id
            ]

        await until(is_found)
        assert await listed(reader, query="4711 ostr") == []
        mine, theirs = await said(agent, run.conversation_id), await said(reader, run.conversation_id)
        assert [message.text for message in theirs] == [message.text for message in mine]
        assert any(message.reasoning for message in mine)
        assert not any(message.reasoning or message.provider_state_json for message in theirs)
        runs = agent_pb2.ListRunsRequest(conversation_id=run.conversation_id)
        assert not (await reader.stub.ListRuns(runs, metadata=reader.metadata)).runs
        await check_session(reader, named)

        await share(agent, run.conversation_id, shows_arguments=True)
        found = await answers(reader, named)
        assert allowed(found) == READS | {"ListCalls": "OK"}
        (calculated, *_) = await reader.calls(run.run_id)
        assert (calculated.tool_name, calculated.result.content_json) != ("", b"")
        await check_session(reader, named)

        await share(agent, run.conversation_id, sharing=conversation_pb2.SHARING_PRIVATE)
        found = await answers(reader, named)
        assert allowed(found) == NOTHING
        assert await listed(reader, shared=True) == []
        assert await listed(reader, shared=True, query="4711") == []
    # None of it has done anything.
    assert (await agent.get(run.run_id)).state == run_pb2.RUN_STATE_WAITING
    assert len(await said(agent, run.conversation_id)) == len(mine)
    await agent.cancel(run.run_id)


async def check_session(reader: Agent, named: dict[str, str]) -> None:
    """Each frame about a run of another user is refused, as one about none."""
    run_id, call_id = named["run_id"], named["call_id"]
    decision = types_pb2.CallDecision(run_id=run_id, call_id=call_id, kind=call_pb2.DECISION_KIND_ANSWER, answer="x")
    frames: dict[str, Any] = {
        "start": session_pb2.Start(conversation_id=named["conversation_id"], text="mine now"),
        "message": session_pb2.UserMessage(conversation_id=named["conversation_id"], text="mine now"),
        "attach": session_pb2.Attach(run_id=run_id),
        "tool_result": types_pb2.ToolResult(run_id=run_id, call_id=call_id, content_json=b"1", offer_epoch=1),
        "decision": decision,
        "cancel": session_pb2.Cancel(run_id=run_id),
    }
    async with reader.session() as session:
        for name, frame in frames.items():
            receipt = await session.receipt(**{name: frame})
            assert receipt.reason in NOT_THERE, name


async def test_who_may_list_calls_reads_nothing_that_people_have_answered_or_given_as_a_reason(
    suite: Suite, agent: Agent
) -> None:
    asked = await agent.start("what is 4 * 4 then ask me which colour")
    question = await agent.until_pending(asked.run_id, call_pb2.CALL_STATE_ASKED)
    await agent.decide(question, call_pb2.DECISION_KIND_ANSWER, answer="heliotrope")
    await agent.until_ended(asked.run_id)
    gated = await agent.start("e-mail ann@example.com about lunch: at noon", conversation_id=asked.conversation_id)
    mail = await agent.until_pending(gated.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    await agent.decide(mail, call_pb2.DECISION_KIND_REJECT, reason="heliotrope")
    await agent.until_ended(gated.run_id)
    stands_in = await agent.start("e-mail ann@example.com about tea: at five", conversation_id=asked.conversation_id)
    mail = await agent.until_pending(stands_in.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    await agent.decide(mail, call_pb2.DECISION_KIND_ANSWER, answer="heliotrope")
    await agent.until_ended(stands_in.run_id)
    await share(agent, asked.conversation_id, sharing=conversation_pb2.SHARING_READ, shows_arguments=True)
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc, user="rita") as reader:
        for run in (asked, gated, stands_in):
            own, shown = await agent.calls(run.run_id), await reader.calls(run.run_id)
            assert any(b"heliotrope" in call.SerializeToString() for call in own)
            assert not any(b"heliotrope" in call.SerializeToString() for call in shown)
            assert [call.tool_name for call in shown] == [call.tool_name for call in own]
        (calculated, _) = await reader.calls(asked.run_id)
        assert b"16" in calculated.result.content_json


async def test_what_sharing_cannot_mean_is_refused(agent: Agent) -> None:
    run = await agent.start("what is 1 + 2")
    await agent.until_ended(run.run_id)
    stub = ConversationServiceStub(agent.channel)
    for sharing in (conversation_pb2.SHARING_UNSPECIFIED, conversation_pb2.Sharing.ValueType(99)):
        request = pb.UpdateConversationRequest(conversation_id=run.conversation_id, sharing=sharing)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.UpdateConversation(request, metadata=agent.metadata)
        assert from_rpc_error(refused.value).reason == "INVALID_FIELD"


async def refusal(agent: Agent, conversation_id: str, policy: types_pb2.MessagePolicy.ValueType) -> str:
    """The reason for which a message is refused, or OK."""
    request = agent_pb2.SendMessageRequest(conversation_id=conversation_id, text="and now this", policy=policy)
    try:
        await agent.stub.SendMessage(request, metadata=agent.metadata)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return "OK"


async def pending(agent: Agent) -> set[str]:
    request = agent_pb2.ListPendingRequest(page_size=200)
    return {call.call_id for call in (await agent.stub.ListPending(request, metadata=agent.metadata)).calls}


async def test_writers_begin_runs_of_their_own_and_touch_none_of_others(suite: Suite, agent: Agent) -> None:
    address = suite.endpoints.services["agent-loop"][1].grpc
    keys = [await member_key(suite, agent, user_id) for user_id in ("olga", "wanda")]
    async with Agent(address, user="", key=keys[0]) as owner, Agent(address, user="", key=keys[1]) as writer:
        mine = await owner.start(TEXT)
        question = await owner.until_pending(mine.run_id, call_pb2.CALL_STATE_ASKED)
        named = {"conversation_id": mine.conversation_id, "run_id": mine.run_id, "call_id": question.call_id}
        await share(owner, mine.conversation_id, sharing=conversation_pb2.SHARING_WRITE)
        async with Agent(address, user="olga", store="elsewhere") as stranger:
            assert allowed(await answers(stranger, named)) == NOTHING
        found = await answers(writer, named)
        assert allowed(found) == READS | {"StartRun": "OK", "SendMessage": "OK"}
        on_the_active = (types_pb2.MESSAGE_POLICY_STEER, types_pb2.MESSAGE_POLICY_INTERRUPT)
        for policy in on_the_active:
            assert await refusal(writer, mine.conversation_id, policy) == "RUN_OF_ANOTHER_USER"
        theirs = await writer.start("ask me which colour", conversation_id=mine.conversation_id)
        assert (theirs.user_id, list(theirs.user_roles), theirs.queue_position) == ("wanda", ["member"], 3)

        # What the writer has done to the owner's run is nothing; then it is the writers' turn.
        await owner.decide(question, call_pb2.DECISION_KIND_ANSWER, answer="the large one")
        assert (await owner.until_ended(mine.run_id)).state == run_pb2.RUN_STATE_COMPLETED
        asked = await writer.until_pending(theirs.run_id, call_pb2.CALL_STATE_ASKED)
        assert await pending(writer) == {asked.call_id}
        assert asked.call_id not in await pending(owner)
        for policy in on_the_active:
            assert await refusal(owner, mine.conversation_id, policy) == "RUN_OF_ANOTHER_USER"
        of_theirs = {"run_id": theirs.run_id, "call_id": asked.call_id}
        for name, method in methods().items():
            if "run_id" in method.input_type.fields_by_name:
                assert await ask(owner, method, of_theirs) in {*NOT_THERE, "PERMISSION_DENIED"}, name
        await writer.decide(asked, call_pb2.DECISION_KIND_ANSWER, answer="blue")
        await writer.until_ended(theirs.run_id)
        said_by = [(message.user_id, message.text) for message in await said(owner, mine.conversation_id)]
        assert [text for user, text in said_by if user == "wanda" and text in {"mine now", "ask me which colour"}] == [
            "mine now",
            "mine now",
            "ask me which colour",
        ]
        assert {user for user, _ in said_by} == {"olga", "wanda"}
        assert not any(
            message.reasoning for message in await said(owner, mine.conversation_id) if message.user_id == "wanda"
        )

        active, waiting = [await writer.start("ask me which hat", conversation_id=mine.conversation_id) for _ in "12"]
        await writer.until_pending(active.run_id, call_pb2.CALL_STATE_ASKED)
        await share(owner, mine.conversation_id, sharing=conversation_pb2.SHARING_READ)
        for run in (active, waiting):
            assert (await writer.until_ended(run.run_id)).state == run_pb2.RUN_STATE_CANCELLED
        assert allowed(await answers(writer, named)) == READS


async def test_what_writers_did_is_erased_with_the_conversation(suite: Suite, agent: Agent) -> None:
    mine = await agent.start("what is 3 + 4")
    await agent.until_ended(mine.run_id)
    await share(agent, mine.conversation_id, sharing=conversation_pb2.SHARING_WRITE)
    async with Agent(suite.endpoints.services["agent-loop"][1].grpc, user="wanda") as writer:
        done = await writer.start("what is 5 * 5", conversation_id=mine.conversation_id)
        await writer.until_ended(done.run_id)
        open_run = await writer.start("ask me which colour", conversation_id=mine.conversation_id)
        await writer.until_pending(open_run.run_id, call_pb2.CALL_STATE_ASKED)
        erase = pb.EraseConversationRequest(conversation_id=mine.conversation_id)
        service = ConversationServiceStub(agent.channel)

        async def is_erased() -> bool:
            answer = await service.EraseConversation(erase, metadata=agent.metadata)
            return {"runs", "ledger"}.isdisjoint(answer.erasure.waits_for)

        await until(is_erased)
        for run in (done, open_run):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await writer.get(run.run_id)
            assert from_rpc_error(refused.value).reason == "RUN_NOT_FOUND"
        assert await refusal(writer, mine.conversation_id, types_pb2.MESSAGE_POLICY_QUEUE) == "CONVERSATION_NOT_FOUND"
