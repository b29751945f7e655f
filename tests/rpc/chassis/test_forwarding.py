"""Calls that agent-loop forwards: the user they act for, and which services may set that user."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub, add_ConversationServiceServicer_to_server
from pawl.chassis.identity.auth import Principal, for_user, require_user, service_principal, user_principal
from pawl.chassis.ids import IdSource, StoreId, UserId
from pawl.chassis.rpc.client import open_channel, translated
from pawl.errors import ConversationNotFound, MalformedRequest, MethodNotFound, PermissionDenied
from pawl.event.v1 import conversation_pb2
from pawl.server.identity.credentials import ApiKey, KeyAuthenticator, parse_keys
from pawl.server.identity.key_rows import digest_of
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.server import RpcServer
from tests.rpc.chassis.test_limits_and_access import bearer

USER_KEY, AGENT_LOOP_KEY, NOTIFIER_KEY = (f"key-of-{name}-0123456789" for name in ("ann", "agent-loop", "notifier"))
ANN = user_principal(StoreId("acme"), UserId("ann"), frozenset({"member"}))
BOB = user_principal(StoreId("acme"), UserId("bob"), frozenset({"member"}))


class Backend:
    """Returns conversations whose titles name the user of the call."""

    async def GetConversation(self, request: pb.GetConversationRequest, _: object) -> pb.GetConversationResponse:
        if not request.conversation_id:
            raise ConversationNotFound
        user = require_user()
        title = f"{request.conversation_id} of {user.user_id} as {', '.join(user.roles)}"
        return pb.GetConversationResponse(conversation=conversation_pb2.Conversation(title=title))


class Front:
    """Handles imports itself; all other calls are forwarded."""

    async def ImportConversation(self, request: Any, _: object) -> pb.ImportConversationResponse:
        return pb.ImportConversationResponse(conversation=conversation_pb2.Conversation(title="imported"))


UNREADABLE = (
    b'{"store_id":"../a","user_id":"a b"}',
    b'{"store_id":"\xff","user_id":"ann"}',
    b'{"store_id":' + b"[" * 5000,
)


def new_server(address: str, ids: IdSource) -> RpcServer:
    keys = parse_keys(msgspec.json.encode([ApiKey(key=USER_KEY, store_id="acme", user_id="ann", roles=["member"])]))
    services = {
        digest_of(key): service_principal(name)
        for key, name in ((AGENT_LOOP_KEY, "agent-loop"), (NOTIFIER_KEY, "notifier"))
    }
    known = KeyAuthenticator(keys=lambda: keys, services=lambda: services, local_key=None)
    return RpcServer(address, authenticator=known, ids=ids, metrics=Metrics("test"), drain_seconds=0.2)


@pytest.fixture
async def backend(tmp_path: Path, ids: IdSource) -> AsyncIterator[grpc.aio.Channel]:
    server = new_server(f"unix:{tmp_path}/behind", ids)
    server.add_forwarded(add_ConversationServiceServicer_to_server, Backend())
    async with server, open_channel(server.address, service_key=AGENT_LOOP_KEY, batches=True) as channel:
        yield channel


async def test_a_forwarded_call_acts_for_the_user_but_users_cannot_name_a_caller(
    backend: grpc.aio.Channel, tmp_path: Path, ids: IdSource
) -> None:
    async def forward(method: str, request: bytes) -> bytes:
        call: Any = backend.unary_unary(method)
        response: bytes = await translated(call(request, metadata=for_user(require_user())))
        return response

    server = new_server(f"unix:{tmp_path}/front", ids)
    server.add_forwarding(add_ConversationServiceServicer_to_server, Front(), forward)
    async with server, open_channel(server.address) as channel:
        stub: Any = ConversationServiceStub(channel)
        mine = bearer(USER_KEY)
        found = await stub.GetConversation(pb.GetConversationRequest(conversation_id="c1"), metadata=mine)
        assert found.conversation.title == "c1 of ann as member"
        made = await stub.ImportConversation(pb.ImportConversationRequest(), metadata=mine)
        assert made.conversation.title == "imported"
        raw: Any = channel.unary_unary("/pawl.agent.v1.ConversationService/GetConversation")
        rows: list[tuple[Any, Any, type[Exception]]] = [
            (stub.GetConversation, pb.GetConversationRequest(), ConversationNotFound),
            (stub.ForkConversation, pb.ForkConversationRequest(), MethodNotFound),
            (raw, b"\xff", MalformedRequest),
        ]
        for method, request, error in rows:
            with pytest.raises(error):
                await translated(method(request, metadata=mine))
        for method, request, _ in rows:
            with pytest.raises(PermissionDenied):
                await translated(method(request, metadata=(*mine, *for_user(BOB))))


async def test_only_agent_loop_may_name_a_user_and_it_must(backend: grpc.aio.Channel, tmp_path: Path) -> None:
    """I13: all other combinations are rejected."""
    request = pb.GetConversationRequest(conversation_id="c1")
    named = for_user(ANN)
    garbage = ((named[0][0], b"{}"),)
    async with open_channel(f"unix:{tmp_path}/behind") as channel:
        stub: Any = ConversationServiceStub(channel)
        found = await stub.GetConversation(request, metadata=(*bearer(AGENT_LOOP_KEY), *named))
        assert found.conversation.title == "c1 of ann as member"
        for key, also in (
            (AGENT_LOOP_KEY, ()),
            (AGENT_LOOP_KEY, garbage),
            (AGENT_LOOP_KEY, (*named, *named)),
            (AGENT_LOOP_KEY, for_user(service_principal("agent-loop"))),
            (AGENT_LOOP_KEY, for_user(Principal(store_id=StoreId("acme")))),
            (NOTIFIER_KEY, ()),
            (NOTIFIER_KEY, named),
            (USER_KEY, ()),
            (USER_KEY, named),
            *((key, ((named[0][0], bad),)) for key in (AGENT_LOOP_KEY, USER_KEY) for bad in UNREADABLE),
        ):
            with pytest.raises(PermissionDenied):
                await translated(stub.GetConversation(request, metadata=(*bearer(key), *also)))
