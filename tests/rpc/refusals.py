"""Checks that calls are refused."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable
from typing import Any, TypeVar

import grpc
import pytest

from pawl.chassis.rpc.status import from_rpc_error
from pawl.errors import PawlError

E = TypeVar("E", bound=BaseException)


async def raises(error: type[E], *calls: Awaitable[Any] | AsyncIterable[Any], match: str | None = None) -> E:
    """Check that each call, one after the other, raises `error`, and return the last one.

    A status of gRPC counts as the PawlError that it reports.
    """
    for number, call in enumerate(calls):
        with pytest.raises(error, match=match) as caught:
            try:
                result = [each async for each in call] if isinstance(call, AsyncIterable) else await call
            except grpc.aio.AioRpcError as refused:
                raise from_rpc_error(refused) from refused
            pytest.fail(f"call {number} returned {result!r:.300} instead of raising {error.__name__}")
    return caught.value


async def reason_of(call: Awaitable[Any] | AsyncIterable[Any]) -> str:
    return (await raises(PawlError, call)).reason
