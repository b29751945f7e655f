"""The stream of one attached worker: the calls that it holds, and the frames to send to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from pawl.chassis.ids import CallId
from pawl.chassis.rpc.retry import Retry
from pawl.errors import Overloaded, PawlError
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool.v1.worker_pb2 import AttachWorkerResponse
from pawl.tool_registry.sources.worker.answers import checkpoint_content
from pawl.tool_registry.sources.worker.rules import Attached
from pawl.tool_registry.sources.worker.store.workers import PostgresWorkerRepository

_FRAMES_PER_CALL: Final = 4
_FRAMES_EXTRA: Final = 64
# A statement may still take effect for this time after it was interrupted.
_UNSURE_SECONDS: Final = 30.0


def cancel(call_id: str, lease_epoch: int) -> AttachWorkerResponse:
    return AttachWorkerResponse(cancel=pb.InvocationCancel(call_id=call_id, lease_epoch=lease_epoch))


class WorkerLink:
    def __init__(
        self, worker: Attached, *, calls_max: int, last_frame_at: float, register: Callable[[], Awaitable[object]]
    ) -> None:
        self.worker = worker
        # Registers the worker's tools again, as when the worker attached.
        self.register = register
        self.last_frame_at = last_frame_at
        # Lease epochs by call id, including for calls that the worker kept across a reconnect.
        self.held_calls: dict[str, int] = {}
        self.is_draining = False
        self.unsure_until = -math.inf
        # Set when a call may be waiting for this worker.
        self.due = asyncio.Event()
        self.ended: asyncio.Future[PawlError | None] = asyncio.get_running_loop().create_future()
        self._calls_max = calls_max
        self._reserved = 0
        self._cancelled: dict[str, int] = {}
        self._ends_with: PawlError | None = None
        self._unsent_max = _FRAMES_PER_CALL * calls_max + _FRAMES_EXTRA
        self._outgoing: asyncio.Queue[AttachWorkerResponse | None] = asyncio.Queue()

    @property
    def free_slots(self) -> int:
        if self.is_draining or self.ended.done():
            return 0
        return max(0, self._calls_max - len(self.held_calls) - self._reserved)

    def note_lost_claim(self, now: float) -> None:
        """Record that the response to a claim was lost.

        The database may then list calls as held that were never sent.
        """
        self.unsure_until = now + _UNSURE_SECONDS

    @property
    def has_no_claims(self) -> bool:
        """True if the worker is attached and no calls are being claimed for it."""
        return not self._reserved and not self.ended.done()

    @contextmanager
    def reserved(self, slots: int) -> Iterator[None]:
        """Reserve slots for calls that are being written or claimed. Send these calls inside the context."""
        self._reserved += slots
        try:
            yield
        finally:
            self._reserved -= slots
            self.end_if_drained()

    def send_call(self, call: pb.Invocation) -> bool:
        """Send a call. Return False if the stream has ended and the worker will not receive the call."""
        if self.ended.done():
            return False
        if self.held_calls.get(call.call_id) == call.lease_epoch:
            return True  # Already sent.
        self.held_calls[call.call_id] = call.lease_epoch
        self.send(AttachWorkerResponse(invocation=call))
        return True

    def cancel(self, call_id: str) -> None:
        """Cancel a call that the worker holds. Send only one frame per lease epoch."""
        epoch = self.held_calls.get(call_id)
        if epoch is not None and self._cancelled.get(call_id) != epoch:
            self._cancelled[call_id] = epoch
            self.send(cancel(call_id, epoch))

    def mark_answered(self, call_id: str, lease_epoch: int) -> None:
        """Record that the worker has answered the call, so that it can no longer be cancelled."""
        if self.held_calls.get(call_id) == lease_epoch:
            self._cancelled[call_id] = lease_epoch

    def drop(self, call_id: str, lease_epoch: int) -> None:
        if self.held_calls.get(call_id) == lease_epoch:
            del self.held_calls[call_id]
            self._cancelled.pop(call_id, None)
            self.due.set()
        self.end_if_drained()

    def drain(self, error: PawlError | None) -> None:
        """Stop sending new calls, and end the stream once the worker holds no calls.

        The stream ends with `error`, or normally if `error` is None.
        """
        self.is_draining = True
        self._ends_with = self._ends_with or error
        self.end_if_drained()

    def end_if_drained(self) -> None:
        if self.is_draining and not self.held_calls and not self._reserved:
            self.end(self._ends_with)

    def end(self, error: PawlError | None) -> None:
        """End the stream. If this is called again, the first error counts."""
        if not self.ended.done():
            self.ended.set_result(error)
            self._outgoing.put_nowait(None)

    def send(self, frame: AttachWorkerResponse) -> None:
        """Queue a frame. If the worker does not read its frames, end the stream."""
        if self._outgoing.qsize() >= self._unsent_max:
            self.end(Overloaded("the worker does not read its stream"))
        elif not self.ended.done():
            self._outgoing.put_nowait(frame)

    async def next(self) -> AttachWorkerResponse | None:
        """Return the next frame for the worker, or None after the last frame."""
        return await self._outgoing.get()


async def keep_checkpoint(
    repository: PostgresWorkerRepository, retry: Retry, link: WorkerLink, report: pb.WorkerCheckpoint
) -> None:
    """Store a checkpoint of a call that the worker holds, and send a receipt.

    Raises the same errors as `Retry.until_answered`.
    """
    worker, call_id, epoch = link.worker.key, CallId(report.call_id), report.lease_epoch
    content = checkpoint_content(report.content_json)
    kept = bool(content) and await retry.until_answered(
        lambda: repository.keep_checkpoint(worker, call_id, epoch, content), call=call_id
    )
    receipt = pb.CheckpointReceipt(call_id=call_id, lease_epoch=epoch, number=report.number, kept=kept)
    link.send(AttachWorkerResponse(checkpoint=receipt))


async def put_back_unsent(repository: PostgresWorkerRepository, links: Iterable[WorkerLink], now: float) -> None:
    """Put back calls that the database lists as held, but that were never sent because a claim's response was lost."""
    unsure = {link.worker.attachment: link for link in links if now < link.unsure_until and link.has_no_claims}
    for attachment, key, epoch in await repository.held(list(unsure)) if unsure else ():
        link = unsure[attachment]
        # Check again: a claim may have started since.
        if link.has_no_claims and link.held_calls.get(key.call_id) != epoch:
            await repository.put_back(key, epoch)
