"""Calls to several replicas: together at one of them, and elsewhere at once when it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from typing import Self

import pytest

from pawl.chassis import rpc_batch_client, rpc_client, rpc_replicas, tasks
from pawl.chassis.rpc_client import open_channel, translating
from pawl.chassis.rpc_server import RpcServer
from pawl.errors import DependencyUnavailable, Overloaded
from pawl.launcher.ports import free_port
from tests.poll import until
from tests.rpc.chassis.echo import EchoServicer, EchoStub, Serve


class Replicas:
    """Two servers, and a stub that knows both."""

    def __init__(self, servers: dict[str, RpcServer], serving: dict[str, AsyncExitStack], stub: EchoStub) -> None:
        self.servers = servers
        self.stub = stub
        self._serving = serving

    async def used(self) -> set[str]:
        """Make a call; return the addresses of the servers that have a stream of calls now."""
        assert await self.stub.call("unary", "hello") == ["hello"]
        return {address for address, server in self.servers.items() if server._batches._streams}

    async def preferred(self) -> str:
        """Return the address that the calls go to."""
        (address,) = await self.used()
        return address

    async def stop(self, address: str) -> None:
        """Stop a server."""
        await self._serving[address].aclose()

    async def start(self, serving: AbstractAsyncContextManager[RpcServer]) -> None:
        """Start a server where one was stopped."""
        server = await self._serving[next(iter(self._serving))].enter_async_context(serving)
        self.servers[server.address] = server


class Line:
    """A port in front of a server, which carries nothing while `carries` is not set."""

    def __init__(self, to: str) -> None:
        self.carries = asyncio.Event()
        self.carries.set()
        self.address = ""
        self._to = to.rsplit(":", 1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await tasks.end(self._tasks)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._to)
        tasks.start(self._tasks, self._carry(reader, far_writer), name="there")
        tasks.start(self._tasks, self._carry(far_reader, writer), name="back")

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(65536):
                await self.carries.wait()
                writer.write(data)


@asynccontextmanager
async def two(serve: Serve, **options: object) -> AsyncIterator[Replicas]:
    servers, serving = {}, {}
    async with AsyncExitStack() as every:
        for _ in range(2):
            stack = await every.enter_async_context(AsyncExitStack())
            listen = f"127.0.0.1:{free_port()}"  # Which nobody takes while it is stopped.
            server = await stack.enter_async_context(serve(service_only=True, listen=listen, **options))
            servers[server.address], serving[server.address] = server, stack
        async with open_channel(",".join(servers), batches=True) as channel:
            yield Replicas(servers, serving, EchoStub(channel))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no replica taken for silent because the machine is busy."""
    monkeypatch.setattr(rpc_batch_client, "_SILENT_SECONDS", 60.0)
    monkeypatch.setattr(rpc_batch_client, "_OPENING_SECONDS", 60.0)


async def test_all_calls_that_belong_together_go_to_one_replica_whoever_makes_them(serve: Serve) -> None:
    async with two(serve) as replicas:
        await asyncio.gather(*(replicas.stub.call("unary", "hello") for _ in range(100)))
        preferred = await replicas.preferred()
        async with open_channel(",".join(reversed(replicas.servers)), batches=True) as channel:
            assert await EchoStub(channel).call("unary", "hello") == ["hello"]
            assert len(replicas.servers[preferred]._batches._streams) == 2


async def test_a_replica_that_stops_is_left_without_a_failed_call_and_found_again(serve: Serve) -> None:
    async with two(serve) as replicas:
        preferred = await replicas.preferred()
        await replicas.stop(preferred)
        for _ in range(20):
            assert await replicas.stub.call("unary", "hello") == ["hello"]
        await replicas.start(serve(service_only=True, listen=preferred))

        async def is_back() -> bool:
            return preferred in await replicas.used()

        await until(is_back)


