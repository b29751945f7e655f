"""Authentication, time limits and concurrency limits, and what operators see of calls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from pawl.chassis.identity.auth import (
    CLIENT_ADDRESS,
    GATEWAY_KEY,
    Authenticator,
    Credential,
    Principal,
    service_principal,
    user_principal,
)
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.rpc.batch_client import REQUEST_BYTES_MAX
from pawl.chassis.rpc.client import open_channel
from pawl.errors import DependencyUnavailable, Overloaded, PermissionDenied, Unauthenticated
from pawl.server.identity import login_failures
from pawl.server.identity.credentials import ApiKey, KeyAuthenticator
from pawl.server.identity.key_rows import digest_of
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.health import ping
from tests.keys import LOCAL_KEY, authenticator
from tests.poll import until
from tests.rpc.chassis.echo import KINDS, SERVICE, EchoServicer, EchoStub, Serve, echoing
from tests.rpc.refusals import raises

USER_KEY = "user-key-0123456789"
SERVICE_KEY = "service-key-0123456789"


def keys() -> Authenticator:
    entry = ApiKey(key=USER_KEY, store_id="acme", user_id="ann", roles=["member"])
    return authenticator([entry], service_key=SERVICE_KEY)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def test_calls_need_a_key_with_permission(serve: Serve, servicer: EchoServicer) -> None:
    """OPS-1: local callers need a key too, because sandboxed programs run on the same machine."""
    local = authenticator(local_key=LOCAL_KEY, service_key=SERVICE_KEY)
    rows: list[tuple[Any, type[Exception]]]
    unknown: list[Any] = [(), bearer("another-key-0123456789"), (("authorization", USER_KEY),), (("pawl-user", "me"),)]
    for known, user_key in ((keys(), USER_KEY), (local, LOCAL_KEY)):
        for service_only in (False, True):
            serving = serve(authenticator=known, service_only=service_only)
            rows = [(metadata, Unauthenticated) for metadata in unknown]
            rows += [(bearer(user_key), PermissionDenied)] * service_only
            async with serving as server, open_channel(server.address) as channel:
                for kind, (metadata, error) in itertools.product(KINDS, rows):
                    await raises(error, EchoStub(channel).call(kind, "wait", metadata=metadata))
    assert not servicer.entered.is_set()


async def test_requests_without_a_known_key_are_rejected_before_they_arrive(serve: Serve) -> None:
    """Otherwise partly received requests would occupy memory."""
    async with serve(authenticator=keys()) as server, open_channel(server.address) as channel:
        for method in ("Unary", "Generate"):
            begin: Any = channel.stream_stream(f"/{SERVICE}/{method}")
            await raises(Unauthenticated, begin(_never()).read())


async def _never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_call_with_two_credentials_is_rejected(serve: Serve) -> None:
    """A proxy may have checked only one of them."""
    async with serve(authenticator=keys()) as server, open_channel(server.address) as channel:
        once = (*bearer(USER_KEY), ("pawl-store", "acme"), ("pawl-user", "ann"))
        for pair in once:
            await raises(Unauthenticated, EchoStub(channel).call("unary", "who", metadata=(*once, pair)), match=pair[0])


async def test_calls_above_the_limit_are_rejected_and_streams_are_counted_separately(
    serve: Serve, servicer: EchoServicer
) -> None:
    async with echoing(serve(unary_calls_max=1, streams_max=1)) as stub:
        for full, free in (("unary", "talk"), ("talk", "unary")):
            servicer.entered.clear()
            servicer.release.clear()
            holder = await servicer.started(stub.call(full, "wait"))
            await raises(Overloaded, stub.call(full, "one too many"))
            assert await stub.call(free, "room here") == ["room here"]
            servicer.release.set()
            await holder
            assert await stub.call(full, "room again") == ["room again"]


def of(store_id: str, user_id: str) -> tuple[tuple[str, str], ...]:
    return (("pawl-store", store_id), ("pawl-user", user_id))


@asynccontextmanager
async def held(servicer: EchoServicer, stub: EchoStub, kind: str, *users: str) -> AsyncIterator[None]:
    calls = [asyncio.ensure_future(stub.call(kind, "wait", metadata=of("acme", user))) for user in users]
    await until(lambda: servicer.waiting == len(users))
    yield
    servicer.release.set()
    await asyncio.gather(*calls)
    servicer.release.clear()


SHARES = {"unary_calls_max": 8, "streams_max": 8, "store_share": 0.5, "user_share": 0.25}
# Each stream may hold a message that has not arrived completely.
BYTES = {"message_bytes_max": 8000, "request_stream_bytes_max": 6 * 9000, "store_share": 0.5, "user_share": 0.34}


@pytest.mark.parametrize(
    ("limits", "kinds", "users", "reasons", "free_kind"),
    [
        (SHARES, ("unary", "talk"), ("ann", "ann", "bob", "cy"), ("per user", "per store"), None),
        (BYTES, ("collect", "talk"), ("ann", "ann", "bob"), ("2 .* per user", "3 .* per store"), "generate"),
    ],
    ids=["calls", "bytes of streaming requests"],
)
async def test_callers_never_exceed_their_quotas(  # noqa: PLR0917
    serve: Serve,
    servicer: EchoServicer,
    limits: dict[str, Any],
    kinds: tuple[str, ...],
    users: tuple[str, ...],
    reasons: tuple[str, str],
    free_kind: str | None,
) -> None:
    async with echoing(serve(**limits)) as stub:
        for kind in kinds:
            async with held(servicer, stub, kind, *users):
                for user, whose in zip(("ann", "bob"), reasons, strict=True):
                    await raises(Overloaded, stub.call(kind, "one too many", metadata=of("acme", user)), match=whose)
                assert await stub.call(kind, "room here", metadata=of("other", "ann")) == ["room here"]
                if free_kind is not None:
                    assert await stub.call(free_kind, "room here", metadata=of("acme", "ann"))
            assert await stub.call(kind, "room again", metadata=of("acme", "ann")) == ["room again"]


async def test_waiting_call_does_not_block_others(serve: Serve, servicer: EchoServicer) -> None:
    async with echoing(serve(unary_calls_max=1, streams_max=1)) as stub:
        holder = await servicer.started(stub.call("unary", "long-poll"))
        assert await stub.call("unary", "room here") == ["room here"]
        await raises(Overloaded, stub.call("unary", "long-poll"))
        servicer.release.set()
        await holder
        assert await stub.call("talk", "room again") == ["room again"]


async def test_call_releases_its_slot_however_it_ends(serve: Serve, servicer: EchoServicer) -> None:
    async with serve(unary_calls_max=1, streams_max=1) as server, open_channel(server.address) as channel:
        stub, raw = EchoStub(channel), EchoStub(channel, raw=True)
        for kind in KINDS:
            for end in (stub.call(kind, "crash"), stub.call(kind, "abort"), raw.send(kind, b"\xff")):
                await asyncio.gather(end, return_exceptions=True)
            servicer.entered.clear()
            servicer.cancelled.clear()
            call = await servicer.started(stub.call(kind, "wait"))
            call.cancel()
            await servicer.cancelled.wait()
            await asyncio.gather(call, return_exceptions=True)
            assert (await stub.call(kind, "hello"))[-1] == "hello", kind


async def test_request_id_is_kept_or_created_and_returned(serve: Serve) -> None:
    async with echoing(serve()) as stub:
        assert await stub.call("unary", "request-id", metadata=(("pawl-request-id", "my-request"),)) == ["my-request"]
        call = stub.unary(StringValue(value="request-id"), metadata=(("pawl-request-id", "not an id"),))
        made = (await call).value
        assert made.startswith("req_")
        assert ("pawl-request-id", made) in tuple(await call.trailing_metadata())


async def test_each_call_is_counted_by_method_and_code(serve: Serve, metrics: Metrics) -> None:
    """OPS-2: unknown methods are counted under one name."""
    async with echoing(serve()) as stub:
        await stub.call("unary", "hello")
        await asyncio.gather(stub.call("talk", "crash"), stub.missing(StringValue()), return_exceptions=True)
    text = metrics.text().decode()
    requests = "pawl_test_rpc_requests_total"
    lines = (
        f'{requests}{{code="OK",method="/test.v1.EchoService/Unary"}} 1.0',
        f'{requests}{{code="INTERNAL",method="/test.v1.EchoService/Talk"}} 1.0',
        f'{requests}{{code="UNIMPLEMENTED",method="unknown"}} 1.0',
        'pawl_test_rpc_duration_seconds_count{method="/test.v1.EchoService/Unary"} 1.0',
        'pawl_test_rpc_in_flight{method="/test.v1.EchoService/Unary"} 0.0',
        "pawl_test_process_resident_memory_bytes",
    )
    assert [line for line in lines if line not in text] == []
    assert "_created" not in text


async def test_each_call_logs_one_line_without_its_content(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    """OPS-2: calls between services are logged at debug level unless they fail."""

    def lines() -> list[tuple[bool, bool]]:
        found = [line for line in "".join(capfd.readouterr()).splitlines() if "rpc.served" in line]
        assert not any("secret words" in line for line in found)
        return [("debug" in line, "INTERNAL" in line) for line in found]

    for service_only, expected in ((False, [(False, False)]), (True, [(True, False), (False, True)])):
        async with serve(service_only=service_only) as server, open_channel(server.address) as channel:
            await EchoStub(channel).call("talk", "secret words")
            await ping(channel)
            if service_only:
                await asyncio.gather(EchoStub(channel).call("talk", "crash"), return_exceptions=True)
        assert lines() == expected


ACME = StoreId("acme")

ANN, BOB = "key-of-ann-0123456789", "key-of-bob-0123456789"
SERVICE_OF_CALLERS, GATEWAY = "key-of-service-01234", "key-of-gateway-01234"
NEXT = "next-key-of-service-01234"


class Known(KeyAuthenticator):
    def __init__(self) -> None:
        self.users = {key: self.of(user, "member") for key, user in ((ANN, "ann"), (BOB, "bob"))}
        names = {SERVICE_OF_CALLERS: "agent-loop", GATEWAY: "gateway"}
        self.peers = {digest_of(key): service_principal(name) for key, name in names.items()}
        super().__init__(keys=self._by_digest, services=lambda: self.peers)

    def of(self, user: str, *roles: str) -> Credential:
        return Credential(
            credential_id=CredentialId(f"of-{user}"),
            store_id=ACME,
            user_id=UserId(user),
            roles=frozenset(roles),
            decides_for_users=False,
        )

    def _by_digest(self) -> Mapping[bytes, Credential]:
        return {digest_of(key): credential for key, credential in self.users.items()}


async def waiting(stub: EchoStub, servicer: EchoServicer, kind: str, text: str, keys: list[str]) -> list[Any]:
    calls = [asyncio.ensure_future(stub.call(kind, text, metadata=bearer(key))) for key in keys]
    await until(lambda: servicer.waiting == len(keys))
    return calls


async def test_revoking_a_key_ends_its_calls(serve: Serve, servicer: EchoServicer) -> None:
    for kind, text in (*((kind, "wait") for kind in KINDS), ("unary", "long-poll")):
        known = Known()
        async with serve(authenticator=known, callers_seconds=0.01) as server, open_channel(server.address) as channel:
            ann, bob = await waiting(EchoStub(channel), servicer, kind, text, [ANN, BOB])
            del known.users[ANN]
            await raises(Unauthenticated, ann, match="not valid")
            servicer.release.set()
            assert (await bob)[-1] == text
            servicer.release.clear()


async def test_delegate_calls_end_when_their_key_changes_identity(serve: Serve, servicer: EchoServicer) -> None:
    """HITL-4: later actions would be attributed to the delegate's previous identity."""
    known, roles = Known(), ("delegate", "member")
    known.users = {key: known.of("shop", *roles) for key in (ANN, BOB)}
    acting = (("pawl-user", "cyd"),)
    async with echoing(serve(authenticator=known, callers_seconds=0.01)) as stub:
        changed, same = [
            asyncio.ensure_future(stub.call("talk", "wait", metadata=bearer(key) + acting)) for key in (ANN, BOB)
        ]
        await until(lambda: servicer.waiting == 2)
        known.users[ANN] = known.of("office", *roles)
        await raises(Unauthenticated, changed, match="changed")
        servicer.release.set()
        assert await same == ["wait"]


