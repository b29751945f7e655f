"""`python -m bench.guesses`: checks whether the duration of refusals reveals which objects exist.

In each group, the calls use one connection to a service of a running suite, in random order, and all of them are
refused with the same message. For each kind of call, the program prints the difference between its median and that of
the group's first kind, with a 95 % confidence interval. It also prints the probability that a call of this kind takes
longer (0.5 if the kinds are indistinguishable), with its p-value.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table

from bench.differences import difference
from bench.world import scratch
from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.identity.v1 import key_pb2
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.launcher import Suite, SuiteOptions
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from pawl.server.identity.key_rows import SECRET_BYTES, secret_of

# Number of different calls of each kind, which are used in rotation.
_POOL: Final = 40
# Number of failed logins from one address after which lookups are refused.
_FAILURES_AT_ONCE: Final = 30
_EXPIRY_SECONDS: Final = 3.0
_AGENT: Final = "/pawl.agent.v1.AgentService"
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_USERS: Final[Mapping[str, Mapping[str, object]]] = {
    "olga": {"roles": ["deployment"]},
    "ann": {"store_id": "acme", "roles": ["member", "operator"]},
    "bob": {"store_id": "acme", "roles": ["member"]},
    "eve": {"store_id": "other", "roles": ["member"]},
}

Metadata = Sequence[tuple[str, str]]
Call = Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Calls that are refused for the same reason."""

    name: str
    calls: Sequence[Call]


async def refusal(call: Call) -> tuple[float, str]:
    """Return the duration of the refusal in seconds, and its message."""
    began = time.perf_counter()
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        return time.perf_counter() - began, f"{error.code().name}: {error.details()}"
    raise RuntimeError("a call that should be refused was answered")


async def take(kinds: Sequence[Kind], count: int) -> dict[str, list[float]]:
    """Make `count` calls of each kind in random order. Return their durations in seconds.

    Raises:
        RuntimeError: the messages differ.
    """
    turns = [kind for kind in kinds for _ in range(count)]
    random.shuffle(turns)
    times: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    words = set()
    for kind in turns:
        seconds, said = await refusal(kind.calls[len(times[kind.name]) % len(kind.calls)])
        times[kind.name].append(seconds)
        words.add(said)
    if len(words) > 1:
        raise RuntimeError(f"their messages differ: {sorted(words)}")
    return times


def show(title: str, times: Mapping[str, Sequence[float]]) -> None:
    """Print the kinds of a group, each compared with the first kind."""
    table = Table("", "calls", "median", "difference", "95 % of it", "longer", "by luck", title=title)
    reference = next(iter(times.values()))
    for name, each in times.items():
        row = [name, f"{len(each)}", f"{statistics.median(each) * 1e6:,.0f} us"]
        if each is not reference:
            found = difference(each, reference)
            between = f"{found.low_seconds * 1e6:+.0f} to {found.high_seconds * 1e6:+.0f} us"
            row += [f"{found.median_seconds * 1e6:+.1f} us", between, f"{found.chance:.3f}", f"{found.by_luck:.2g}"]
        table.add_row(*row)
    Console(width=120).print(table)


