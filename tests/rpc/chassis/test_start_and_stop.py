"""Start and stop of servers and processes, and the errors of failed calls for every RPC kind."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.client import open_channel
from pawl.chassis.rpc.status import from_rpc_error
from pawl.errors import (
    Cancelled,
    DeadlineExceeded,
    DependencyUnavailable,
    Internal,
    MalformedRequest,
    MethodNotFound,
    PawlError,
    RunNotFound,
    TooLarge,
    Unavailable,
)
from pawl.server.process.http_server import HealthMonitor
from pawl.server.rpc.health import ping
from tests.keys import ENVIRONMENT, LOCAL_KEY
from tests.poll import until
from tests.rpc.chassis.echo import KINDS, SERVICE, EchoServicer, EchoStub, Serve, echoing, wait_for_file
from tests.rpc.refusals import raises
from tests.tables import not_refused

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_port_in_use_is_reported_in_one_clear_sentence(serve: Serve) -> None:
    """If two processes shared a port, each would get half of the calls."""
    async with serve(listen="127.0.0.1:0") as server:
        await raises(StartError, serve(listen=server.address).__aenter__(), match="the port is in use")


async def test_reflection_describes_the_services_and_error_details(serve: Serve) -> None:
    """Newer clients support only v1, and need google.rpc.ErrorInfo to show why a call failed."""
    symbols = ("grpc.reflection.v1.ServerReflection", "grpc.health.v1.Health", "google.rpc.ErrorInfo")
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    requests += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols]
    async with serve() as server, open_channel(server.address) as channel:
        for version in ("v1alpha", "v1"):
            begin: Any = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            listed, *replies = [reply async for reply in begin(iter(requests))]
            assert {SERVICE, *symbols[:2]} <= {each.name for each in listed.list_services_response.service}
            files = [file for reply in replies for file in reply.file_descriptor_response.file_descriptor_proto]
            assert any(b"ErrorInfo" in file for file in files), version
            assert any(b"ServerReflection" in file for file in files), version


async def test_health_depends_only_on_required_dependencies_but_reports_all(serve: Serve) -> None:
    """A replica without its database is not usable, but one without NATS is."""
    broken = {"database": False, "nats": False}

    async def check(name: str) -> None:
        if broken[name]:
            raise DependencyUnavailable

    monitor = HealthMonitor()
    monitor.add("database", functools.partial(check, "database"))
    monitor.add("nats", functools.partial(check, "nats"), optional=True)
    async with serve() as server, open_channel(server.address) as channel, monitor:
        monitor.follow(server)

        async def is_healthy() -> bool:
            await monitor.check()
            with suppress(DependencyUnavailable):
                await ping(channel)
                return True
            return False

        broken["nats"] = True
        assert await is_healthy()
        assert (b'"nats":"DependencyUnavailable"' in monitor.page().body, monitor.page().status) == (True, 200)
        broken["database"] = True
        assert not await is_healthy()
        assert monitor.page().status == 503
        broken["database"] = False
        await until(is_healthy)


async def test_health_changes_to_not_serving_before_the_server_stops(serve: Serve, servicer: EchoServicer) -> None:
    async with serve(drain_seconds=20) as server:
        channel = grpc.aio.insecure_channel(server.address)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        # Keep reading: unread data is lost with the connection.
        news = asyncio.ensure_future(watch.read())
        await asyncio.sleep(0)
    assert (await news).status == NOT_SERVING
    await channel.close()


async def test_stop_moves_streams_to_another_replica_immediately(serve: Serve, servicer: EchoServicer) -> None:
    """OPS-5: otherwise watches and sessions would never end."""
    serving = serve(drain_seconds=20)
    server = await serving.__aenter__()
    async with open_channel(server.address) as channel:
        kinds = ("generate", "write", "talk", "collect")
        calls = [asyncio.ensure_future(EchoStub(channel).call(kind, "wait")) for kind in kinds]
        await until(lambda: servicer.waiting == len(kinds))
        await serving.__aexit__(None, None, None)
        await raises(Unavailable, *calls)


async def test_addresses_that_do_not_support_balancing_are_rejected_immediately() -> None:
    rows = ("one.example:1,two.example:1", "127.0.0.1:1,[::1]:2", "unix:/a,127.0.0.1:1")
    assert not_refused(StartError, open_channel, rows) == []


async def test_call_without_a_deadline_gets_the_default(serve: Serve, servicer: EchoServicer) -> None:
    async with serve() as server, open_channel(server.address, deadline_seconds=0.3) as channel:
        await raises(DeadlineExceeded, EchoStub(channel).call("unary", "wait"))


PROGRAM = """
from pawl.server.process.service import run_service
from pawl.server.process.service import Service
from pawl.chassis.identity.roles import ANYBODY
from pawl.server.process.settings import ServiceSettings, load
from tests.rpc.chassis.echo import ECHO_METHODS, EchoServicer, add_echo_to_server

async def main(stop):
    async with Service("echo", load(ServiceSettings)) as service:
        database = await service.open_database()
        await service.open_bus()
        server = service.rpc_server()
        server.add(add_echo_to_server, EchoServicer(), callers=dict.fromkeys(ECHO_METHODS, ANYBODY))
        await service.serve(server, stop)

