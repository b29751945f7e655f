"""Publishes the life-cycle events of runs on JetStream (NOTE-2)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import nats.errors
from google.protobuf.message import DecodeError
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import APIError, BadRequestError, NotFoundError

from pawl.chassis.process import logs
from pawl.chassis.rpc.trace_context import TRACEPARENT_KEY
from pawl.chassis.visible import shortened
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import event_pb2
from pawl.job_store.ledger.ports import Lifecycle, StreamEnd
from pawl.server.bus.connection import Bus

STREAM: Final = "PAWL_LIFECYCLE"
SUBJECTS: Final = "pawl.v1.*.lifecycle.*"

_AGE_SECONDS_MAX: Final = 7 * 24 * 3600
_BYTES_MAX: Final = 512 * 1024 * 1024
_CUT_CHARACTERS: Final = 16 * 1024
_SENTENCE_BYTES: Final = 1024
# Fields that are dropped if the server accepts only small messages. Ids, states, waits and numbers remain.
_LONG_FIELDS: Final = ("output_text", "pending_calls", "unstopped_call_ids", "undo", "above")
# How long the stream remembers message ids, to drop duplicates.
_DUPLICATES_SECONDS: Final = 600
_UNACKNOWLEDGED_MAX: Final = 64
# Number of servers that store each event in a cluster, so that one server can be lost.
_REPLICAS: Final = 3
# The server's error code if a stream of this name has another configuration.
_NAME_IN_USE: Final = 10058
_ACK_SECONDS: Final = 3.0

_CONFIG: Final = StreamConfig(
    name=STREAM,
    subjects=[SUBJECTS],
    retention=RetentionPolicy.LIMITS,
    storage=StorageType.FILE,
    max_age=_AGE_SECONDS_MAX,
    max_bytes=_BYTES_MAX,
    duplicate_window=_DUPLICATES_SECONDS,
)
_UNAVAILABLE: Final = (nats.errors.Error, OSError, TimeoutError, DependencyUnavailable)

_log = logs.get_logger(__name__)


class JetStreamLifecycle:
    """The stream of life-cycle events. The stream may lose its newest events, or all of them.

    If the stream is missing, for example because NATS was wiped, it is created.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._connection_number = 0
        self._end: StreamEnd | None = None
        self._polls = itertools.count(1)

    async def end(self) -> StreamEnd | None:
        """Create the stream if needed. Return its state, or None while it is unavailable.

        The state is read on each new connection and after each failure.
        """
        if not self._bus.connected:
            return None
        connection_number = self._bus.connection_number
        if self._end is not None and self._connection_number == connection_number:
            return self._end
        try:
            info = await put_stream(self._bus, _CONFIG)
        except _UNAVAILABLE as error:
            _log.warning("lifecycle.stream_unavailable", error=str(error) or type(error).__name__)
            return None
        if info.created is None:
            raise AssertionError("NATS returned a stream without a creation time")
        self._connection_number = connection_number
        self._end = StreamEnd(poll_number=next(self._polls), create_time=info.created, last_seq=info.state.last_seq)
        return self._end

    async def send(self, events: Sequence[Lifecycle]) -> Mapping[int, int]:
        """Send events in order to the stream that `end` returned. Return the `outbox_id` and seq of the stored events.

        An event that is unreadable or too large for the stream is dropped, and is returned with seq 0. Events that are
        not returned may have been stored too. It is safe to send them again.
        """
        stored: dict[int, int] = {}
        for start in range(0, len(events), _UNACKNOWLEDGED_MAX):
            part = events[start : start + _UNACKNOWLEDGED_MAX]
            if self._bus.connection_number != self._connection_number:
                break
            # They are sent in order on one connection; only the acknowledgements are awaited together.
            seqs = await asyncio.gather(*(self._send_one(event) for event in part))
            stored |= {event.outbox_id: seq for event, seq in zip(part, seqs, strict=True) if seq is not None}
            if None in seqs:
                # The stream may have been removed: read its state again next time.
                self._end = None
                break
        return stored

    async def _send_one(self, event: Lifecycle) -> int | None:
        """Return the event's seq in the stream, 0 if it was dropped, or None if it may not have been stored."""
        kind = event.type.removeprefix("run.").replace(".", "_")
        headers = {
            "Nats-Msg-Id": event.event_id,
            "ce-specversion": "1.0",
            "ce-id": event.event_id,
            "ce-source": f"/pawl/{event.store_id}",
            "ce-type": f"pawl.{event.type}",
            **({"ce-subject": event.run_id} if event.run_id else {}),
            **({TRACEPARENT_KEY: event.trace} if event.trace else {}),
            "ce-time": event.time.isoformat().replace("+00:00", "Z"),
            "content-type": "application/x-protobuf; messageType=pawl.event.v1.RunEvent",
        }
        subject = f"pawl.v1.{event.store_id}.lifecycle.{kind}"
        try:
            payload = fitting(event.payload, self._bus.payload_bytes_max)
        except DecodeError:
            _log.exception("lifecycle.unreadable", event_id=event.event_id)
            return 0  # The event is dropped, as below.
        if len(payload) > self._bus.payload_bytes_max:
            # Later events must not wait forever. The notifier misses this one; the ledger has it.
            _log.error("lifecycle.too_large_for_nats", event_id=event.event_id, bytes_max=self._bus.payload_bytes_max)
            return 0
        try:
            # A failed publish may have stored the event. Its id lets NATS drop the duplicate.
            stored = await self._bus.jetstream().publish(subject, payload, timeout=_ACK_SECONDS, headers=headers)
        except _UNAVAILABLE:
            return None
        return stored.seq


