"""Erases conversations in services that store parts of them. job-store lists what to erase."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import grpc

from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.client import translated, translating
from pawl.errors import PawlError, Unavailable
from pawl.job.v1 import erasure_pb2 as pb
from pawl.job.v1.erasure_pb2_grpc import ErasureServiceStub

_POLL_SECONDS: Final = 5.0
_DEADLINE_SECONDS: Final = 30.0

_log = logs.get_logger(__name__)


ErasurePart: TypeAlias = pb.ListErasuresResponse
# Some runs and calls of an erased conversation.


class ErasureWork:
    """Runs `erase` for each conversation that job-store lists, then confirms the erasure. Idempotent."""

    def __init__(
        self, job_store: grpc.aio.Channel, erase: Callable[[ErasurePart], Awaitable[None]], clock: Clock
    ) -> None:
        self._stub = ErasureServiceStub(job_store)
        self._erase = erase
        self._clock = clock

    async def run(self) -> None:
        """Poll for erasures every five seconds."""
        while True:
            try:
                await self.sweep()
            except PawlError as error:
                _log.debug("erasures.postponed", reason=error.reason)
            except Exception:  # noqa: BLE001  # retried at the next poll
                _log.exception("erasures.failed")
            await self._clock.sleep(_POLL_SECONDS)

    async def sweep(self) -> None:
        """Erase all listed conversations. A conversation that cannot be erased waits for the next sweep."""
        failed: set[tuple[str, str]] = set()
        with translating():
            async for part in self._stub.ListErasures(pb.ListErasuresRequest(), timeout=_DEADLINE_SECONDS):
                key = part.store_id, part.conversation_id
                if key in failed:
                    continue
                try:
                    await self._erase(part)
                    if part.last:
                        done = pb.ConfirmErasureRequest(store_id=part.store_id, conversation_id=part.conversation_id)
                        await translated(self._stub.ConfirmErasure(done))
                except Exception as error:  # noqa: BLE001  # one conversation must not block others
                    log = _log.info if isinstance(error, Unavailable) else _log.exception
                    log("erasures.not_erased", store=key[0], conversation=key[1], error=type(error).__name__)
                    failed.add(key)
