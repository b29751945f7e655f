"""Calls that agent-loop forwards and streaming calls that the gateway relays, each with its own user."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub, add_ConversationServiceServicer_to_server
from pawl.chassis.identity.auth import Principal, for_user, require_user, service_principal, user_principal
from pawl.chassis.ids import IdSource, StoreId, UserId
from pawl.chassis.rpc.client import open_channel, translated
from pawl.errors import (
    ConversationNotFound,
    DependencyUnavailable,
    MalformedRequest,
    MethodNotFound,
    Overloaded,
    PermissionDenied,
    RunNotFound,
    ShuttingDown,
    Unauthenticated,
)
from pawl.event.v1 import conversation_pb2
from pawl.server.identity.credentials import ApiKey, KeyAuthenticator, parse_keys
from pawl.server.identity.key_rows import digest_of
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.server import RpcServer
from tests.poll import until
from tests.rpc.chassis.echo import EchoServicer, EchoStub, Serve
from tests.rpc.chassis.test_limits_and_access import ANN, BOB, GATEWAY, Known, bearer
from tests.rpc.refusals import raises

USER_KEY, AGENT_LOOP_KEY, NOTIFIER_KEY = (f"key-of-{name}-0123456789" for name in ("ann", "agent-loop", "notifier"))
AS_ANN = user_principal(StoreId("acme"), UserId("ann"), frozenset({"member"}))
AS_BOB = user_principal(StoreId("acme"), UserId("bob"), frozenset({"member"}))


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
            await raises(error, method(request, metadata=mine))
        await raises(
            PermissionDenied, *(method(request, metadata=(*mine, *for_user(AS_BOB))) for method, request, _ in rows)
        )


async def test_only_agent_loop_may_name_a_user_and_it_must(backend: grpc.aio.Channel, tmp_path: Path) -> None:
    """I13: all other combinations are rejected."""
    request = pb.GetConversationRequest(conversation_id="c1")
    named = for_user(AS_ANN)
    garbage = ((named[0][0], b"{}"),)
    async with open_channel(f"unix:{tmp_path}/behind") as channel:
        stub: Any = ConversationServiceStub(channel)
        found = await stub.GetConversation(request, metadata=(*bearer(AGENT_LOOP_KEY), *named))
        assert found.conversation.title == "c1 of ann as member"
        await raises(
            PermissionDenied,
            *(
                stub.GetConversation(request, metadata=(*bearer(key), *also))
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
                )
            ),
        )


@asynccontextmanager
async def relaying(
    serving: AbstractAsyncContextManager[RpcServer], key: str = GATEWAY
) -> AsyncIterator[tuple[EchoStub, RpcServer]]:
    async with serving as server, open_channel(server.address, relay_key=lambda: key) as channel:
        yield EchoStub(channel), server


async def test_relayed_calls_share_a_stream_but_each_has_its_own_caller(serve: Serve) -> None:
    async with relaying(serve(authenticator=Known())) as (stub, server):
        for key, name in ((ANN, "ann"), (BOB, "bob")):
            for kind in ("generate", "write"):
                assert await stub.call(kind, "who", metadata=bearer(key)) == ["first", f"user/acme/{name}"]
        assert len(server._batches._streams) == 1


async def test_relayed_call_fails_like_a_direct_call(serve: Serve) -> None:
    async with relaying(serve(authenticator=Known(), streams_max=3)) as (stub, _):
        for text, metadata, error in [
            ("who", (("pawl-user", "ann"),), Unauthenticated),
            ("who", bearer("another-key-0123456789"), Unauthenticated),
            ("who", (*bearer(ANN), *bearer(BOB)), Unauthenticated),
            ("who", (*bearer(ANN), ("pawl-user", "bob")), PermissionDenied),
            ("not-found", bearer(ANN), RunNotFound),
        ]:
            await raises(error, stub.call("generate", text, metadata=metadata))


async def test_relayed_calls_count_towards_the_limits_of_their_users(serve: Serve, servicer: EchoServicer) -> None:
    async with relaying(serve(authenticator=Known(), streams_max=4, user_share=0.25)) as (stub, _):
        call = await servicer.started(stub.call("generate", "wait", metadata=bearer(ANN)))
        await raises(Overloaded, stub.call("generate", "who", metadata=bearer(ANN)))
        assert await stub.call("generate", "hello", metadata=bearer(BOB)) == ["first", "hello"]
        servicer.release.set()
        await call


async def test_revoked_key_ends_only_its_own_relayed_calls(serve: Serve, servicer: EchoServicer) -> None:
    known = Known()
    async with relaying(serve(authenticator=known, callers_seconds=0.01)) as (stub, _):
        ann, bob = [asyncio.ensure_future(stub.call("generate", "wait", metadata=bearer(key))) for key in (ANN, BOB)]
        await until(lambda: servicer.waiting == 2)
        del known.users[ANN]
        await raises(Unauthenticated, ann, match="not valid")
        servicer.release.set()
        assert await bob == ["first", "wait"]


async def test_unread_relayed_call_pauses_without_delaying_others(serve: Serve, servicer: EchoServicer) -> None:
    async with relaying(serve(authenticator=Known())) as (stub, server):
        flood = stub.generate(StringValue(value="flood"), metadata=bearer(ANN))
        assert (await anext(flood)).value == "first"
        await servicer.entered.wait()
        for _ in range(5):
            assert await stub.call("generate", "big:300000", metadata=bearer(BOB)) == ["first", "x" * 300_000]
        (stream,) = server._batches._streams
        (relay,) = stream._relays.values()
        assert relay._unprocessed_bytes < 400_000
        for _ in range(20):
            assert len((await anext(flood)).value) == 100_000
        flood.cancel()
        await servicer.generator_closed.wait()


async def test_relayed_calls_end_with_shutting_down_when_the_server_stops(serve: Serve, servicer: EchoServicer) -> None:
    async with relaying(serve(authenticator=Known(), drain_seconds=60.0)) as (stub, server):
        call = await servicer.started(stub.call("generate", "wait", metadata=bearer(ANN)))
        server._interceptor.stop_calls(drainable=False)
        await raises(ShuttingDown, call)


async def test_gateway_relays_only_public_streaming_methods(serve: Serve) -> None:
    """The gateway's key alone gives no rights."""
    async with relaying(serve(authenticator=Known(), service_only=True)) as (stub, _):
        await raises(MethodNotFound, stub.call("generate", "who", metadata=bearer(ANN)))
        await raises(PermissionDenied, stub.call("generate", "who", metadata=()))
    async with relaying(serve(authenticator=Known()), key=ANN) as (stub, _):
        with pytest.raises((PermissionDenied, DependencyUnavailable)):
            await stub.call("generate", "who", metadata=bearer(ANN))