def fitting(payload: bytes, bytes_max: int) -> bytes:
    """Return an event, shortened if it is over `bytes_max`.

    The run's longest fields are truncated first, then all long fields. The arguments of calls are removed, because
    approvers can read them from the ledger.
    """
    if len(payload) <= bytes_max:
        return payload
    event = event_pb2.RunEvent.FromString(payload)
    if event.HasField("call_changed"):
        return _without_arguments(event).SerializeToString()
    run = event.run_changed.run
    run.output_text = run.output_text[:_CUT_CHARACTERS]
    run.ClearField("output_json")
    run.ClearField("options")
    run.ClearField("tools")
    if event.ByteSize() > bytes_max:
        for field in _LONG_FIELDS:
            run.ClearField(field)
        if run.HasField("failure"):
            run.failure.message = shortened(run.failure.message, _SENTENCE_BYTES)
    return event.SerializeToString()


def _without_arguments(event: event_pb2.RunEvent) -> event_pb2.RunEvent:
    call = event.call_changed.call
    call.ClearField("arguments_json")
    call.ClearField("proposed_arguments")
    call.ClearField("resource_keys")
    call.approval.preview = shortened(call.approval.preview, _SENTENCE_BYTES)
    return event


async def put_stream(bus: Bus, config: StreamConfig) -> StreamInfo:
    """Create or update a stream.

    In a cluster, it gets three replicas. If too few servers are available, the number of replicas does not change, and
    later connections try again. It never decreases.
    """
    jetstream = bus.jetstream()
    try:
        replicas = (await jetstream.stream_info(str(config.name))).config.num_replicas or 1
    except NotFoundError:
        replicas = 0
    if bus.is_clustered and replicas < _REPLICAS:
        try:
            return await _put(jetstream, config.evolve(num_replicas=_REPLICAS), exists=bool(replicas))
        except APIError as error:
            _log.warning("bus.too_few_servers", stream=config.name, replicas=replicas or 1, error=error.description)
    return await _put(jetstream, config.evolve(num_replicas=replicas or 1), exists=bool(replicas))


async def _put(jetstream: JetStreamContext, config: StreamConfig, *, exists: bool) -> StreamInfo:
    if not exists:
        try:
            return await jetstream.add_stream(config)
        except BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
    # The stream exists, or another replica has just created it.
    return await jetstream.update_stream(config)
