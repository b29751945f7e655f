"""One suite with keys from a file and a certificate per service, for all tests of this folder except the rotation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest_asyncio
import trustme

from pawl.chassis.identity.roles import ROLES
from pawl.launcher.options import SuiteOptions
from pawl.launcher.plan import service_key_file
from pawl.launcher.services import STAGES
from pawl.launcher.suite import Suite
from tests import certificates
from tests.poll import put
from tests.servers import open_folder
from tests.system.access.walk import Answer, Metadata, served, walk

LISTENERS = ("agent-loop", "tool-registry", "job-store", "notifier")
ROLES_OF_CALLERS = {
    **{role.value: [role.value] for role in sorted(ROLES)},
    "nobody": [],
    "member-and-finance": ["member", "finance"],
    "viewer-and-worker": ["viewer", "worker"],
    "delegate-and-member": ["delegate", "member"],
    "delegate-and-finance": ["delegate", "finance"],
}


def bearer(secret: str) -> Metadata:
    return (("authorization", f"Bearer {secret}"),)


def key(caller: str) -> Metadata:
    return bearer(f"key-of-{caller}-0123456789")


Channels = Mapping[str, grpc.aio.Channel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    suite: Suite
    folder: Path
    people: Channels
    services: Mapping[str, Channels]
    methods: Mapping[str, Mapping[str, bool]]

    async def answers(self, metadata: Metadata, channels: Channels | None = None) -> dict[tuple[str, str], Answer]:
        return {
            (listener, name): answer
            for listener, channel in (channels or self.people).items()
            for name, answer in (await walk(channel, self.methods[listener], metadata)).items()
        }

    def of_service(self, service: str) -> Metadata:
        """Return the credential of a service, which may act for a user."""
        key = (self.suite.folder.path / "secrets" / service_key_file(service)).read_text().strip()
        return (*bearer(key), ("pawl-store", "acme"), ("pawl-user", "ann"))


def write_keys(path: Path, callers: Iterable[str]) -> None:
    entries = [
        {"key": f"key-of-{caller}-0123456789", "user_id": caller, "roles": ROLES_OF_CALLERS[caller]}
        | ({} if "deployment" in ROLES_OF_CALLERS[caller] else {"store_id": "acme"})
        for caller in callers
    ]
    put(path, json.dumps(entries))


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def walked() -> AsyncIterator[Walked]:
    """The suite. Its services call each other with certificates at separate listeners."""
    with open_folder() as folder:
        authority = trustme.CA()
        write_keys(folder / "keys.json", ROLES_OF_CALLERS)
        put(folder / "passwords.json", "{}")
        files = {spec.name: certificates.write(folder, spec.name, authority) for stage in STAGES for spec in stage}
        options = SuiteOptions(
            data=folder / "data",
            environment={
                "PAWL_API_KEYS_FILE": str(folder / "keys.json"),
                "PAWL_MAILBOX_PASSWORDS_FILE": str(folder / "passwords.json"),
            },
            service_environment={name: its.environment for name, its in files.items()},
        )
        async with Suite(options) as suite, AsyncExitStack() as stack:

            async def channels(protocol: str, shown: certificates.Files | None) -> Channels:
                addresses = {name: (suite.process(name).addresses or {}).get(protocol) for name in LISTENERS}
                opened = {name: _channel(address, files[name], shown) for name, address in addresses.items() if address}
                return {name: await stack.enter_async_context(channel) for name, channel in opened.items()}

            people = await channels("grpc", None)
            yield Walked(
                suite=suite,
                folder=folder,
                people=people,
                services={name: await channels("internal", files[name]) for name in files},
                methods={name: await served(channel, key("member")) for name, channel in people.items()},
            )


def _channel(address: str, trusted: certificates.Files, shown: certificates.Files | None) -> grpc.aio.Channel:
    own = (shown.key.read_bytes(), shown.certificate.read_bytes()) if shown else (None, None)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted.authority.read_bytes(), *own))
