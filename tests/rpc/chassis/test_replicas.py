"""Calls between services: batches, several replicas and failover."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from pawl.agent.v1 import agent_pb2 as pb
from pawl.batch.v1 import batch_pb2
from pawl.batch.v1.batch_pb2_grpc import BatchServiceStub
from pawl.chassis.process import tasks
from pawl.chassis.rpc import batch_client as rpc_batch_client
from pawl.chassis.rpc import client as rpc_client
from pawl.chassis.rpc import limits as rpc_limits
from pawl.chassis.rpc.batch_client import REQUEST_BYTES_MAX
from pawl.chassis.rpc.client import open_channel
from pawl.chassis.rpc.status import from_rpc_error
from pawl.errors import (
    DependencyUnavailable,
    Internal,
    MalformedRequest,
    MethodNotFound,
    Overloaded,
    PermissionDenied,
    RunNotFound,
    TooLarge,
    Unauthenticated,
)
from pawl.launcher.ports import free_port
from pawl.server.process.metrics import Metrics
from pawl.server.rpc import server as rpc_server
from pawl.server.rpc.server import RpcServer
from tests.poll import until
from tests.rpc.chassis.echo import SERVICE, EchoServicer, EchoStub, Serve
from tests.rpc.chassis.test_limits_and_access import USER_KEY, keys
from tests.rpc.refusals import raises


class Replicas:
    def __init__(self, servers: dict[str, RpcServer], serving: dict[str, AsyncExitStack], stub: EchoStub) -> None:
        self.servers = servers
        self.stub = stub
        self._serving = serving

    async def used(self) -> set[str]:
        """Make a call and return the addresses of the servers that then have a batch stream."""
        assert await self.stub.call("unary", "hello") == ["hello"]
        return {address for address, server in self.servers.items() if server._batches._streams}

    async def preferred(self) -> str:
        (address,) = await self.used()
        return address

    async def stop(self, address: str) -> None:
        await self._serving[address].aclose()

    async def start(self, serving: AbstractAsyncContextManager[RpcServer]) -> None:
        server = await self._serving[next(iter(self._serving))].enter_async_context(serving)
        self.servers[server.address] = server


@asynccontextmanager
async def two(serve: Serve, **options: object) -> AsyncIterator[Replicas]:
    servers, serving = {}, {}
    async with AsyncExitStack() as every:
        for _ in range(2):
            stack = await every.enter_async_context(AsyncExitStack())
            listen = f"127.0.0.1:{free_port()}"  # Stays free while the server is stopped
            server = await stack.enter_async_context(serve(service_only=True, listen=listen, **options))
            servers[server.address], serving[server.address] = server, stack
        async with open_channel(",".join(servers), batches=True) as channel:
            yield Replicas(servers, serving, EchoStub(channel))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep replicas from appearing silent on a busy machine."""
    monkeypatch.setattr(rpc_batch_client, "_SILENT_SECONDS", 60.0)
    monkeypatch.setattr(rpc_batch_client, "_OPENING_SECONDS", 60.0)


async def test_related_calls_from_all_callers_go_to_one_replica(serve: Serve) -> None:
    async with two(serve) as replicas:
        await asyncio.gather(*(replicas.stub.call("unary", "hello") for _ in range(100)))
        preferred = await replicas.preferred()
        async with open_channel(",".join(reversed(replicas.servers)), batches=True) as channel:
            assert await EchoStub(channel).call("unary", "hello") == ["hello"]
            assert len(replicas.servers[preferred]._batches._streams) == 2


async def test_calls_survive_a_replica_restart_and_traffic_returns_to_it(serve: Serve) -> None:
    async with two(serve) as replicas:
        preferred = await replicas.preferred()
        await replicas.stop(preferred)
        for _ in range(20):
            assert await replicas.stub.call("unary", "hello") == ["hello"]
        await replicas.start(serve(service_only=True, listen=preferred))

        async def is_back() -> bool:
            return preferred in await replicas.used()

        await until(is_back)


async def test_a_silent_replica_does_not_get_any_further_calls(
    serve: Serve, servicer: EchoServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_batch_client, "_SILENT_SECONDS", 0.05)
    async with two(serve) as replicas:
        await replicas.preferred()
        call = asyncio.ensure_future(replicas.stub.call("unary", "wait"))

        async def both_are_used() -> bool:
            await servicer.entered.wait()
            await asyncio.sleep(0.1)
            return len(await replicas.used()) == 2

        await until(both_are_used)
        servicer.release.set()
        assert await call == ["wait"]