async def test_a_replica_that_says_nothing_gets_no_further_calls(
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


async def test_a_call_that_is_too_large_for_a_batch_goes_to_the_same_replica(
    serve: Serve, servicer: EchoServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going round, each second one would meet a replica that hangs."""
    async with two(serve) as replicas:
        preferred = await replicas.preferred()
        monkeypatch.setattr(rpc_client, "REQUEST_BYTES_MAX", 0)
        for _ in range(20):
            assert await replicas.stub.call("unary", "hello") == ["hello"]
            await asyncio.sleep(0.01)
        calls = [asyncio.ensure_future(replicas.stub.call("unary", "wait")) for _ in range(4)]
        await until(lambda: servicer.waiting == 4)
        active = replicas.servers[preferred]._interceptor._active
        assert [call.method.name for call in active].count("/test.v1.EchoService/Unary") == 4
        servicer.release.set()
        assert await asyncio.gather(*calls) == [["wait"]] * 4


async def test_a_replica_that_is_stopped_costs_no_call_once_it_was_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it is tried again, whatever was sent to it would wait for its deadline."""
    monkeypatch.setattr(rpc_batch_client, "_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(rpc_batch_client, "_OPENING_SECONDS", 2.0)
    monkeypatch.setattr(rpc_batch_client, "_GIVEN_UP_SECONDS", 0.1)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serve(service_only=True, listen="127.0.0.1:0")) for _ in range(2)]
        lines = [await stack.enter_async_context(Line(server.address)) for server in servers]
        addresses = tuple(line.address for line in lines)
        channel = await stack.enter_async_context(open_channel(",".join(addresses), batches=True, deadline_seconds=10))
        stub = EchoStub(channel)
        assert await stub.call("unary", "hello") == ["hello"]
        lines[rpc_replicas.preference("", addresses)[0]].carries.clear()
        with pytest.raises(DependencyUnavailable):
            await stub.call("unary", "hello")
        for _ in range(3):
            await asyncio.sleep(0.2)
            assert await stub.call("unary", "hello") == ["hello"]


async def test_a_replica_whose_callers_gave_up_without_a_word_of_it_is_not_asked_next(
    serve: Serve, servicer: EchoServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who asks one thing after the other would wait for a replica that hangs each time."""
    monkeypatch.setattr(rpc_batch_client, "_SILENT_SECONDS", -1.0)
    async with two(serve) as replicas:
        preferred = await replicas.preferred()
        call = asyncio.ensure_future(replicas.stub.call("unary", "wait"))
        await servicer.entered.wait()
        call.cancel()
        await asyncio.wait([call])
        assert await replicas.used() - {preferred}


async def test_a_replica_that_refuses_as_overloaded_gets_a_rest(
    serve: Serve, servicer: EchoServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_batch_client, "_BUSY_SECONDS", 600.0)
    async with two(serve, unary_calls_max=1) as replicas:
        call = asyncio.ensure_future(replicas.stub.call("unary", "wait"))
        await servicer.entered.wait()
        with pytest.raises(Overloaded), translating():
            await replicas.stub.call("unary", "hello")

        async def another_one_is_used() -> bool:
            try:
                return len(await replicas.used()) == 2
            except Overloaded:
                return False  # The way to the other one is not made yet.

        await until(another_one_is_used)
        servicer.release.set()
        assert await call == ["wait"]


async def test_a_replica_with_too_many_calls_gets_help(
    serve: Serve, servicer: EchoServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_replicas, "CALLS_MAX", 3)
    async with two(serve) as replicas:
        await replicas.preferred()
        calls = [asyncio.ensure_future(replicas.stub.call("unary", "wait")) for _ in range(10)]
        await until(lambda: servicer.waiting == 10)
        assert len(await replicas.used()) == 2
        servicer.release.set()
        assert await asyncio.gather(*calls) == [["wait"]] * 10


async def test_a_replica_that_takes_no_batches_costs_no_call(serve: Serve) -> None:
    """One of an older version, beside a newer one."""
    async with two(serve) as replicas:
        older = replicas.servers[await replicas.preferred()]
        older._interceptor._methods["/pawl.batch.v1.BatchService/Batch"] = older._interceptor._unknown
        older._batches.close_streams()
        for _ in range(20):
            assert await replicas.stub.call("unary", "hello") == ["hello"]
