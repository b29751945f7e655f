"""OPS-1: all that says who calls is replaced in a suite that goes on working, by the steps of docs/identity.md."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from pawl.chassis.process.clock import SystemClock
from pawl.chassis.rpc import tls
from pawl.chassis.rpc.client import open_channel
from pawl.event.v1 import run_pb2
from pawl.identity.v1 import key_sync_pb2
from pawl.identity.v1.key_sync_pb2_grpc import KeySyncServiceStub
from pawl.launcher.options import SuiteOptions
from pawl.launcher.plan import SERVICE_KEYS, service_key_file
from pawl.launcher.suite import Suite
from tests import certificates
from tests.fakes.issuer import issuer_server, key, key_set
from tests.files import put
from tests.poll import until
from tests.system.access.person import Person
from tests.system.access.rotating import ASKED, CALLED, FILE_KEY, NEXT_FILE_KEY, PEERS, PROCESSES, World

pytestmark = pytest.mark.long


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own: that is closed to the account under which PostgreSQL runs when the tests run as root.
    with tempfile.TemporaryDirectory(prefix="pawl-rotation-") as folder:
        yield Path(folder)


@pytest.fixture
def authorities() -> tuple[trustme.CA, trustme.CA]:
    """The one that all certificates are of at first, and the one after it."""
    return trustme.CA(), trustme.CA()


@pytest.fixture
async def world(folder: Path, authorities: tuple[trustme.CA, trustme.CA]) -> AsyncIterator[World]:
    """A suite with certificates, an issuer, and people with a key that is a row, one of the file, and a token."""
    async with AsyncExitStack() as stack:
        issuer = await stack.enter_async_context(issuer_server())
        issuer.say("/keys", key_set(key(name="one")))
        rules = {"audience": "pawl", "store": {"value": "acme"}, "user": {"claim": "sub"}}
        put(folder / "oidc.json", json.dumps([{"issuer": issuer.issuer, "jwks_url": f"{issuer.url}/keys", **rules}]))
        files = {name: certificates.write(folder, name, authorities[0]).environment for name in ASKED}
        files["tool-registry"]["PAWL_TOOLS"] = "tests.system.access.held_tools"
        read = {"PAWL_API_KEYS_FILE": str(folder / "keys.json"), "PAWL_OIDC_FILE": str(folder / "oidc.json")}
        suite = Suite(SuiteOptions(data=folder / "data", environment=read, service_environment=files))
        found = World(suite=suite, folder=folder, issuer=issuer, channels={}, people={}, key_ids={})
        found.write_keys(FILE_KEY)
        await stack.enter_async_context(suite)
        trusted = tls.of_client(certificates.write(folder, "client", authorities[0]).authority, SystemClock())
        for name in ASKED:
            channel = open_channel(found.addresses(name)["grpc"], tls=trusted, deadline_seconds=60)
            found.channels[name] = await stack.enter_async_context(channel)
        shown = {"ann": await found.make_key(), "bob": FILE_KEY, "cid": found.token("one")}
        for name, credential in shown.items():
            found.people[name] = Person(credential, found.channels["agent-loop"], found.channels["notifier"])
        yield found


async def test_no_call_fails_while_all_credentials_are_replaced_and_runs_go_on(
    world: World, authorities: tuple[trustme.CA, trustme.CA]
) -> None:
    """OPS-1: each with the new one as soon as it is there; of what is withdrawn nothing counts any more."""
    pids = {name: world.suite.pid(name) for name in PROCESSES}
    held = {person: world.folder / f"held-{name}" for name, person in world.people.items()}
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        listening = [tasks.create_task(person.listen()) for person in held]
        for person, path in held.items():
            tasks.create_task(person.play(f"call hold with {json.dumps({'path': str(path)})}", "released"))
            tasks.create_task(person.keep_running(stop))
        await until(lambda: are_there(held.values()))
        await replace_a_key_that_is_a_row(world, world.people["ann"])
        await replace_a_key_of_the_file(world, world.people["bob"])
        await replace_the_key_of_the_issuer(world, world.people["cid"])
        await replace_the_keys_of_services(world)
        await replace_certificates(world, *authorities)
        for path in held.values():
            path.with_name(f"{path.name}.release").touch()
        stop.set()
        await until(lambda: have_heard_of_all(world))
        for task in listening:
            task.cancel()
    for person, path in held.items():
        assert {run.state for run in person.ended} == {run_pb2.RUN_STATE_COMPLETED}
        assert Counter(run.run_id for run in person.ended) == Counter(await person.run_ids())
        assert path.read_text() == "held\n"
    assert {name: world.suite.pid(name) for name in PROCESSES} == pids


async def are_there(paths: Iterable[Path]) -> bool:
    return all(path.exists() for path in paths)


async def have_heard_of_all(world: World) -> bool:
    """Return whether each of the people has ended what they began, and was told of it."""
    people = world.people.values()
    return all(
        len(person.ended) == person.begun + 1 and person.told == {run.run_id for run in person.ended}
        for person in people
    )


async def replace_a_key_that_is_a_row(world: World, ann: Person) -> None:
    old, ann.credential = ann.credential, await world.make_key()
    await world.runs_go_on()
    await world.revoke_key(old)
    await world.until_refused_everywhere(old)
    await world.runs_go_on()


async def replace_a_key_of_the_file(world: World, bob: Person) -> None:
    world.write_keys(FILE_KEY, NEXT_FILE_KEY)
    await world.until_known_everywhere(NEXT_FILE_KEY)
    bob.credential = NEXT_FILE_KEY
    await world.runs_go_on()
    world.write_keys(NEXT_FILE_KEY)
    await world.until_refused_everywhere(FILE_KEY)
    await world.runs_go_on()


async def replace_the_key_of_the_issuer(world: World, cid: Person) -> None:
    """By the time the old one is published no more, a token of one that nobody knows has each service look."""
    world.issuer.say("/keys", key_set(key(name="one"), key(name="two")))
    old, cid.credential = cid.credential, world.token("two")
    await world.runs_go_on()
    assert [service for service in ASKED if not await world.knows(service, cid.credential)] == []
    world.issuer.say("/keys", key_set(key(name="two")))
    assert [service for service in ASKED if await world.knows(service, world.token("none"))] == []
    await world.until_refused_everywhere(old)
    await world.runs_go_on()


async def replace_the_keys_of_services(world: World) -> None:
    old = {name: world.secret(service_key_file(name)).read_text().strip() for name in PEERS}
    new = {name: f"next-key-of-{name}-0123456789" for name in PEERS}

    async def accept(*keys: Mapping[str, str]) -> None:
        digests = {name: [hashlib.sha256(each[name].encode()).hexdigest() for each in keys] for name in PEERS}
        await change(world, world.secret(SERVICE_KEYS), json.dumps(digests), "PAWL_SERVICE_KEYS_FILE", CALLED)

    await accept(old, new)
    for name, secret in new.items():
        await change(world, world.secret(service_key_file(name)), secret, "PAWL_SERVICE_KEY_FILE", [name])
    await world.runs_go_on()
    await accept(new)
    for name in PEERS:
        assert await syncs(world, name, new[name])
        assert not await syncs(world, name, old[name])
    await world.runs_go_on()


async def change(world: World, path: Path, text: str, variable: str, services: Collection[str]) -> None:
    """Write a file, and return when these services have read it again."""
    before = {name: world.told(name, "file.read_again", variable=variable) for name in services}
    put(path, text)

    async def have_read() -> bool:
        return all(world.told(name, "file.read_again", variable=variable) > count for name, count in before.items())

    await until(have_read)


async def syncs(world: World, service: str, service_key: str, folder: Path | None = None) -> bool:
    """Return whether job-store answers who shows that key and the certificate of a service."""
    files = certificates.of(folder or world.folder, service)
    shown = tls.of_service(files.certificate, files.key, files.authority, clock=SystemClock())
    address = world.addresses("job-store")["internal"]
    async with open_channel(address, service_key=service_key, tls=shown, server_name="job-store") as channel:
        stub: Any = KeySyncServiceStub(channel)
        try:
            await stub.SyncKeys(key_sync_pb2.SyncKeysRequest())
        except grpc.aio.AioRpcError as error:
            if error.code() not in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}:
                raise
            return False
    return True


async def replace_certificates(world: World, old: trustme.CA, new: trustme.CA) -> None:
    """First they alone, then the authority: both are trusted before any certificate of the new one is shown."""
    (world.folder / "old").mkdir()
    certificates.write(world.folder / "old", "agent-loop", old, new)
    service_key = world.secret(service_key_file("agent-loop")).read_text().strip()
    for trusted in ((old,), (old, new), (new, old)):
        await write_certificates(world, *trusted)
        await until(lambda: syncs(world, "agent-loop", service_key, world.folder / "old"))
        await world.runs_go_on()
    await write_certificates(world, new)
    assert not await syncs(world, "agent-loop", service_key, world.folder / "old")
    await until(lambda: syncs(world, "agent-loop", service_key))
    await world.runs_go_on()


async def write_certificates(world: World, *trusted: trustme.CA) -> None:
    """Replace all certificates by others of the first authority, and return when they are used everywhere."""
    before = {name: world.told(name, "tls.channel_renewed") for name in PEERS}
    certificates.write(world.folder, "client", *trusted)
    files = {name: certificates.write(world.folder, name, *trusted) for name in ASKED}
    for name in ASKED:
        for address in world.addresses(name).values():
            await until(lambda address=address, name=name: shows(address, files[name].certificate))  # type: ignore[misc]

    async def have_renewed() -> bool:
        return all(world.told(name, "tls.channel_renewed") >= before[name] + count for name, count in PEERS.items())

    await until(have_renewed)


async def shows(address: str, certificate: Path) -> bool:
    """Return whether a listener shows the certificate of that file."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    first, end, _ = certificate.read_text().partition("-----END CERTIFICATE-----")
    return bool(shown == ssl.PEM_cert_to_DER_cert(first + end))