async def test_revoking_a_service_key_ends_the_services_batched_stream(serve: Serve, servicer: EchoServicer) -> None:
    """The running call fails, and calls with the revoked key are rejected."""
    known = Known()
    async with (
        serve(authenticator=known, service_only=True, callers_seconds=0.01) as server,
        open_channel(server.address, service_key=SERVICE_OF_CALLERS, batches=True) as channel,
    ):
        call = await servicer.started(EchoStub(channel).unary(StringValue(value="wait")))
        known.peers.clear()
        await raises(DependencyUnavailable, call)
        await servicer.cancelled.wait()
        await raises(Unauthenticated, EchoStub(channel).unary(StringValue(value="hello")))


async def test_calls_do_not_fail_while_a_service_key_rotates(serve: Serve, servicer: EchoServicer) -> None:
    """New calls use the current key, both in batches and alone; running calls finish with the old key."""
    known, shown = Known(), SERVICE_OF_CALLERS
    async with (
        serve(authenticator=known, service_only=True) as server,
        open_channel(server.address, service_key=lambda: shown, batches=True) as channel,
    ):
        stub = EchoStub(channel)
        before = await servicer.started(stub.call("unary", "wait"))
        known.peers[digest_of(NEXT)] = service_principal("agent-loop")
        shown = NEXT
        assert await stub.call("unary", "who") == ["service//"]
        servicer.release.set()
        assert await before == ["wait"]
        servicer.release.clear()
        servicer.entered.clear()
        since = await servicer.started(stub.call("unary", "wait"))
        del known.peers[digest_of(SERVICE_OF_CALLERS)]
        await server._interceptor.end_outdated()
        for text in ("hello", "x" * (REQUEST_BYTES_MAX + 1)):
            assert await stub.call("unary", text) == [text]
        servicer.release.set()
        assert await since == ["wait"]


