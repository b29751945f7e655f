"""If a cluster of three NATS servers loses one server under load, no life-cycle event is lost."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import nats
import pytest
from nats.js import JetStreamContext

from pawl.chassis.process.tasks import end
from pawl.client import AsyncClient
from pawl.event.v1 import event_pb2
from pawl.job_store.erasure.erasing import STREAM as ERASED
from pawl.job_store.lifecycle.stream import STREAM
from pawl.launcher.ports import free_port
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.servers import NatsServer, running_suite

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
_RUNS = 10  # before and after each change of the cluster


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, NatsServer]]:
    """Run three servers, by name."""
    ports = {name: free_port() for name in "abc"}
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports.values())
    servers = {}
    for name, port in ports.items():
        (folder / name).mkdir()
        own = f'server_name: {name}, cluster {{ name: pawl, listen: "127.0.0.1:{port}", routes: [{routes}] }}'
        servers[name] = NatsServer(folder / name, own)
    with ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server)
        yield servers


async def test_losing_the_leader_of_the_stream_loses_no_event(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers:
        urls = ",".join(server.url for server in servers.values())
        async with running_suite(nats_url=urls, local_key=LOCAL_KEY) as suite:
            agent_loop = suite.endpoints.services["agent-loop"][0].grpc
            async with AsyncClient([agent_loop], api_key=LOCAL_KEY, retry_seconds=240.0) as pawl:
                await _test(servers, pawl)


async def _test(servers: dict[str, NatsServer], pawl: AsyncClient) -> None:
    runs: list[str] = []
    client = await nats.connect([server.url for server in servers.values()], max_reconnect_attempts=-1)
    jetstream = client.jetstream(timeout=30)
    try:
        await until(lambda: _replicas(jetstream, STREAM, 3))
        await until(lambda: _replicas(jetstream, ERASED, 3))
        load = asyncio.create_task(_start_runs(pawl, runs))
        await until(lambda: len(runs) >= _RUNS)
        info = await jetstream.stream_info(STREAM)
        assert info.cluster
        leader = servers[info.cluster.leader or ""]
        leader.stop(signal.SIGKILL)
        await until(lambda: len(runs) >= 2 * _RUNS)
        leader.start()
        await until(lambda: len(runs) >= 3 * _RUNS)
        await end([load])
        await until(lambda: _all_completed(jetstream, runs))
        assert (await jetstream.stream_info(STREAM)).created == info.created, "the stream was created anew"
    finally:
        await client.close()


async def _start_runs(pawl: AsyncClient, runs: list[str]) -> None:
    while True:
        run = await pawl.start("what is 17 * 23?")
        assert [piece async for piece in pawl.text(run.run_id)]
        runs.append(run.run_id)


async def _replicas(jetstream: JetStreamContext, stream: str, count: int) -> bool:
    try:
        info = await jetstream.stream_info(stream)
    except (nats.errors.Error, TimeoutError):
        return False
    return info.config.num_replicas == count


async def _all_completed(jetstream: JetStreamContext, runs: Sequence[str]) -> bool:
    """Return whether the stream contains the end of each run. False while the cluster elects a leader."""
    try:
        events = await _events(jetstream)
    except (nats.errors.Error, TimeoutError):
        return False
    ids = Counter(event.event_id for event in events)
    assert not [event_id for event_id, count in ids.items() if count > 1]
    return {event.run_id for event in events if event.type == "run.completed"} >= set(runs)


async def _events(jetstream: JetStreamContext) -> list[event_pb2.RunEvent]:
    consumer = await jetstream.pull_subscribe("pawl.v1.*.lifecycle.*", stream=STREAM)
    events: list[event_pb2.RunEvent] = []
    try:
        while (await consumer.consumer_info()).num_pending:
            messages = await consumer.fetch(100, timeout=30)
            events += [event_pb2.RunEvent.FromString(message.data) for message in messages]
    finally:
        await consumer.unsubscribe()
    return events
