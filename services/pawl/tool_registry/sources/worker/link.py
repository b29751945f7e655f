"""One worker's stream: what it has in hand, and what it is to be sent."""

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
_FRAMES_BESIDES: Final = 64
# A statement that broke off may still be carried out for so long.
_DOUBT_SECONDS: Final = 30.0


def cancel(call_id: str, lease_epoch: int) -> AttachWorkerResponse:
    """Return the frame that takes a call back from its worker."""
    return AttachWorkerResponse(cancel=pb.InvocationCancel(call_id=call_id, lease_epoch=lease_epoch))


class WorkerLink:
    """An attached worker."""

    def __init__(
        self, worker: Attached, *, calls_max: int, heard_at: float, register: Callable[[], Awaitable[object]]
    ) -> None:
        self.worker = worker
        self.register = register
        """Registers its tools again, as when it attached."""
        self.heard_at = heard_at
        self.in_hand: dict[str, int] = {}
        """The epochs of its calls, those among them that it kept over a reconnect."""
        self.is_draining = False
        self.doubted_until = -math.inf
        self.due = asyncio.Event()
        """Set when there may be a call for it."""
        self.ended: asyncio.Future[PawlError | None] = asyncio.get_running_loop().create_future()
        self._calls_max = calls_max
        self._reserved = 0
        self._cancelled: dict[str, int] = {}
        self._ends_with: PawlError | None = None
        self._unsent_max = _FRAMES_PER_CALL * calls_max + _FRAMES_BESIDES
        self._outgoing: asyncio.Queue[AttachWorkerResponse | None] = asyncio.Queue()

    @property
    def free(self) -> int:
        """The number of further calls that it can get."""
        if self.is_draining or self.ended.done():
            return 0
        return max(0, self._calls_max - len(self.in_hand) - self._reserved)

    def doubt(self, now: float) -> None:
        """Note that the answer to a claim was lost: it may hold calls that nobody here knows of."""
        self.doubted_until = now + _DOUBT_SECONDS

    @property
    def is_at_rest(self) -> bool:
        """True if it is attached, and no call is on its way to it."""
        return not self._reserved and not self.ended.done()

    @contextmanager
    def reserved(self, slots: int) -> Iterator[None]:
        """Keep slots for calls that are being written down or claimed; hand them over inside."""
        self._reserved += slots
        try:
            yield
        finally:
            self._reserved -= slots
            self.end_if_drained()

    def hand(self, call: pb.Invocation) -> bool:
        """Send a call; False if the stream has ended: the worker will not get it."""
        if self.ended.done():
            return False
        if self.in_hand.get(call.call_id) == call.lease_epoch:
            return True  # It was sent.
        self.in_hand[call.call_id] = call.lease_epoch
        self.send(AttachWorkerResponse(invocation=call))
        return True

    def cancel(self, call_id: str) -> None:
        """Take a call back that it has in hand, once."""
        epoch = self.in_hand.get(call_id)
        if epoch is not None and self._cancelled.get(call_id) != epoch:
            self._cancelled[call_id] = epoch
            self.send(cancel(call_id, epoch))

    def mark_answered(self, call_id: str, lease_epoch: int) -> None:
        """Note that a call is not to be taken back any more."""
        if self.in_hand.get(call_id) == lease_epoch:
            self._cancelled[call_id] = lease_epoch

    def drop(self, call_id: str, lease_epoch: int) -> None:
        """Note that a call is not in its hands any more."""
        if self.in_hand.get(call_id) == lease_epoch:
            del self.in_hand[call_id]
            self._cancelled.pop(call_id, None)
            self.due.set()
        self.end_if_drained()

    def drain(self, error: PawlError | None) -> None:
        """Give it no new calls, and end the stream, with `error` if there is one, when nothing is left in hand."""
        self.is_draining = True
        self._ends_with = self._ends_with or error
        self.end_if_drained()

    def end_if_drained(self) -> None:
        """End the stream if it drains and nothing is left in hand."""
        if self.is_draining and not self.in_hand and not self._reserved:
            self.end(self._ends_with)

    def end(self, error: PawlError | None) -> None:
        """End the stream; the first cause stays."""
        if not self.ended.done():
            self.ended.set_result(error)
            self._outgoing.put_nowait(None)

    def send(self, frame: AttachWorkerResponse) -> None:
        """Send a frame; a worker that does not read loses its stream."""
        if self._outgoing.qsize() >= self._unsent_max:
            self.end(Overloaded("the worker does not read what it is sent"))
        elif not self.ended.done():
            self._outgoing.put_nowait(frame)

    async def next(self) -> AttachWorkerResponse | None:
        """Return the next frame for the worker; None after the last."""
        return await self._outgoing.get()


async def keep_checkpoint(
    repository: PostgresWorkerRepository, retry: Retry, link: WorkerLink, report: pb.WorkerCheckpoint
) -> None:
    """Keep a checkpoint of a call that the worker has in hand, and tell it; raises as `Retry.until_answered` does."""
    worker, call_id, epoch = link.worker.key, CallId(report.call_id), report.lease_epoch
    content = checkpoint_content(report.content_json)
    kept = bool(content) and await retry.until_answered(
        lambda: repository.keep_checkpoint(worker, call_id, epoch, content), call=call_id
    )
    receipt = pb.CheckpointReceipt(call_id=call_id, lease_epoch=epoch, number=report.number, kept=kept)
    link.send(AttachWorkerResponse(checkpoint=receipt))


async def put_back_unsent(repository: PostgresWorkerRepository, links: Iterable[WorkerLink], now: float) -> None:
    """Put back what workers hold and were never sent, because the answer to a claim was lost."""
    doubted = {link.worker.attachment: link for link in links if now < link.doubted_until and link.is_at_rest}
    for attachment, key, epoch in await repository.held(list(doubted)) if doubted else ():
        link = doubted[attachment]
        # What is being claimed now may be among them.
        if link.is_at_rest and link.in_hand.get(key.call_id) != epoch:
            await repository.put_back(key, epoch)
