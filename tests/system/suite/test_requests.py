"""Invalid requests to every method of every service get typed errors and log no traceback."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from pawl.chassis.identity.roles import CALLERS, ROLES, Role
from pawl.launcher.suite import Suite
from tests import contract
from tests.keys import METADATA
from tests.system.access.walk import OPEN, is_forwarded, served
from tests.system.suite import refusals, requests
from tests.system.suite.client import addresses
from tests.system.suite.refusals import TAKEN

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVICES = ("agent-loop", "tool-registry", "job-store", "notifier")
_COMPLAINTS = re.compile(r"rpc\.failed|Traceback|never awaited|never retrieved")
_AT_ONCE_MAX = 8
_SECONDS_MAX = 60.0
# A stream that is silent for this long has accepted its request.
_NEWS_SECONDS = 1.0
# Its own store: a rule that denies calls is an unusual request too, and stays.
_ODD_STORE = (*METADATA, ("pawl-store", "odd"), ("pawl-user", "odd"))


@pytest.fixture(scope="module", autouse=True)
def no_complaints(suite: Suite) -> Iterator[None]:
    """Check that no log has a traceback: an invalid request is the client's fault."""
    logs = [path for path in suite.folder.logs.glob("*.log") if not path.name.startswith("postgres")]
    began = {path: path.stat().st_size for path in logs}
    yield
    for path, offset in began.items():
        new = path.read_bytes()[offset:].decode(errors="replace")
        assert [line for line in new.splitlines() if _COMPLAINTS.search(line)] == [], path.name


def channel_to(suite: Suite, service: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(addresses(suite, service)[0], options=[("grpc.max_send_message_length", -1)])


async def ask(channel: grpc.aio.Channel, path: str, data: bytes, *, streams: bool) -> refusals.Refusal:
    if not streams:
        unary: Any = channel.unary_unary(path)
        return await refusals.outcome(unary(data, metadata=_ODD_STORE, timeout=_SECONDS_MAX))
    behaviour: Any = channel.unary_stream(path)
    stream = behaviour(data, metadata=_ODD_STORE, timeout=_SECONDS_MAX)
    try:
        async with asyncio.timeout(_NEWS_SECONDS):
            return await refusals.outcome(stream.read())
    except TimeoutError:
        return TAKEN
    finally:
        stream.cancel()


@pytest.mark.parametrize("service", SERVICES)
async def test_no_unusual_value_in_any_request_causes_an_internal_error(suite: Suite, service: str) -> None:
    """LOOP-15: every method gets malformed bytes, and each of its fields out of range or over its limit.

    The answer is OK or a reason that the contract lists for the method, never UNKNOWN or INTERNAL.
    """
    slots = asyncio.Semaphore(_AT_ONCE_MAX)
    async with channel_to(suite, service) as channel:

        async def judge(path: str, what: str, data: bytes, *, streams: bool) -> str:
            async with slots:
                found = await ask(channel, path, data, streams=streams)
            if what in requests.GARBAGE:
                is_right = found == refusals.Refusal(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")
            else:
                is_right = found == TAKEN or found.reason in contract.documented()[path]
            return "" if is_right else f"{path} {what}: {found}"

        there = (await served(channel, METADATA)).items()
        # agent-loop forwards the requests of users to job-store.
        names = [name for name, many in there if not many and name not in OPEN and not is_forwarded((service, name))]
        methods = {name: requests.method_of(name) for name in names if CALLERS[name] & (ROLES - {Role.DEPLOYMENT})}
        assert methods
        seen: set[str] = set()
        found = await asyncio.gather(
            *(
                judge(name, what, data, streams=method.server_streaming)
                for name, method in methods.items()
                for what, data in (*requests.GARBAGE.items(), *requests.odd(method, seen))
            )
        )
        nope = await ask(channel, f"{next(iter(methods))}Nope", b"", streams=False)
    assert list(filter(None, found)) == []
    assert (nope.code, nope.reason) == (grpc.StatusCode.UNIMPLEMENTED, "METHOD_NOT_FOUND")
