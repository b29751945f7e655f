"""Who may call, how much at once, and what the operator sees of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pawl.agent_loop.settings import AgentLoopSettings
from pawl.chassis.auth import Authenticator
from pawl.chassis.credentials import ApiKey
from pawl.chassis.metrics import Metrics
from pawl.chassis.rpc_client import open_channel, translating
from pawl.chassis.rpc_limits import Limits
from pawl.chassis.settings import ServiceSettings
from pawl.errors import InvalidId, Overloaded, PermissionDenied, Unauthenticated
from pawl.tool_registry.settings import ToolRegistrySettings
from tests.keys import LOCAL_KEY, authenticator
from tests.poll import until
from tests.rpc.chassis.echo import KINDS, SERVICE, EchoServicer, EchoStub, Serve
from tests.tidy import tree

USER_KEY = "user-key-0123456789"
SERVICE_KEY = "service-key-0123456789"

every_kind = pytest.mark.parametrize("kind", KINDS)


def keys() -> Authenticator:
    entry = ApiKey(key=USER_KEY, store_id="acme", user_id="ann", roles=["member"])
    return authenticator([entry], service_key=SERVICE_KEY)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@every_kind
@pytest.mark.parametrize("metadata", [(), bearer("another-key-0123456789"), (("authorization", USER_KEY),)])
async def test_without_a_known_key_nothing_is_called(
    serve: Serve, servicer: EchoServicer, kind: str, metadata: Any
) -> None:
    """OPS-1."""
    async with serve(authenticator=keys()) as server, open_channel(server.address) as channel:
        with pytest.raises(Unauthenticated), translating():
            await EchoStub(channel).call(kind, "wait", metadata=metadata)
        assert not servicer.entered.is_set()


@pytest.mark.parametrize("method", ["Unary", "Generate"])
async def test_without_a_known_key_no_request_is_waited_for(serve: Serve, method: str) -> None:
    """What has not arrived would be held in memory, up to its last byte."""
    async with serve(authenticator=keys()) as server, open_channel(server.address) as channel:
        begin: Any = channel.stream_stream(f"/{SERVICE}/{method}")
        with pytest.raises(Unauthenticated), translating():
            await begin(_never()).read()


async def _never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize("key", ["authorization", "pawl-store", "pawl-user"])
async def test_a_call_says_once_who_calls(serve: Serve, key: str) -> None:
    """Of two, a proxy may have believed the other one."""
    async with serve(authenticator=keys()) as server, open_channel(server.address) as channel:
        twice = (*bearer(USER_KEY), ("pawl-store", "acme"), ("pawl-user", "ann"))
        twice += tuple(pair for pair in twice if pair[0] == key)
        with pytest.raises(Unauthenticated, match=key), translating():
            await EchoStub(channel).call("unary", "who", metadata=twice)


async def test_the_key_says_who_the_user_is_whatever_else_is_claimed(serve: Serve) -> None:
    """OPS-1: store and user come from the credential."""
    async with serve(authenticator=keys()) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        own = (*bearer(USER_KEY), ("pawl-store", "acme"), ("pawl-user", "ann"))
        assert await stub.call("unary", "who", metadata=own) == ["user/acme/ann"]
        for claim in (("pawl-store", "other"), ("pawl-user", "bob")):
            with pytest.raises(PermissionDenied), translating():
                await stub.call("unary", "who", metadata=(*bearer(USER_KEY), claim))


@every_kind
async def test_a_user_may_not_call_what_is_for_services(serve: Serve, kind: str) -> None:
    async with serve(authenticator=keys(), service_only=True) as server, open_channel(server.address) as channel:
        with pytest.raises(PermissionDenied), translating():
            await EchoStub(channel).call(kind, "hello", metadata=bearer(USER_KEY))


async def test_a_channel_carries_the_service_key(serve: Serve) -> None:
    async with (
        serve(authenticator=keys(), service_only=True) as server,
        open_channel(server.address, service_key=SERVICE_KEY) as channel,
    ):
        assert await EchoStub(channel).call("unary", "who") == ["service//"]


async def test_with_the_local_key_metadata_says_who_calls(serve: Serve) -> None:
    local = authenticator(local_key=LOCAL_KEY)
    async with serve(authenticator=local) as server, open_channel(server.address, service_key=LOCAL_KEY) as channel:
        stub = EchoStub(channel)
        assert await stub.call("unary", "who") == ["user/local/me"]
        named = (("pawl-store", "acme"), ("pawl-user", "ann"))
        assert await stub.call("unary", "who", metadata=named) == ["user/acme/ann"]
        with pytest.raises(InvalidId), translating():
            await stub.call("unary", "who", metadata=(("pawl-store", "a.b"),))


@every_kind
@pytest.mark.parametrize("metadata", [(), (("pawl-user", "me"),), bearer("another-key-0123456789")])
async def test_also_on_this_machine_nobody_calls_without_the_local_key(
    serve: Serve, servicer: EchoServicer, kind: str, metadata: Any
) -> None:
    """OPS-1: a program that was started in a sandbox is on this machine, too."""
    local = authenticator(local_key=LOCAL_KEY, service_key=SERVICE_KEY)
    for service_only in (True, False):
        async with (
            serve(authenticator=local, service_only=service_only) as server,
            open_channel(server.address) as channel,
        ):
            with pytest.raises(Unauthenticated), translating():
                await EchoStub(channel).call(kind, "wait", metadata=metadata)
    assert not servicer.entered.is_set()


async def test_the_local_key_is_no_key_of_a_service(serve: Serve) -> None:
    local = authenticator(local_key=LOCAL_KEY, service_key=SERVICE_KEY)
    async with serve(authenticator=local, service_only=True) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        with pytest.raises(PermissionDenied), translating():
            await stub.call("unary", "who", metadata=bearer(LOCAL_KEY))
        assert await stub.call("unary", "who", metadata=bearer(SERVICE_KEY)) == ["service//"]


async def test_calls_over_the_limit_are_refused_at_once_and_streams_are_counted_apart(
    serve: Serve, servicer: EchoServicer
) -> None:
    async with serve(unary_calls_max=1, streams_max=1) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        for full, free in (("unary", "talk"), ("talk", "unary")):
            servicer.entered.clear()
            servicer.release.clear()
            holder = asyncio.ensure_future(stub.call(full, "wait"))
            await servicer.entered.wait()
            with pytest.raises(Overloaded), translating():
                await stub.call(full, "one too many")
            assert await stub.call(free, "room here") == ["room here"]
            servicer.release.set()
            await holder
            assert await stub.call(full, "room again") == ["room again"]


def of(store_id: str, user_id: str) -> tuple[tuple[str, str], ...]:
    return (("pawl-store", store_id), ("pawl-user", user_id))


@pytest.mark.parametrize("kind", ["unary", "talk"])
async def test_nobody_has_more_than_a_share_of_the_places(serve: Serve, servicer: EchoServicer, kind: str) -> None:
    limits = {"unary_calls_max": 8, "streams_max": 8, "store_share": 0.5, "user_share": 0.25}
    async with serve(**limits) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        users = ["ann", "ann", "bob", "cy"]
        holders = [asyncio.ensure_future(stub.call(kind, "wait", metadata=of("acme", user))) for user in users]
        while servicer.waiting < len(users):
            await asyncio.sleep(0.001)
        with pytest.raises(Overloaded, match="one user"), translating():
            await stub.call(kind, "one too many", metadata=of("acme", "ann"))
        with pytest.raises(Overloaded, match="one store"), translating():
            await stub.call(kind, "one too many", metadata=of("acme", "bob"))
        assert await stub.call(kind, "room here", metadata=of("other", "ann")) == ["room here"]
        servicer.release.set()
        await asyncio.gather(*holders)
        assert await stub.call(kind, "room again", metadata=of("acme", "ann")) == ["room again"]


@pytest.mark.parametrize("kind", ["collect", "talk", "read_and_write"])
async def test_streams_of_requests_fit_into_their_bytes(serve: Serve, servicer: EchoServicer, kind: str) -> None:
    """Each of them may hold a message that has not arrived whole."""
    limits = {"message_bytes_max": 8000, "request_stream_bytes_max": 6 * 9000, "store_share": 0.5, "user_share": 0.34}
    async with serve(**limits) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        users = ["ann", "ann", "bob"]
        holders = [asyncio.ensure_future(stub.call(kind, "wait", metadata=of("acme", user))) for user in users]
        while servicer.waiting < len(users):
            await asyncio.sleep(0.001)
        with pytest.raises(Overloaded, match="2 streams of requests are open, the limit of one user"), translating():
            await stub.call(kind, "one too many", metadata=of("acme", "ann"))
        with pytest.raises(Overloaded, match="3 streams of requests are open, the limit of one store"), translating():
            await stub.call(kind, "one too many", metadata=of("acme", "bob"))
        assert await stub.call(kind, "room here", metadata=of("other", "ann")) == ["room here"]
        assert await stub.call("generate", "room here", metadata=of("acme", "ann"))
        servicer.release.set()
        await asyncio.gather(*holders)
        assert await stub.call(kind, "room again", metadata=of("acme", "ann")) == ["room again"]


async def test_streams_of_services_take_no_bytes_of_users(serve: Serve, servicer: EchoServicer) -> None:
    limits = {"message_bytes_max": 8000, "request_stream_bytes_max": 9000}
    async with (
        serve(authenticator=keys(), **limits) as server,
        open_channel(server.address, service_key=SERVICE_KEY) as services,
    ):
        stub = EchoStub(services)
        holders = [asyncio.ensure_future(stub.call("talk", "wait")) for _ in range(2)]
        while servicer.waiting < len(holders):
            await asyncio.sleep(0.001)
        servicer.release.set()
        await asyncio.gather(*holders)


@pytest.mark.parametrize(
    ("settings", "streams"), [(AgentLoopSettings, (1000, 500, 200)), (ToolRegistrySettings, (170, 85, 34))]
)
def test_the_bytes_are_enough_for_as_many_streams_as_the_operations_page_says(
    settings: type[ServiceSettings], streams: tuple[int, int, int]
) -> None:
    """With a larger share, one key may serve a thousand front ends."""
    defaults = {name: field.default for name, field in settings.model_fields.items()}
    fields = ("message_bytes_max", "unary_calls_max", "streams_max", "request_stream_bytes_max")
    room = Limits(**{name: defaults[name] for name in fields}).request_streams_max
    most = min(room, defaults["streams_max"])
    assert (most, int(most * defaults["store_share"]), int(most * defaults["user_share"])) == streams
    assert ", ".join(map(str, streams)) in (tree.ROOT / "docs" / "operations.md").read_text()


async def test_a_call_that_waits_keeps_no_other_call_out(serve: Serve, servicer: EchoServicer) -> None:
    async with serve(unary_calls_max=1, streams_max=1) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        holder = asyncio.ensure_future(stub.call("unary", "long-poll"))
        await servicer.entered.wait()
        assert await stub.call("unary", "room here") == ["room here"]
        with pytest.raises(Overloaded), translating():
            await stub.call("unary", "long-poll")
        servicer.release.set()
        await holder
        assert await stub.call("talk", "room again") == ["room again"]


@every_kind
async def test_a_call_gives_its_room_back_however_it_ends(serve: Serve, servicer: EchoServicer, kind: str) -> None:
    async with serve(unary_calls_max=1, streams_max=1) as server, open_channel(server.address) as channel:
        stub, raw = EchoStub(channel), EchoStub(channel, raw=True)
        await asyncio.gather(stub.call(kind, "crash"), return_exceptions=True)
        await asyncio.gather(stub.call(kind, "abort"), return_exceptions=True)
        await asyncio.gather(raw.send(kind, b"\xff"), return_exceptions=True)
        call = asyncio.ensure_future(stub.call(kind, "wait"))
        await servicer.entered.wait()
        call.cancel()
        await servicer.cancelled.wait()
        await asyncio.gather(call, return_exceptions=True)
        assert (await stub.call(kind, "hello"))[-1] == "hello"


async def test_health_answers_strangers_also_under_full_load(serve: Serve, servicer: EchoServicer) -> None:
    async with (
        serve(authenticator=keys(), unary_calls_max=1) as server,
        open_channel(server.address, service_key=SERVICE_KEY) as channel,
        grpc.aio.insecure_channel(server.address) as stranger,
    ):
        holder = asyncio.ensure_future(EchoStub(channel).call("unary", "wait"))
        await servicer.entered.wait()
        stub: Any = health_pb2_grpc.HealthStub(stranger)
        reply = await stub.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        servicer.release.set()
        await holder


async def test_a_stranger_who_does_not_read_the_news_keeps_it_from_nobody(serve: Serve) -> None:
    """Nor the server from its end: whoever asks for health may ask by a connection that takes no byte."""
    request = health_pb2.HealthCheckRequest()
    messages: Any = health_pb2
    deaf: Any = [*_OWN, ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    async with (
        serve(listen="127.0.0.1:0") as server,
        grpc.aio.insecure_channel(server.address, deaf) as stranger,
        grpc.aio.insecure_channel(server.address, _OWN) as channel,
    ):
        silent: Any = health_pb2_grpc.HealthStub(stranger)
        watch = silent.Watch(request)
        await watch.initial_metadata()
        async with asyncio.timeout(60):
            server.set_health(serving=False)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            listed = (await stub.List(messages.HealthListRequest())).statuses
        assert {state.status for state in listed.values()} == {health_pb2.HealthCheckResponse.NOT_SERVING}
        watch.cancel()


async def test_a_stranger_who_does_not_read_has_so_many_calls_on_a_connection(serve: Serve, metrics: Metrics) -> None:
    """For gRPC keeps each until its client has taken the last of it, also those that we have ended."""
    deaf: Any = [*_OWN, ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    async with (
        serve(listen="127.0.0.1:0", unary_calls_max=5, streams_max=20) as server,
        grpc.aio.insecure_channel(server.address, deaf) as stranger,
    ):
        stub: Any = health_pb2_grpc.HealthStub(stranger)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(1100)]

        async def are_there() -> bool:
            return b'in_flight{method="/grpc.health.v1.Health/Watch"} 1025.0' in metrics.text()

        await until(are_there)
        await _check_health(server.address)
        assert await are_there()
        for call in watches:
            call.cancel()


async def test_strangers_keep_nobody_from_asking_for_health(serve: Serve) -> None:
    """Neither with requests that never end nor with watches: the services' own channels ask, too."""
    async with serve(streams_max=20) as server, grpc.aio.insecure_channel(server.address, _OWN) as many:
        unfinished: Any = many.stream_stream("/grpc.health.v1.Health/Check")
        calls = [unfinished(_never()) for _ in range(100)]
        answers = [asyncio.ensure_future(call.read()) for call in calls]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        await _check_health(server.address)
        stub: Any = health_pb2_grpc.HealthStub(many)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(100)]
        first = [asyncio.ensure_future(call.read()) for call in watches]
        await asyncio.wait(first)
        async with grpc.aio.insecure_channel(server.address, _OWN) as one:
            alone = health_pb2_grpc.HealthStub(one).Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
            await alone.read()
            await _check_health(server.address)
        for call in (*calls, *watches):
            call.cancel()
        await asyncio.gather(*answers, *first, return_exceptions=True)


