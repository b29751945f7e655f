"""Keys for the suites and processes that tests start, and channels that send the local key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

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
    channel = grpc.aio.insecure_channel(address, options=options)
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, kind, _keyed(getattr(channel, kind)))
    return channel


def _keyed(new_method: Callable[..., Any]) -> Callable[..., Any]:
    def keyed(*args: Any, **kwargs: Any) -> Any:
        method = new_method(*args, **kwargs)

        def call(*args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any) -> Any:
            given = tuple(metadata or ())
            shown = () if any(name == "authorization" for name, _ in given) else METADATA
            return method(*args, metadata=(*shown, *given), **kwargs)

        return call

    return keyed
