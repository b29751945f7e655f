"""A client for one user: repeats a request through any replica until it is answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc

from pawl.agent.v1 import agent_pb2_grpc, types_pb2
from pawl.chassis.rpc.status import from_rpc_error
from tests.chaos.history import History, Kind, Operation, Outcome
from tests.simulation.record import run_state

Stub: TypeAlias = "agent_pb2_grpc.AgentServiceAsyncStub"
Metadata = tuple[tuple[str, str], ...]
T = TypeVar("T")

# How long a client waits for one answer before it tries the next replica.
ATTEMPT_SECONDS = 4.0

_RETRY_SECONDS = 0.15
_RETRIED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
    }
)
_NEVER_SEEN = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})


class Refused(Exception):
    """Raised on a final error, which a retry would not change."""


class Caller:
    def __init__(
        self, stubs: list[Stub], history: History, draw: random.Random, *, store_id: str, user_id: str
    ) -> None:
        self.stubs = stubs
        self.history = history
        self.draw = draw
        self.store_id = store_id
        self.user_id = user_id
        self._count = 0

    @property
    def metadata(self) -> Metadata:
        return (("pawl-store", self.store_id), ("pawl-user", self.user_id))

    def invoke(self, kind: Kind, request_id: str, **about: str) -> Operation:
        return self.history.invoke(kind, store_id=self.store_id, user_id=self.user_id, request_id=request_id, **about)

    def next_id(self, word: str) -> str:
        self._count += 1
        return f"{word}-{self.store_id}-{self.user_id}-{self._count}"

    async def send(self, method: str, request: Any, *, seconds: float = ATTEMPT_SECONDS) -> Any:
        """Send a request once, to a random replica of agent-loop."""
        return await getattr(self.draw.choice(self.stubs), method)(request, metadata=self.metadata, timeout=seconds)

    async def ask(self, operation: Operation, method: str, request: Any) -> Any:
        """Repeat a request until it is answered; each attempt is recorded.

        Raises:
            Refused: the error is final.
        """
        while True:
            try:
                answer = await self.send(method, request)
            except grpc.aio.AioRpcError as error:
                again = await self._failed(error)
                self.history.answer(operation, Outcome.UNKNOWN if again else Outcome.REFUSED, _reason(error))
                if not again:
                    raise Refused(_reason(error)) from None
                continue
            except asyncio.CancelledError:
                self.history.answer(operation, Outcome.UNKNOWN, "CANCELLED")
                raise
            run = answer.goal.run if operation.kind is Kind.GOAL else answer.run
            receipts = getattr(answer, "receipts", None) or [getattr(answer, "receipt", None)]
            self.history.answer(
                operation,
                Outcome.OK,
                status_name(receipts[0]) if receipts[0] else "",
                run_id=run.run_id,
                conversation_id=run.conversation_id,
                run_state=run_state(run.state),
            )
            return answer

    async def read(self, send: Callable[[], Awaitable[T]]) -> T:
        """Repeat a read until it is answered.

        Raises:
            Refused: the error is final.
        """
        while True:
            try:
                return await send()
            except grpc.aio.AioRpcError as error:
                if not await self._failed(error):
                    raise Refused(_reason(error)) from None

    async def _failed(self, error: grpc.aio.AioRpcError) -> bool:
        """Return whether to send the request again. If so, pause first."""
        strange = error.code() in _NEVER_SEEN
        if strange:
            self.history.complain(f"{error.code().name}: {error.details()}")
        again = strange or error.code() in _RETRIED or _reason(error) == "OVERLOADED"
        if again:
            await asyncio.sleep(_RETRY_SECONDS)
        return again


async def pages(send: Callable[[Any], Awaitable[Any]], request: Any, field: str) -> list[Any]:
    found: list[Any] = []
    while True:
        answer = await send(request)
        found += getattr(answer, field)
        request.page_token = answer.next_page_token
        if not request.page_token:
            return found


async def settled(*asks: Awaitable[object]) -> None:
    """Wait for several requests and ignore refusals."""
    for result in await asyncio.gather(*asks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, Refused):
            raise result


def status_name(receipt: types_pb2.Receipt) -> str:
    return types_pb2.ReceiptStatus.Name(receipt.status).removeprefix("RECEIPT_STATUS_")


def _reason(error: grpc.aio.AioRpcError) -> str:
    return from_rpc_error(error).reason or error.code().name