class Failing(KeyAuthenticator):
    """Rejects every key and records whether it was allowed to look the key up."""

    def __init__(self, looks: list[bool], service: str = "gateway") -> None:
        super().__init__(services=lambda: {digest_of(SERVICE_KEY): service_principal(service)})
        self._looks = looks

    async def authenticate(self, *_: Any, may_look_up: Callable[[], bool] = lambda: True, **__: Any) -> Principal:
        self._looks.append(may_look_up())
        raise Unauthenticated("no")


@pytest.mark.parametrize(
    ("service", "key", "has_own_rate"),
    [("gateway", SERVICE_KEY, True), ("agent-loop", SERVICE_KEY, False), ("gateway", "another", False)],
)
async def test_only_the_gateway_reports_the_client_address_of_a_failed_login(
    serve: Serve, service: str, key: str, *, has_own_rate: bool
) -> None:
    looks = list[bool]()
    async with echoing(serve(authenticator=Failing(looks, service))) as stub:
        for number in range(100):
            client = ((GATEWAY_KEY, key), (CLIENT_ADDRESS, f"ipv4:192.0.2.{number}:1"))
            await raises(Unauthenticated, stub.call("unary", "hello", metadata=bearer(f"guess-{number:016}") + client))
    assert looks[-1] is has_own_rate