async def test_a_replica_with_recently_cancelled_calls_is_not_chosen_next(
    serve: Serve, servicer: EchoServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client with sequential calls would wait for a hanging replica each time."""
    monkeypatch.setattr(rpc_batch_client, "_SILENT_SECONDS", -1.0)
    async with two(serve) as replicas:
        preferred = await replicas.preferred()
        call = await servicer.started(replicas.stub.call("unary", "wait"))
        call.cancel()
        await asyncio.wait([call])
        assert await replicas.used() - {preferred}


async def test_an_overloaded_replica_does_not_get_calls_for_a_while(
    serve: Serve, servicer: EchoServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_batch_client, "_BUSY_SECONDS", 600.0)
    async with two(serve, unary_calls_max=1) as replicas:
        call = await servicer.started(replicas.stub.call("unary", "wait"))
        await raises(Overloaded, replicas.stub.call("unary", "hello"))

        async def another_one_is_used() -> bool:
            with suppress(Overloaded):  # Until the connection to the other replica is ready
                return len(await replicas.used()) == 2
            return False

        await until(another_one_is_used)
        servicer.release.set()
        assert await call == ["wait"]


class Response:
    """A response that the test can reference weakly."""

    def __init__(self, raw: bytes) -> None:
        self.value = StringValue.FromString(raw).value


def generate(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(
        f"/{SERVICE}/Generate",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Response,
    )


async def test_a_waiting_stream_does_not_keep_a_response_in_memory(servicer: EchoServicer, serve: Serve) -> None:
    """Thousands of streams may wait for hours after reading a page of a log."""
    there: weakref.WeakSet[Response] = weakref.WeakSet()
    seen: list[str] = []

    async def read(call: Any) -> None:
        async for response in call:
            there.add(response)
            seen.append(response.value)
            del response

    async with asyncio.timeout(60), serve() as server, open_channel(server.address) as channel:
        reading = asyncio.create_task(read(generate(channel)(StringValue(value="wait"))))
        await servicer.entered.wait()
        await until(lambda: seen)
        gc.collect()
        assert not list(there)
        servicer.release.set()
        await reading
    assert seen == ["first", "wait"]


HERE = f"/{SERVICE}/"


@pytest.fixture
async def served(serve: Serve) -> Any:
    async with serve(service_only=True) as server, open_channel(server.address, batches=True) as channel:
        yield EchoStub(channel)


def calls_alone(metrics: Metrics) -> float:
    """Return the number of open batch streams, which is 1 while all calls share one stream."""
    return (
        metrics.registry.get_sample_value("pawl_test_rpc_in_flight", {"method": "/pawl.batch.v1.BatchService/Batch"})
        or 0.0
    )


async def test_concurrent_calls_each_get_their_own_response(served: EchoStub, metrics: Metrics) -> None:
    texts = [f"text {number}" for number in range(500)]
    assert await asyncio.gather(*(served.call("unary", text) for text in texts)) == [[text] for text in texts]
    assert calls_alone(metrics) == 1


async def test_client_gets_the_error_that_the_handler_raised(served: EchoStub) -> None:
    for kind in ("unary", "generate"):
        await raises(RunNotFound, served.call(kind, "not-found"))
        caught = await raises(Internal, served.call(kind, "crash"))
        assert "hunter2" not in str(caught)
        assert caught.metadata["error_id"].startswith("err_")
    await raises(MethodNotFound, served.missing(StringValue(value="hello")))


async def test_an_undecodable_request_does_not_affect_other_requests(serve: Serve) -> None:
    async with serve(service_only=True) as server, open_channel(server.address) as channel:
        stub: Any = BatchServiceStub(channel)
        calls = [
            batch_pb2.Call(id=1, method=f"{HERE}Unary", request=b"\xff\xff"),
            batch_pb2.Call(id=2, method=f"{HERE}Unary", request=StringValue(value="well").SerializeToString()),
        ]

        async def requests() -> Any:
            yield batch_pb2.BatchRequest(calls=calls)

        replies = {reply.id: reply async for response in stub.Batch(requests()) for reply in response.replies}
        assert replies[1].failure.reason == MalformedRequest.reason
        assert StringValue.FromString(replies[2].response).value == "well"
        assert replies[1].last
        assert replies[2].last


async def test_only_services_may_send_batches(serve: Serve) -> None:
    """OPS-1: a batched call runs with the identity of the batch's sender."""
    for key, error in ((USER_KEY, PermissionDenied), (None, Unauthenticated)):
        async with (
            serve(authenticator=keys(), service_only=True) as server,
            open_channel(server.address, service_key=key, batches=True) as channel,
        ):
            await raises(error, *(EchoStub(channel).call(kind, "hello") for kind in ("unary", "generate")))
    async with serve(service_only=False) as server, open_channel(server.address, batches=True) as channel:
        await raises(MethodNotFound, EchoStub(channel).call("unary", "who"))


async def test_cancelled_call_ends_at_the_server(served: EchoStub, servicer: EchoServicer) -> None:
    for kind in ("unary", "generate"):
        servicer.entered.clear()
        servicer.cancelled.clear()
        (await servicer.started(served.call(kind, "wait"))).cancel()
        await asyncio.wait_for(servicer.cancelled.wait(), 60)
        assert await served.call("unary", "hello") == ["hello"]


async def test_a_flood_of_cancelled_calls_ends_at_the_server_while_other_calls_continue(
    served: EchoStub, servicer: EchoServicer
) -> None:
    responses = served.generate(StringValue(value="flood"))
    for _ in range(300):
        await anext(responses)
    responses.cancel()
    await asyncio.wait_for(servicer.generator_closed.wait(), 60)
    assert await served.call("unary", "hello") == ["hello"]


async def test_large_request_is_sent_on_its_own(serve: Serve, metrics: Metrics) -> None:
    async with serve(service_only=True) as server, open_channel(server.address, batches=True) as channel:
        text = "x" * (REQUEST_BYTES_MAX + 1)
        assert (await EchoStub(channel).call("unary", text), calls_alone(metrics)) == ([text], 0)


async def test_oversized_response_does_not_affect_other_calls(serve: Serve, servicer: EchoServicer) -> None:
    """I20: only the oversized call fails."""
    async with (
        serve(service_only=True) as server,
        open_channel(server.address, message_bytes_max=1024 * 1024, batches=True) as channel,
    ):
        stub = EchoStub(channel)
        waiting = await servicer.started(stub.call("unary", "wait"))
        await raises(TooLarge, *(stub.call(kind, "big:1050000") for kind in ("unary", "generate")))
        assert len((await stub.call("unary", "big:1040000"))[0]) == 1_040_000
        servicer.release.set()
        assert await waiting == ["wait"]


async def test_a_stopping_server_finishes_its_calls_and_does_not_get_new_ones(
    serve: Serve, servicer: EchoServicer
) -> None:
    """OPS-5: another replica gets the new calls."""
    async with serve(service_only=True, listen="127.0.0.1:0") as stays, AsyncExitStack() as stack:
        # On a port that stays free afterwards.
        serving = serve(service_only=True, listen=f"127.0.0.1:{free_port()}", drain_seconds=20)
        goes = await serving.__aenter__()
        stub = EchoStub(await stack.enter_async_context(open_channel(f"{goes.address},{stays.address}", batches=True)))
        calls = [asyncio.ensure_future(stub.call("unary", "wait")) for _ in range(10)]
        await servicer.entered.wait()
        stop = asyncio.ensure_future(serving.__aexit__(None, None, None))
        for number in range(100):
            assert await stub.call("unary", f"{number}") == [f"{number}"]
            await asyncio.sleep(0.002)
        servicer.release.set()
        assert await asyncio.gather(*calls) == [["wait"]] * 10
        await stop


async def test_a_closed_channel_sends_nothing_and_fails_waiting_calls(serve: Serve, servicer: EchoServicer) -> None:
    async with serve(service_only=True) as server:
        tasks_before = len(asyncio.all_tasks())
        channel = open_channel(server.address, batches=True)
        stub = EchoStub(channel)
        call = await servicer.started(stub.call("unary", "wait"))
        await channel.close()
        await raises(DependencyUnavailable, call, stub.call("unary", "hello"))
        await until(lambda: len(asyncio.all_tasks()) <= tasks_before)


async def test_replaced_stream_still_delivers_every_response(serve: Serve, servicer: EchoServicer) -> None:
    """Calls that end while the last message is being written get their response too."""
    count = 4
    async with serve(service_only=True) as server, open_channel(server.address, batches=True) as channel:
        stub = EchoStub(channel)
        for _ in range(20):
            await until(lambda: is_answered(stub))
            servicer.release.clear()
            calls = [asyncio.ensure_future(stub.call("unary", f"turns:{turns}")) for turns in range(count)]
            await until(lambda: servicer.waiting == count)
            server.set_health(serving=False)
            await asyncio.sleep(0.005)
            server.set_health(serving=True)
            servicer.release.set()
            assert [len(answer[0]) for answer in await asyncio.gather(*calls)] == [100_000] * count


async def is_answered(stub: EchoStub) -> bool:
    with suppress(DependencyUnavailable):
        return await stub.call("unary", "hello") == ["hello"]
    return False


async def test_silent_connection_is_closed(
    serve: Serve, servicer: EchoServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NOTE-1, EVT-3: proxies allow 60 s of silence; the test runs the service's keepalive 40 times as fast."""
    assert dict(rpc_limits.KEEPALIVE)["grpc.keepalive_time_ms"] <= 25_000
    fast = [(name, value // 40 if name.endswith("_ms") else value) for name, value in rpc_limits.KEEPALIVE]
    monkeypatch.setattr(rpc_server, "KEEPALIVE", fast)
    flows = asyncio.Event()
    flows.set()
    relays, writers = set[asyncio.Task[None]](), list[asyncio.StreamWriter]()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await flows.wait()
            writer.write(data)

    async with serve(listen=f"127.0.0.1:{free_port()}") as server:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            other_reader, other_writer = await asyncio.open_connection(*server.address.split(":"))
            relays.add(asyncio.create_task(pipe(reader, other_writer)))
            relays.add(asyncio.create_task(pipe(other_reader, writer)))
            writers.extend((writer, other_writer))

        proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = ":".join(map(str, proxy.sockets[0].getsockname()))
        async with open_channel(address) as channel, asyncio.timeout(30):
            stream = EchoStub(channel).generate(StringValue(value="wait"))
            assert (await stream.read()).value == "first"
            flows.clear()
            await servicer.generator_closed.wait()
            stream.cancel()
        proxy.close()
        await tasks.end(relays)
        for writer in writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def test_retryable_public_calls_are_not_delayed_by_a_silent_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads, calls with a request id and unaccepted streams move to another replica. Other calls are sent only once."""
    monkeypatch.setattr(rpc_client, "_SILENT_SECONDS", 0.5)
    taken: list[tuple[bool, str]] = []

    def handler(method: str, *, is_silent: bool) -> grpc.RpcMethodHandler[Any, Any]:
        async def answer(request: Any, _: Any) -> Any:
            taken.append((is_silent, method))
            await asyncio.sleep(3600 if is_silent else 0)
            return request

        async def watch(request: Any, _: Any) -> AsyncIterator[Any]:
            yield await answer(request, _)

        reads: Any = pb.CancelRunRequest.FromString
        if method == "Watch":
            return grpc.unary_stream_rpc_method_handler(watch, reads, pb.CancelRunRequest.SerializeToString)
        return grpc.unary_unary_rpc_method_handler(answer, reads, pb.CancelRunRequest.SerializeToString)

    async with AsyncExitStack() as every:
        addresses = []
        for is_silent in (True, False):
            server = grpc.aio.server()
            methods = {name: handler(name, is_silent=is_silent) for name in ("GetRun", "CancelRun", "Watch")}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.v1.Runs", methods),))
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            every.push_async_callback(server.stop, None)
        channel = await every.enter_async_context(open_channel(",".join(addresses), translate=from_rpc_error))
        coding: Any = (pb.CancelRunRequest.SerializeToString, pb.CancelRunRequest.FromString)
        get, cancel = (channel.unary_unary(f"/test.v1.Runs/{name}", *coding) for name in ("GetRun", "CancelRun"))
        watch = channel.unary_stream("/test.v1.Runs/Watch", *coding)
        async with asyncio.timeout(60):
            while (True, "Watch") not in taken:
                assert await watch(pb.CancelRunRequest(run_id="w")).read() == pb.CancelRunRequest(run_id="w")
            for ask, request in ((get, pb.CancelRunRequest(run_id="r")), (cancel, pb.CancelRunRequest(request_id="q"))):
                while (True, {get: "GetRun", cancel: "CancelRun"}[ask]) not in taken:
                    assert await ask(request, timeout=20) == request
            taken.clear()
            cancels = [asyncio.ensure_future(cancel(pb.CancelRunRequest(), timeout=50)) for _ in range(6)]
            answered = (False, "CancelRun")
            await until(lambda: len(taken) == 6 and sum(map(asyncio.Future.done, cancels)) == taken.count(answered))
            assert 0 < taken.count(answered) < 6
            await tasks.end(cancels)
            assert len(taken) == 6
