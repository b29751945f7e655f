"""Reads the errors of failed calls."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from pawl.chassis.rpc.status import from_rpc_error
from pawl.errors import PawlError


async def failure(call: Awaitable[Any]) -> PawlError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is not grpc.StatusCode.UNKNOWN
    return from_rpc_error(caught.value)


async def reason(call: Awaitable[Any]) -> str:
    return (await failure(call)).reason