async def test_key_lookups_are_bounded_while_known_callers_are_admitted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(login_failures, "LOOKUPS_MAX", 3)
    asked, answered, many = asyncio.Semaphore(0), asyncio.Event(), 100

    class Slow(KeyAuthenticator):
        """Authenticates bob immediately and all others slowly."""

        async def authenticate(
            self, metadata: Mapping[str, str], *, may_look_up: Callable[[], bool] = lambda: True, **_: Any
        ) -> Principal:
            if metadata.get("authorization") == f"Bearer {BOB}":
                return user_principal(ACME, UserId("bob"), frozenset())
            if may_look_up() and may_look_up():
                asked.release()
                await answered.wait()
            raise DependencyUnavailable("nobody can tell")

    async with echoing(serve(authenticator=Slow())) as stub:
        for _ in range(2):
            answered.clear()
            waits = [asyncio.ensure_future(stub.call("unary", "hello", metadata=bearer(ANN))) for _ in range(3)]
            for _ in waits:
                await asked.acquire()
            await raises(Overloaded, *(stub.call("unary", "hello", metadata=bearer(ANN)) for _ in range(many)))
            assert await stub.call("unary", "hello", metadata=bearer(BOB)) == ["hello"]
            answered.set()
            await raises(DependencyUnavailable, *waits)
    lines = "".join(capfd.readouterr()).splitlines()
    assert 0 < sum("RESOURCE_EXHAUSTED" in line or "UNAVAILABLE" in line for line in lines) < many