run_service(main)
"""


def start(**variables: str) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], **ENVIRONMENT, **variables}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.PIPE, text=True)


async def test_service_starts_serves_and_stops(database_url: str, nats_url: str, tmp_path: Path) -> None:
    """OPS-2, OPS-5: the service reports health and metrics, and SIGTERM stops it."""
    address_file = tmp_path / "addresses.json"
    process = start(
        PAWL_DATABASE_URL=database_url,
        PAWL_DATABASE_UNSAFE="true",
        PAWL_NATS_URL=nats_url,
        PAWL_ADDRESS_FILE=str(address_file),
    )
    await wait_for_file(address_file, process)
    addresses = json.loads(address_file.read_text())
    async with open_channel(addresses["grpc"], service_key=LOCAL_KEY) as channel:
        assert await EchoStub(channel).call("unary", "hello") == ["hello"]

    def get(path: str) -> bytes:
        with urlopen(f"http://{addresses['metrics']}{path}") as response:
            body: bytes = response.read()
            return body

    health = json.loads(await asyncio.to_thread(get, "/healthz"))
    assert health["serving"] is True
    assert health["checks"]["database"] == "ok"
    metrics = (await asyncio.to_thread(get, "/metrics")).decode()
    assert 'pawl_echo_rpc_requests_total{code="OK",method="/test.v1.EchoService/Unary"} 1.0' in metrics
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0, log
    assert [json.loads(line)["event"] for line in log.splitlines()][-2:] == ["grpc.stopped", "process.stopped"]
    assert len({json.loads(line)["instance"] for line in log.splitlines()}) == 1


def test_a_service_rejects_a_database_that_may_lose_acknowledged_writes(database_url: str) -> None:
    """I1: the service logs one sentence and exits with the code for errors that a restart cannot fix."""
    process = start(PAWL_DATABASE_URL=database_url)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "fsync is off" in json.loads(log.splitlines()[-1])["error"]
    assert "Traceback" not in log


async def test_every_kind_of_call_returns_a_response_or_the_intended_error(
    serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    meant = {
        "not-found": RunNotFound,
        "group": RunNotFound,
        "gone": Cancelled,
        "gone-group": Cancelled,
        # Messages above Pawl's limit and above gRPC's limit.
        "x" * 110_000: TooLarge,
        "x" * 2_000_000: TooLarge,
    }
    async with serve(message_bytes_max=100_000) as server, open_channel(server.address) as channel:
        stub, raw = EchoStub(channel), EchoStub(channel, raw=True)
        for kind in KINDS:
            assert await stub.call(kind, "hello") in (["hello"], ["first", "hello"]), kind
            assert {how: type(await raises(PawlError, stub.call(kind, how))) for how in meant} == meant, kind
            assert type(await raises(PawlError, raw.send(kind, b"\xff\xff\xff"))) is MalformedRequest, kind
            for how in ("abort", "abort-group"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.call(kind, how)
                status = (caught.value.code(), caught.value.details())
                assert status == (grpc.StatusCode.DATA_LOSS, "as the servicer says"), kind
        assert type(await raises(PawlError, stub.missing(StringValue()))) is MethodNotFound
        assert type(await raises(PawlError, anext(aiter(stub.missing_stream(iter([StringValue()])))))) is MethodNotFound
    async with serve() as server, open_channel(server.address, message_bytes_max=1000) as channel:
        assert type(await raises(PawlError, EchoStub(channel).call("unary", "big:2000"))) is TooLarge, "no overload"
    assert "rpc.failed" not in capfd.readouterr().out, "none of these is an internal error"


async def test_uncaught_exception_text_is_not_sent(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    """I22: an exception's text may contain secrets, so the client only gets an id to find in the log."""
    async with serve() as server, open_channel(server.address) as channel:
        for kind in KINDS:
            for how in ("crash", "crash-group", "timeout"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await EchoStub(channel).call(kind, how)
                assert "hunter2" not in repr((caught.value.details(), caught.value.trailing_metadata()))
                error = from_rpc_error(caught.value)
                assert type(error) is Internal
                assert error.metadata["error_id"] in "".join(capfd.readouterr())


async def test_deadline_cancels_the_handler_before_the_client_times_out(serve: Serve, servicer: EchoServicer) -> None:
    """LOOP-6, C11: the handler is cancelled while the client still waits for the error."""
    async with echoing(serve()) as stub:
        await stub.call("unary", "connect first")
        await raises(DeadlineExceeded, stub.call("unary", "wait", timeout=0.01))
        assert not servicer.entered.is_set()

        async def is_cancelled(kind: str) -> bool:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.call(kind, "wait", timeout=1)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return any(key == "grpc-status-details-bin" for key, _ in caught.value.trailing_metadata() or ())

        for kind in KINDS:
            servicer.cancelled.clear()
            await until(lambda kind=kind: is_cancelled(kind))  # type: ignore[misc]  # A busy machine may take longer.
            await servicer.cancelled.wait()
