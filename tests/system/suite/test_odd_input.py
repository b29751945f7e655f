"""Odd input to every method of the contract: an answer or an error of a kind that the contract knows."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pawl.launcher.suite import Suite
from tests.keys import keyed_channel
from tests.system.suite import odd_requests, refusals
from tests.system.suite.refusals import TAKEN, Refusal
from tests.system.suite.test_bad_input import no_complaints

__all__ = ["no_complaints"]

pytestmark = pytest.mark.asyncio(loop_scope="session")

_AT_ONCE_MAX = 8
_SECONDS_MAX = 60.0
# Of its own: a rule that says no is odd, and stays.
_STORE = (("pawl-store", "odd"), ("pawl-user", "odd"))
_FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


async def _ask(channel: grpc.aio.Channel, odd: odd_requests.Odd) -> Refusal:
    _, method, _, data, streams = odd
    if not streams:
        unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{method}")
        return await refusals.outcome(unary(data, metadata=_STORE, timeout=_SECONDS_MAX))
    behaviour: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{method}")
    stream = behaviour(data, metadata=_STORE, timeout=_SECONDS_MAX)
    try:
        await stream.read()
    except grpc.aio.AioRpcError as error:
        return refusals.read(error)
    finally:
        stream.cancel()
    return TAKEN


async def test_no_odd_value_in_any_request_is_a_fault_of_the_program(suite: Suite) -> None:
    """LOOP-15: UNKNOWN and INTERNAL are never seen, and an error has its reason."""
    options = [("grpc.max_send_message_length", -1)]
    channels = {
        process: keyed_channel(suite.endpoints.services[process][0].grpc, options=options)
        for process in ("agent-loop", "tool-registry", "notifier")
    }
    places = asyncio.Semaphore(_AT_ONCE_MAX)

    async def judge(odd: odd_requests.Odd) -> str:
        async with places:
            found = await _ask(channels[odd[0]], odd)
        is_fault = found.code in _FAULTS or (found != TAKEN and not found.reason)
        return f"{odd[1]} {odd[2]}: {found.code} {found.reason}" if is_fault else ""

    found = await asyncio.gather(*map(judge, odd_requests.all_odd()))
    for channel in channels.values():
        await channel.close()
    assert list(filter(None, found)) == []
