"""Logins that fail, and calls whose caller would not be let in any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from pawl.chassis import login_failures
from pawl.chassis.auth import Credential, Principal, service_principal, user_principal
from pawl.chassis.credentials import FileCredential, KeyAuthenticator
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.key_rows import digest_of
from pawl.chassis.metrics import Metrics
from pawl.chassis.rpc_batch_client import REQUEST_BYTES_MAX
from pawl.chassis.rpc_client import open_channel, translating
from pawl.errors import DependencyUnavailable, Overloaded, PawlError, Unauthenticated
from tests.poll import until
from tests.rpc.chassis.echo import KINDS, EchoServicer, EchoStub, Serve

ACME = StoreId("acme")

ANN, BOB, SERVICE = "key-of-ann-0123456789", "key-of-bob-0123456789", "key-of-service-01234"
NEXT = "next-key-of-service-01234"


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


class Known(KeyAuthenticator):
    """Keys of ann and bob of acme and of agent-loop, which a test takes away and changes."""

    def __init__(self) -> None:
        self.users = {key: self.of(user, "member") for key, user in ((ANN, "ann"), (BOB, "bob"))}
        self.peers = {digest_of(SERVICE): service_principal("agent-loop")}
        super().__init__(keys=self._by_digest, services=lambda: self.peers)

    def of(self, user: str, *roles: str) -> FileCredential:
        return FileCredential(
            credential_id=CredentialId(f"of-{user}"),
            store_id=ACME,
            user_id=UserId(user),
            roles=frozenset(roles),
            decides_for_users=False,
        )

    def _by_digest(self) -> Mapping[bytes, Credential]:
        return {digest_of(key): credential for key, credential in self.users.items()}


async def waiting(stub: EchoStub, servicer: EchoServicer, kind: str, text: str, keys: list[str]) -> list[Any]:
    """Calls that wait, of each key one."""
    calls = [asyncio.ensure_future(stub.call(kind, text, metadata=bearer(key))) for key in keys]
    await until(lambda: servicer.waiting == len(keys))
    return calls


async def test_the_calls_of_a_key_that_was_taken_away_end(serve: Serve, servicer: EchoServicer) -> None:
    for kind, text in (*((kind, "wait") for kind in KINDS), ("unary", "long-poll")):
        known = Known()
        async with serve(authenticator=known, callers_seconds=0.01) as server, open_channel(server.address) as channel:
            ann, bob = await waiting(EchoStub(channel), servicer, kind, text, [ANN, BOB])
            del known.users[ANN]
            with pytest.raises(Unauthenticated, match="not known"), translating():
                await ann
            servicer.release.set()
            assert (await bob)[-1] == text
            servicer.release.clear()


async def test_the_calls_of_a_key_that_says_less_end_and_those_of_one_that_says_more_go_on(
    serve: Serve, servicer: EchoServicer
) -> None:
    known = Known()
    async with serve(authenticator=known, callers_seconds=0.01) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        ann, bob = await waiting(stub, servicer, "talk", "wait", [ANN, BOB])
        known.users[BOB] = known.of("bob", "member", "admin")
        known.users[ANN] = known.of("ann", "viewer")
        with pytest.raises(Unauthenticated, match="changed"), translating():
            await ann
        servicer.release.set()
        assert await bob == ["wait"]


async def test_a_fault_in_the_look_at_one_caller_leaves_the_others_no_time(
    serve: Serve, servicer: EchoServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own calls end too, so that they are tried again: nobody knows whether they would be let in."""
    known = Known()
    authenticate = known.authenticate

    async def faulty(metadata: Mapping[str, str], **more: Any) -> Any:
        if ANN in metadata["authorization"]:
            raise RuntimeError("a fault of ours")
        return await authenticate(metadata, **more)

    async with serve(authenticator=known, callers_seconds=0.01) as server, open_channel(server.address) as channel:
        ann, bob = await waiting(EchoStub(channel), servicer, "talk", "wait", [ANN, BOB])
        monkeypatch.setattr(known, "authenticate", faulty)
        del known.users[BOB]
        async with asyncio.timeout(60):
            with pytest.raises(Unauthenticated, match="not known"), translating():
                await bob
            with pytest.raises(DependencyUnavailable), translating():
                await ann


async def test_the_calls_of_a_delegate_end_that_is_somebody_else_by_now(serve: Serve, servicer: EchoServicer) -> None:
    """HITL-4: what is done meanwhile would be the act of who it was."""
    known, roles = Known(), ("delegate", "member")
    known.users = {key: known.of("shop", *roles) for key in (ANN, BOB)}
    acting = (("pawl-user", "cyd"),)
    async with serve(authenticator=known, callers_seconds=0.01) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        changed, same = [
            asyncio.ensure_future(stub.call("talk", "wait", metadata=bearer(key) + acting)) for key in (ANN, BOB)
        ]
        await until(lambda: servicer.waiting == 2)
        known.users[ANN] = known.of("office", *roles)
        with pytest.raises(Unauthenticated, match="changed"), translating():
            await changed
        servicer.release.set()
        assert await same == ["wait"]