_OWN = [("grpc.use_local_subchannel_pool", 1)]


async def _check_health(address: str) -> None:
    async with grpc.aio.insecure_channel(address, _OWN) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_request_id_is_kept_or_made_and_told_to_the_client(serve: Serve) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        mine = (("pawl-request-id", "my-request"),)
        assert await stub.call("unary", "request-id", metadata=mine) == ["my-request"]
        call = stub.unary(StringValue(value="request-id"), metadata=(("pawl-request-id", "not an id"),))
        made = (await call).value
        assert made.startswith("req_")
        assert ("pawl-request-id", made) in tuple(await call.trailing_metadata())


async def test_each_call_is_counted_by_method_and_code(serve: Serve, metrics: Metrics) -> None:
    """OPS-2."""
    async with serve() as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        await stub.call("unary", "hello")
        await asyncio.gather(stub.call("talk", "crash"), stub.missing(StringValue()), return_exceptions=True)
    text = metrics.text().decode()
    requests = "pawl_test_rpc_requests_total"
    assert f'{requests}{{code="OK",method="/test.v1.EchoService/Unary"}} 1.0' in text
    assert f'{requests}{{code="INTERNAL",method="/test.v1.EchoService/Talk"}} 1.0' in text
    assert f'{requests}{{code="UNIMPLEMENTED",method="unknown"}} 1.0' in text
    assert 'pawl_test_rpc_duration_seconds_count{method="/test.v1.EchoService/Unary"} 1.0' in text
    assert 'pawl_test_rpc_in_flight{method="/test.v1.EchoService/Unary"} 0.0' in text
    assert "pawl_test_process_resident_memory_bytes" in text
    assert "_created" not in text