class World:
    """A suite with two stores, and the requests that it refuses."""

    def __init__(self, suite: Suite, stack: AsyncExitStack) -> None:
        self._suite = suite
        self._stack = stack
        self._channels: dict[str, grpc.aio.Channel] = {}

    def address(self, service: str) -> str:
        return (self._suite.process(service).addresses or {})["grpc"]

    async def channel(self, service: str) -> grpc.aio.Channel:
        """Return the only connection to a service."""
        if service not in self._channels:
            opened = grpc.aio.insecure_channel(self.address(service))
            self._channels[service] = await self._stack.enter_async_context(opened)
        return self._channels[service]

    async def credentials(self) -> dict[str, list[str]]:
        """Return secrets of invalid keys, by the reason why they are invalid."""
        stub: Any = KeyServiceStub(await self.channel("job-store"))

        async def make(expire_time: Timestamp | None = None) -> key_pb2.CreateKeyResponse:
            key = key_pb2.Key(name="k", store_id="acme", user_id="ann", roles=["member"], expire_time=expire_time)
            made: key_pb2.CreateKeyResponse = await stub.CreateKey(
                key_pb2.CreateKeyRequest(key=key), metadata=identity("olga")
            )
            return made

        revoked = [await make() for _ in range(_POOL)]
        for each in revoked:
            await stub.RevokeKey(key_pb2.RevokeKeyRequest(key_id=each.key.key_id), metadata=identity("olga"))
        expired = []
        for _ in range(_POOL):
            soon = Timestamp()
            soon.FromMilliseconds(int((time.time() + _EXPIRY_SECONDS) * 1000))
            expired.append(await make(soon))
        unknown = [secret_of(secrets.token_bytes(SECRET_BYTES)) for _ in range(_POOL)]
        await asyncio.sleep(_EXPIRY_SECONDS)
        return {
            "no such key": unknown,
            "revoked key": [each.secret for each in revoked],
            "expired key": [each.secret for each in expired],
            "a wrong checksum": [f"{each[:-1]}{'a' if each[-1] != 'a' else 'b'}" for each in unknown],
        }

    async def run_ids(self, user: str) -> list[str]:
        """Start runs of a user. Return their ids once they have ended."""
        stub: Any = AgentServiceStub(await self.channel("agent-loop"))
        found = []
        for _ in range(_POOL):
            started = await stub.StartRun(agent_pb2.StartRunRequest(text="who are you?"), metadata=identity(user))
            async for _ in stub.WatchRun(agent_pb2.WatchRunRequest(run_id=started.run.run_id), metadata=identity(user)):
                pass
            found.append(started.run.run_id)
        return found

    async def notification_ids(self, user: str) -> list[str]:
        """Return ids of the notifications in a user's inbox, once there are enough of them."""
        stub: Any = NotifyServiceStub(await self.channel("notifier"))
        while True:
            request = notify_pb2.ListNotificationsRequest(page_size=_POOL)
            answer = await stub.ListNotifications(request, metadata=identity(user))
            if len(answer.notifications) == _POOL:
                return [each.notification_id for each in answer.notifications]
            await asyncio.sleep(0.1)

    async def key_ids(self, store_id: str) -> list[str]:
        """Create keys of a store and return their ids."""
        stub: Any = KeyServiceStub(await self.channel("job-store"))
        key = key_pb2.Key(name="k", store_id=store_id, user_id="eve", roles=["member"])
        request = key_pb2.CreateKeyRequest(key=key)
        return [(await stub.CreateKey(request, metadata=identity("olga"))).key.key_id for _ in range(_POOL)]


def identity(user: str) -> Metadata:
    return (("authorization", f"Bearer key-of-{user}-0123456789"),)


def like(ids: Sequence[str]) -> list[str]:
    """Return random ids of the same form."""
    return [each[:-12] + "".join(random.choices(_ALPHABET, k=12)) for each in ids]


def calling(channel: grpc.aio.Channel, method: str, requests: Sequence[Message], metadata: Metadata) -> list[Call]:
    """Return calls of a method that should all be refused."""
    begin: Any = channel.unary_stream(method)

    def one(raw: bytes) -> Call:
        async def call() -> None:
            await begin(raw, metadata=metadata, timeout=30).read()

        return call

    return [one(request.SerializeToString()) for request in requests]


def logins(channel: grpc.aio.Channel, credentials: Sequence[str]) -> list[Call]:
    method, asked = f"{_AGENT}/ListRuns", agent_pb2.ListRunsRequest()
    return [calling(channel, method, [asked], (("authorization", f"Bearer {each}"),))[0] for each in credentials]


