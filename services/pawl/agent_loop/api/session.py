"""The Session stream. The client sends frames, and receives events, offers and receipts.

A session owns no state. When its stream ends, its tasks end and its leases are released, but its runs continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pawl.agent.v1.session_pb2 import SessionRequest
from pawl.agent_loop.api import session_frames
from pawl.agent_loop.api.session_stream import Parts, Send, Stream
from pawl.agent_loop.api.values import ClientSession
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ClientId, IdSource, SessionId, StoreId, UserId
from pawl.errors import DeadlineExceeded, HelloRequired


class Sessions:
    """All sessions on this replica.

    Each client has one stream. When a client opens a second stream under the same id, the first stream ends with
    CANCELLED, and its leases move to the new stream. If the new stream is on another replica, the first stream ends
    when it next requests a lease or updates a call.
    """

    def __init__(self, ids: IdSource, parts: Parts) -> None:
        self._ids = ids
        self._parts = parts
        self._open: dict[tuple[StoreId, UserId, ClientId], Stream] = {}

    async def serve(self, caller: Principal, incoming: AsyncIterator[SessionRequest], send: Send) -> None:
        """Serve one stream until it ends. Only one task at a time calls `send`, which may block.

        After the client has closed its side, events continue until every attached run has ended or the silence limit is
        reached.

        Raises:
            HelloRequired, InvalidId, InvalidField: The first frame is invalid.
            SlowConsumer: The client fell behind. The metadata contains the position from which to attach again.
            DeadlineExceeded: No frame arrived within the silence limit.
            Cancelled: The client opened another stream.
            DependencyUnavailable: A frame was not answered. Reconnect and send it again.
        """
        first = await self._first(incoming)
        client_id = ClientId(first.hello.client_id) or ClientId(self._ids.new("cli"))
        key = (caller.store_id, caller.user_id, client_id)
        client = ClientSession(client_id=client_id, session_id=SessionId(self._ids.new("ses")))
        stream = Stream(self._parts, caller, client, first.hello, send)
        earlier = self._open.get(key)
        self._open[key] = stream
        if earlier is not None:
            earlier.superseded.set()
        try:
            await stream.serve(first.frame_id, incoming)
        finally:
            if self._open.get(key) is stream:
                del self._open[key]
                if not stream.superseded.is_set():
                    await stream.give_back()

    async def _first(self, incoming: AsyncIterator[SessionRequest]) -> SessionRequest:
        try:
            async with asyncio.timeout(self._parts.times.silence_max_seconds):
                frame = await anext(aiter(incoming), None)
        except TimeoutError:
            raise DeadlineExceeded("no frame arrived") from None
        if frame is None:
            raise HelloRequired
        session_frames.check(frame)
        if not frame.HasField("hello"):
            raise HelloRequired
        return frame