async def test_each_call_has_one_line_in_the_log_without_its_content(
    serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    """OPS-2."""
    async with serve() as server, open_channel(server.address) as channel:
        await EchoStub(channel).call("talk", "secret words")
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())
    output = "".join(capfd.readouterr())
    assert output.count("rpc.served") == 1
    assert "/test.v1.EchoService/Talk" in output
    assert "secret words" not in output


async def test_what_services_ask_each_other_is_in_the_log_only_when_it_fails(
    serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    """OPS-2."""
    async with serve(service_only=True) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        await stub.call("unary", "hello")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.call("talk", "crash")
    lines = [line for line in "".join(capfd.readouterr()).splitlines() if "rpc.served" in line]
    assert [("debug" in line, "INTERNAL" in line) for line in lines] == [(True, False), (False, True)]


async def test_calls_that_come_all_at_once_are_answered_or_refused_with_a_reason(serve: Serve) -> None:
    """As of tabs after a deploy."""
    async with serve(authenticator=keys(), streams_max=1500) as server, AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(open_channel(server.address, deadline_seconds=240)) for _ in range(10)
        ]
        stubs = [EchoStub(channel) for channel in channels]
        calls = (stubs[n % 10].call("unary", "echo", metadata=bearer(USER_KEY)) for n in range(2500))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    wrong = [each for each in outcomes if isinstance(each, BaseException) and "RESOURCE_EXHAUSTED" not in str(each)]
    assert wrong == []
