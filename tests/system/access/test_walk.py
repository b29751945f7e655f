"""OPS-1: every method of every listener answers each caller as the table of methods and roles says."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import trustme
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.batch.v1 import batch_pb2, batch_pb2_grpc
from pawl.chassis.key_rows import secret_of
from pawl.chassis.roles import CALLERS, ROLES
from pawl.identity.v1 import key_pb2
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.launcher.options import SuiteOptions
from pawl.launcher.plan import service_key_file
from pawl.launcher.suite import Suite
from tests import certificates
from tests.files import put
from tests.poll import until
from tests.system.access.walk import OPEN, Answer, Metadata, methods, served, walk, wrong

pytestmark = pytest.mark.asyncio(loop_scope="module")

LISTENERS = ("agent-loop", "tool-registry", "job-store", "notifier")
CARRIED = ("agent-loop", "tool-registry", "notifier")
KNOW_SERVICES = ("tool-registry", "job-store")
ROLES_OF_CALLERS = {
    **{role.value: [role.value] for role in sorted(ROLES)},
    "nobody": [],
    "leaving": ["member"],
    "member-and-finance": ["member", "finance"],
    "viewer-and-worker": ["viewer", "worker"],
    "delegate-and-member": ["delegate", "member"],
    "delegate-and-finance": ["delegate", "finance"],
}
BAD = {
    "absent": (),
    "empty": (("authorization", ""),),
    "no key": (("authorization", "Bearer "),),
    "no scheme": (("authorization", "key-of-admin-0123456789"),),
    "another scheme": (("authorization", "Basic a2V5LW9mLWFkbWlu"),),
    "huge": (("authorization", f"Bearer {'x' * 9000}"),),
    "two": (("authorization", "Bearer key-of-admin-0123456789"), ("authorization", "Bearer key-of-admin-0123456789")),
    "two, one empty": (("authorization", "Bearer key-of-admin-0123456789"), ("authorization", "")),
}
UNKNOWN = {
    "short": "x",
    "beside a known one": "key-of-admin-012345678",
    "of another case": "KEY-OF-ADMIN-0123456789",
    "of the form of a token": "eyJhbGciOiJub25lIn0.eyJzdWIiOiJtZSJ9.",
    "long": "y" * 4000,
}


def bearer(secret: str) -> Metadata:
    return (("authorization", f"Bearer {secret}"),)


def key(caller: str) -> Metadata:
    return bearer(f"key-of-{caller}-0123456789")


Channels = Mapping[str, grpc.aio.Channel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """A running suite: channels to its listeners, for people and for each service, and the methods that they have."""

    people: Channels
    services: Mapping[str, Channels]
    methods: Mapping[str, Mapping[str, bool]]
    secrets: Path
    keys: Path

    async def answers(self, metadata: Metadata, channels: Channels | None = None) -> dict[tuple[str, str], Answer]:
        """Call everything everywhere."""
        return {
            (listener, name): answer
            for listener, channel in (channels or self.people).items()
            for name, answer in (await walk(channel, self.methods[listener], metadata)).items()
        }

    def of_service(self, service: str) -> Metadata:
        """Return the credential of one of the services."""
        return bearer((self.secrets / service_key_file(service)).read_text().strip())


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Not pytest's own: that is closed to the account under which PostgreSQL runs when the tests run as root.
    with tempfile.TemporaryDirectory(prefix="pawl-suite-") as folder:
        yield Path(folder)


def write_keys(path: Path, callers: Iterable[str]) -> None:
    entries = [
        {"key": f"key-of-{caller}-0123456789", "user_id": caller, "roles": ROLES_OF_CALLERS[caller]}
        | ({} if "deployment" in ROLES_OF_CALLERS[caller] else {"store_id": "acme"})
        for caller in callers
    ]
    put(path, json.dumps(entries))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["plain", "tls"])
async def walked(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Walked]:
    """A suite whose callers have keys of a file; with certificates, services call at listeners of their own."""
    files: dict[str, certificates.Files] = {}
    keys = folder / f"{request.param}.json"
    write_keys(keys, ROLES_OF_CALLERS)
    if request.param == "tls":
        authority = trustme.CA()
        files = {name: certificates.write(folder, name, authority) for name in LISTENERS}
    options = SuiteOptions(
        data=folder / request.param,
        environment={"PAWL_API_KEYS_FILE": str(keys)},
        service_environment={name: its.environment for name, its in files.items()},
    )
    async with Suite(options) as suite, AsyncExitStack() as stack:

        async def channels(protocol: str, shown: certificates.Files | None) -> Channels:
            addresses = {name: (suite.process(name).addresses or {}).get(protocol) for name in LISTENERS}
            trusted = files["agent-loop"].authority if files else None
            opened = {name: _channel(address, trusted, shown) for name, address in addresses.items() if address}
            return {name: await stack.enter_async_context(channel) for name, channel in opened.items()}

        people = await channels("grpc", None)
        yield Walked(
            people=people,
            services={name: await channels("internal", files[name]) if files else people for name in LISTENERS},
            methods={name: await served(channel, key("member")) for name, channel in people.items()},
            secrets=suite.folder.path / "secrets",
            keys=keys,
        )


def _channel(address: str, trusted: Path | None, shown: certificates.Files | None) -> grpc.aio.Channel:
    if trusted is None:
        return grpc.aio.insecure_channel(address)
    own = (shown.key.read_bytes(), shown.certificate.read_bytes()) if shown else (None, None)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted.read_bytes(), *own))


async def test_every_method_of_the_contract_is_walked(walked: Walked) -> None:
    everything = {name for names in walked.methods.values() for name in names}
    assert everything == set(methods())
    assert everything - OPEN.keys() == set(CALLERS)


@pytest.mark.parametrize("caller", ROLES_OF_CALLERS)
async def test_a_role_calls_what_the_table_says(walked: Walked, caller: str) -> None:
    callers = {role for role in ROLES_OF_CALLERS[caller] if role in ROLES} or {"member"}
    if caller == "delegate-and-finance":
        callers = set()  # It hands on what opens nothing, and has nothing beside.
    assert wrong(await walked.answers(key(caller)), callers, "PERMISSION_DENIED") == {}


@pytest.mark.parametrize("service", LISTENERS)
async def test_a_service_calls_what_the_table_says(walked: Walked, service: str) -> None:
    answers = await walked.answers(walked.of_service(service), walked.services[service])
    known = {at: answer for at, answer in answers.items() if at[0] in KNOW_SERVICES}
    assert wrong(known, {f"service:{service}"}, "PERMISSION_DENIED") == {}
    others = {at: answer for at, answer in answers.items() if at[0] not in KNOW_SERVICES}
    assert wrong(others, set(), "UNAUTHENTICATED") == {}


@pytest.mark.parametrize("service", LISTENERS)
async def test_the_key_of_a_service_opens_nothing_without_its_certificate(walked: Walked, service: str) -> None:
    if walked.services[service] is walked.people:
        return  # There are none.
    shown = walked.of_service(service)
    another = walked.services["notifier" if service != "notifier" else "job-store"]
    for channels in (walked.people, another):
        assert wrong(await walked.answers(shown, channels), set(), "UNAUTHENTICATED") == {}


@pytest.mark.parametrize("listener", KNOW_SERVICES)
@pytest.mark.parametrize("service", CARRIED)
async def test_a_batch_carries_what_the_table_says(walked: Walked, listener: str, service: str) -> None:
    stub: Any = batch_pb2_grpc.BatchServiceStub(walked.services[service][listener])
    names = [
        name for name, many in walked.methods[listener].items() if not many and not CALLERS.get(name, ROLES) & ROLES
    ]
    calls = [batch_pb2.Call(id=n, method=name) for n, name in enumerate(names, 1)]
    stream = stub.Batch(metadata=walked.of_service(service), timeout=60.0)
    await stream.write(batch_pb2.BatchRequest(calls=calls))
    reasons: dict[str, str] = {}
    while len(reasons) < len(names):
        message = await stream.read()
        reasons |= {names[reply.id - 1]: reply.failure.reason for reply in message.replies if reply.last}
    stream.cancel()
    refused = {name for name, reason in reasons.items() if reason == "PERMISSION_DENIED"}
    assert refused == {name for name in names if f"service:{service}" not in CALLERS[name]}


@pytest.mark.parametrize("how", BAD)
async def test_a_credential_that_is_none_opens_nothing(walked: Walked, how: str) -> None:
    assert wrong(await walked.answers(BAD[how]), set(), "UNAUTHENTICATED") == {}


async def test_every_unknown_key_gets_the_same_answer_everywhere(walked: Walked) -> None:
    """It does not tell which keys, users or methods there are."""
    told = set()
    for unknown in UNKNOWN.values():
        answers = await walked.answers(bearer(unknown))
        assert wrong(answers, set(), "UNAUTHENTICATED") == {}
        told |= {answer for (_, name), answer in answers.items() if name not in OPEN}
    assert len(told) == 1


async def test_keys_that_were_revoked_have_expired_or_are_of_elsewhere_are_unknown(walked: Walked) -> None:
    stub: Any = KeyServiceStub(walked.people["job-store"])
    soon = Timestamp()
    soon.FromMilliseconds(int(time.time() * 1000) + 1500)
    made = {
        name: await stub.CreateKey(
            key_pb2.CreateKeyRequest(
                key=key_pb2.Key(name=name, store_id="acme", user_id="ann", roles=[role], expire_time=expire_time)
            ),
            metadata=key("deployment"),
        )
        for name, role, expire_time in (("live", "viewer", None), ("revoked", "admin", None), ("old", "admin", soon))
    }

    async def is_right(secret: str, callers: set[str], refusal: str) -> bool:
        return not wrong(await walked.answers(bearer(secret)), callers, refusal)

    await until(lambda: is_right(made["live"].secret, {"viewer"}, "PERMISSION_DENIED"))
    await stub.RevokeKey(key_pb2.RevokeKeyRequest(key_id=made["revoked"].key.key_id), metadata=key("deployment"))
    told = set()
    for secret in (made["revoked"].secret, made["old"].secret, secret_of(bytes(32)), UNKNOWN["short"]):
        await until(lambda secret=secret: is_right(secret, set(), "UNAUTHENTICATED"))  # type: ignore[misc]
        answers = await walked.answers(bearer(secret))
        told |= {answer for (_, name), answer in answers.items() if name not in OPEN}
    assert len(told) == 1


@pytest.mark.parametrize(
    ("listener", "method"),
    [
        ("agent-loop", "/pawl.agent.v1.AgentService/WatchPending"),
        ("notifier", "/pawl.notify.v1.NotifyService/Subscribe"),
    ],
)
async def test_what_a_caller_has_open_ends_when_the_key_is_taken_out_of_the_file(
    walked: Walked, listener: str, method: str
) -> None:
    begin: Any = walked.people[listener].unary_stream(method)
    ann, other = (begin(b"", metadata=key(caller)) for caller in ("leaving", "member"))
    try:
        write_keys(walked.keys, ROLES_OF_CALLERS.keys() - {"leaving"})
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while await ann.read():
                pass
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not other.done()
    finally:
        other.cancel()
        write_keys(walked.keys, ROLES_OF_CALLERS)