async def test_a_stream_with_calls_of_a_service_ends_with_its_key(serve: Serve, servicer: EchoServicer) -> None:
    """So that calls which had begun are tried again: the service has another key by then, or is refused."""
    known = Known()
    async with (
        serve(authenticator=known, service_only=True, callers_seconds=0.01) as server,
        open_channel(server.address, service_key=SERVICE, batches=True) as channel,
    ):
        call = asyncio.ensure_future(EchoStub(channel).unary(StringValue(value="wait")))
        await servicer.entered.wait()
        known.peers.clear()
        with pytest.raises(DependencyUnavailable), translating():
            await call
        await servicer.cancelled.wait()
        with pytest.raises(Unauthenticated), translating():
            await EchoStub(channel).unary(StringValue(value="hello"))


async def test_no_call_fails_while_the_key_of_a_service_changes(serve: Serve, servicer: EchoServicer) -> None:
    """Calls begin with the key of the moment, in batches and by themselves; those from before go on to their end."""
    known, shown = Known(), SERVICE
    async with (
        serve(authenticator=known, service_only=True) as server,
        open_channel(server.address, service_key=lambda: shown, batches=True) as channel,
    ):
        stub = EchoStub(channel)
        before = asyncio.ensure_future(stub.call("unary", "wait"))
        await servicer.entered.wait()
        known.peers[digest_of(NEXT)] = service_principal("agent-loop")
        shown = NEXT
        assert await stub.call("unary", "who") == ["service//"]
        servicer.release.set()
        assert await before == ["wait"]
        servicer.release.clear()
        servicer.entered.clear()
        since = asyncio.ensure_future(stub.call("unary", "wait"))
        await servicer.entered.wait()
        del known.peers[digest_of(SERVICE)]
        await server._interceptor.end_outdated()
        for text in ("hello", "x" * (REQUEST_BYTES_MAX + 1)):
            assert await stub.call("unary", text) == [text]
        servicer.release.set()
        assert await since == ["wait"]


class Told:
    """Knows everybody, or says what a test tells it; notes whether it might have looked further."""

    def __init__(self, *, error: PawlError | None = None) -> None:
        self.error = error
        self.looks: list[bool] = []

    async def authenticate(
        self, metadata: Mapping[str, str], *, source: str, may_look: Callable[[], bool] = lambda: True
    ) -> Principal:
        if metadata.get("authorization") == f"Bearer {BOB}":
            return user_principal(ACME, UserId("bob"), frozenset())
        if self.error:
            self.looks.append(may_look())
            raise self.error
        return user_principal(ACME, UserId("ann"), frozenset())


async def test_too_many_failures_cost_nothing_and_keep_nobody_out(
    serve: Serve, metrics: Metrics, capfd: pytest.CaptureFixture[str]
) -> None:
    told = Told(error=Unauthenticated("no"))
    many = 200
    async with serve(authenticator=told) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        for number in range(many):
            with pytest.raises(Unauthenticated), translating():
                await stub.call("unary", "hello", metadata=bearer(f"guess-{number:016}"))
            assert await stub.call("unary", "hello", metadata=bearer(BOB)) == ["hello"]
    assert len(told.looks) == many
    assert told.looks[0]
    assert not told.looks[-1]
    lines = "".join(capfd.readouterr()).splitlines()
    assert 0 < sum("login.failed" in line for line in lines) == sum(told.looks) < many
    assert not any("UNAUTHENTICATED" in line or "guess-" in line for line in lines)
    assert metrics.registry.get_sample_value("pawl_test_login_failures_total", {"kind": "unknown"}) == many


async def test_only_so_many_wait_for_a_look_and_those_who_are_known_are_let_in(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(login_failures, "LOOKING_MAX", 3)
    asked, answered = asyncio.Semaphore(0), asyncio.Event()

    class Slow(Told):
        async def authenticate(
            self, metadata: Mapping[str, str], *, source: str, may_look: Callable[[], bool] = lambda: True
        ) -> Principal:
            if metadata.get("authorization") != f"Bearer {BOB}" and may_look() and may_look():
                asked.release()
                await answered.wait()
            return await super().authenticate(metadata, source=source)

    slow, many = Slow(error=DependencyUnavailable("nobody can tell")), 100
    async with serve(authenticator=slow) as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        for _ in range(2):
            answered.clear()
            waits = [asyncio.ensure_future(stub.call("unary", "hello", metadata=bearer(ANN))) for _ in range(3)]
            for _ in waits:
                await asked.acquire()
            for _ in range(many):
                with pytest.raises(Overloaded), translating():
                    await stub.call("unary", "hello", metadata=bearer(ANN))
            assert await stub.call("unary", "hello", metadata=bearer(BOB)) == ["hello"]
            answered.set()
            for wait in waits:
                with pytest.raises(DependencyUnavailable), translating():
                    await wait
    lines = "".join(capfd.readouterr()).splitlines()
    assert 0 < sum("RESOURCE_EXHAUSTED" in line or "UNAVAILABLE" in line for line in lines) < many
