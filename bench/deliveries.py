"""P14: 200 webhook deliveries per second to a receiver that answers, while another receiver hangs.

The benchmark publishes life-cycle events in the same way as job-store. Half of them belong to a user whose receiver
answers, and half to a user of the same store whose receiver never answers. The figures are the delay of the deliveries
and their completeness.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

import nats
from nats.js import JetStreamContext

from bench.figures import Figure, NotMeasured, at_most
from bench.options import Options
from bench.percentiles import percentile
from bench.subjects import Pawl
from bench.world import pawl, scratch
from pawl.chassis.process.tasks import within
from pawl.chassis.rpc.client import open_channel
from pawl.event.v1 import event_pb2, run_pb2
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1.channel_pb2_grpc import ChannelServiceStub

_RATE: Final = 200
_STORE: Final = "acme"
_ANSWERED: Final = "ann"
_HANGING: Final = "bob"
_AHEAD_SECONDS: Final = 3.0
_PATIENCE_SECONDS: Final = 30.0
_P99_MAX_SECONDS: Final = 1.0


class _Receiver:
    """Receives webhooks on one port and records when each event arrives. Requests to `/hangs` get no response."""

    def __init__(self) -> None:
        self.arrived: dict[str, float] = {}
        self.times = 0
        self._came: dict[str, asyncio.Event] = {}

    def arrival(self, event_id: str) -> asyncio.Event:
        """Return an asyncio event that is set when the delivery arrives."""
        return self._came.setdefault(event_id, asyncio.Event())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(maxsplit=1)[0])
            body = await reader.readexactly(length)
            if b" /hangs " in head:
                await reader.read()
                return
            self.times += 1
            event_id = json.loads(body)["data"]["event_id"]
            self.arrived.setdefault(event_id, time.monotonic())
            self.arrival(event_id).set()
            writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def _receiver() -> AsyncIterator[tuple[_Receiver, int]]:
    receiver = _Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, backlog=1000)
    yield receiver, server.sockets[0].getsockname()[1]
    server.close()


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Publish events at a constant rate, and record the arrival of their deliveries."""
    seconds = options.seconds(60, 20)
    async with _receiver() as (receiver, port), scratch() as folder:
        egress = folder / "egress.json"
        egress.write_text(json.dumps({"*": {"private": [f"127.0.0.1:{port}", f"localhost:{port}"]}}))
        async with pawl(environment={"PAWL_EGRESS_FILE": str(egress)}) as (subject, _):
            await _hook(subject, _ANSWERED, f"http://127.0.0.1:{port}/")
            await _hook(subject, _HANGING, f"http://localhost:{port}/hangs")
            published = await _publish(subject, seconds)
            began = time.monotonic()
            for each in published:
                left = began + _PATIENCE_SECONDS - time.monotonic()
                await within(max(0.0, left), receiver.arrival(each).wait())
    late = [receiver.arrived[each] - at for each, at in published.items() if each in receiver.arrived]
    what = f"{_RATE} webhook deliveries a second beside a receiver that hangs, from the event on: p99"
    p99 = percentile(late, 0.99)
    span = max(receiver.arrived.values()) - min(receiver.arrived.values())
    detail = {
        "p50, s": percentile(late, 0.5),
        "slowest, s": max(late),
        "deliveries": float(len(late)),
        "deliveries a second": len(late) / span,
    }
    lost = float(len(published) - len(late) + receiver.times - len(late))
    return [
        at_most(_P99_MAX_SECONDS, code="P14", what=what, value=p99, unit="s", detail=detail),
        at_most(0, code="P14", what="lost or duplicate deliveries", value=lost, unit=""),
    ]


async def _hook(subject: Pawl, user: str, url: str) -> None:
    addresses = ",".join(subject.suite.endpoints.addresses("notifier"))
    request = pb.CreateChannelRequest(channel=pb.Channel(url=url))
    async with open_channel(addresses, service_key=subject.suite.local_key, deadline_seconds=10.0) as channel:
        await ChannelServiceStub(channel).CreateChannel(request, metadata=(("pawl-store", _STORE), ("pawl-user", user)))


async def _publish(subject: Pawl, seconds: float) -> dict[str, float]:
    """Publish events for both users. Return the publish time of each event for the receiver that answers.

    The events for the receiver that hangs start first.
    """
    url = subject.suite.nats_url("job_store")
    assert url is not None
    client = await nats.connect(url)
    stream, published = client.jetstream(publish_async_max_pending=1000), dict[str, float]()
    ahead = round(_AHEAD_SECONDS * _RATE)
    began = time.monotonic()
    try:
        for number in range(ahead + round(seconds * _RATE)):
            await asyncio.sleep(max(0.0, began + number / _RATE - time.monotonic()))
            await _event(stream, f"evt_hangs_{number}", _HANGING)
            if number >= ahead:
                published[f"evt_{number}"] = time.monotonic()
                await _event(stream, f"evt_{number}", _ANSWERED)
        await stream.publish_async_completed()
    finally:
        await client.close()
    return published


async def _event(stream: JetStreamContext, event_id: str, user: str) -> None:
    event = event_pb2.RunEvent(
        store_id=_STORE, conversation_id=f"conv_{event_id}", run_id=f"run_{event_id}", event_id=event_id
    )
    event.type = "run.completed"
    event.time.FromDatetime(datetime.now(UTC))
    event.run_changed.run.user_id = user
    event.run_changed.run.state = run_pb2.RUN_STATE_COMPLETED
    event.run_changed.run.output_text = "17 * 23 = 391"
    subject = f"pawl.v1.{_STORE}.lifecycle.completed"
    await stream.publish_async(subject, event.SerializeToString(), headers={"Nats-Msg-Id": event_id})
