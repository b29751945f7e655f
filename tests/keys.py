"""Keys for the suites and processes that tests start, and channels that send the local key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import grpc
import msgspec

from pawl.chassis.identity.auth import service_principal
from pawl.server.identity.credentials import ApiKey, KeyAuthenticator, parse_keys
from pawl.server.identity.key_rows import digest_of

LOCAL_KEY: Final = "local-key-of-the-tests"
SERVICE_KEY: Final = "service-key-of-the-tests"
# Has the digest of SERVICE_KEY as agent-loop's key, which may call most methods
SERVICE_KEYS_FILE: Final = Path(__file__).with_name("service-keys.json")
# Settings of a service that a test starts without a suite
ENVIRONMENT: Final = {
    "PAWL_LOCAL_KEY": LOCAL_KEY,
    "PAWL_SERVICE_KEY": SERVICE_KEY,
    "PAWL_SERVICE_KEYS_FILE": str(SERVICE_KEYS_FILE),
}
METADATA: Final = (("authorization", f"Bearer {LOCAL_KEY}"),)


def authenticator(
    keys: Sequence[ApiKey] = (), *, service_key: str | None = None, local_key: str | None = None
) -> KeyAuthenticator:
    found = parse_keys(msgspec.json.encode(keys))
    services = {digest_of(service_key): service_principal("agent-loop")} if service_key else {}
    return KeyAuthenticator(keys=lambda: found, services=lambda: services, local_key=local_key)


def keyed_channel(address: str, *, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """Return a plaintext channel. Its calls send the local key unless they have their own key."""
    return _KeyedChannel(grpc.aio.insecure_channel(address, options=options))


class _KeyedChannel(grpc.aio.Channel):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _keyed(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _keyed(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _keyed(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _keyed(self._channel.stream_stream(*args, **kwargs))


def _keyed(method: Any) -> Any:
    def call(*args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any) -> Any:
        given = tuple(metadata or ())
        shown = () if any(name == "authorization" for name, _ in given) else METADATA
        return method(*args, metadata=(*shown, *given), **kwargs)

    return call