@asynccontextmanager
async def from_other_addresses(address: str) -> AsyncIterator[str]:
    """Yield the address of a proxy that forwards each connection from another local address."""
    host, _, port = address.rpartition(":")
    count = 0

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        mine = (f"127.{1 + count // 200}.0.{1 + count % 200}", 0)
        there, back = await asyncio.open_connection(host, int(port), local_addr=mine)
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def lookups(address: str, secrets_of: Mapping[str, Sequence[str]], count: int) -> dict[str, list[float]]:
    """Return the durations of logins that need a lookup, because few logins from their address have failed."""
    times: dict[str, list[float]] = {name: [] for name in secrets_of}
    each = _FAILURES_AT_ONCE // len(secrets_of) - 1

    async def connect(turn: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(relay, options=options) as channel:
            chosen = {name: [pool[(turn * each + n) % _POOL] for n in range(each)] for name, pool in secrets_of.items()}
            kinds = [Kind(name=name, calls=logins(channel, pool)) for name, pool in chosen.items()]
            for name, found in (await take(kinds, each)).items():
                times[name] += found

    async with from_other_addresses(address) as relay:
        turns = range(math.ceil(count / each))
        for first in turns[::8]:
            await asyncio.gather(*map(connect, turns[first : first + 8]))
    return times


async def objects(world: World, count: int) -> None:
    """Measure refusals of access to other users' objects."""
    bobs, eves = await world.run_ids("bob"), await world.run_ids("eve")
    runs = {"no such run": like(bobs), "of another user": bobs, "of another store": eves}
    key_ids, told = await world.key_ids("other"), await world.notification_ids("bob")
    keys = {"no such key": like(key_ids), "of another store": key_ids}
    notifications = {"no such notification": like(told), "of another user": told}
    groups: list[tuple[str, str, Mapping[str, Sequence[str]], Callable[[str], Message]]] = [
        ("agent-loop", f"{_AGENT}/GetRun", runs, lambda one: agent_pb2.GetRunRequest(run_id=one)),
        ("agent-loop", f"{_AGENT}/WatchRun", runs, lambda one: agent_pb2.WatchRunRequest(run_id=one)),
        (
            "agent-loop",
            f"{_AGENT}/CancelRun",
            runs,
            lambda one: agent_pb2.CancelRunRequest(run_id=one),
        ),
        ("job-store", "/pawl.identity.v1.KeyService/RevokeKey", keys, lambda one: key_pb2.RevokeKeyRequest(key_id=one)),
        (
            "notifier",
            "/pawl.notify.v1.NotifyService/AcknowledgeNotifications",
            notifications,
            lambda one: notify_pb2.AcknowledgeNotificationsRequest(notification_ids=[one]),
        ),
    ]
    for service, method, ids_of, request in groups:
        channel = await world.channel(service)
        kinds = [
            Kind(name=name, calls=calling(channel, method, [request(each) for each in ids], identity("ann")))
            for name, ids in ids_of.items()
        ]
        show(method.rpartition("/")[2], await take(kinds, count))


async def main(count: int, lookups_count: int) -> None:
    async with scratch() as data, AsyncExitStack() as stack:
        keys = [{"key": f"key-of-{name}-0123456789", "user_id": name, **more} for name, more in _USERS.items()]
        (data / "keys.json").write_text(json.dumps(keys))
        environment = {"PAWL_API_KEYS_FILE": str(data / "keys.json")}
        options = SuiteOptions(data=Path(data / "pawl"), environment=environment)
        world = World(await stack.enter_async_context(Suite(options)), stack)
        found = await world.credentials()
        looked = {name: pool for name, pool in found.items() if name != "a wrong checksum"}
        times = await lookups(world.address("agent-loop"), looked, lookups_count)
        show("Keys that need a lookup", times)
        channel = await world.channel("agent-loop")
        kinds = [Kind(name=name, calls=logins(channel, pool)) for name, pool in found.items()]
        await take(kinds, _FAILURES_AT_ONCE)
        show("Keys, after too many failures", await take(kinds, count))
        await objects(world, count)
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.guesses", description=__doc__)
    parser.add_argument("--calls", type=int, default=3000, help="calls of each kind")
    parser.add_argument("--lookups", type=int, default=600, help="logins of each kind that need a lookup")
    given = parser.parse_args()
    asyncio.run(main(given.calls, given.lookups))
