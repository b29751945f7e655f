"""Events of API keys and failed logins, over real gRPC and a real database."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from pawl.chassis.ids import KeyId, StoreId, UserId
from pawl.chassis.key_rows import secret_of
from pawl.chassis.key_sync import REPORTS
from pawl.chassis.login_failures import REPORTS_MAX, FailureKind, FailureReport, FailureSum
from pawl.errors import InvalidField
from pawl.identity.v1 import key_pb2 as pb
from pawl.identity.v1.key_sync_pb2 import SyncKeysRequest
from pawl.job_store.adapters.keys import PostgresKeyRepository
from pawl.job_store.domain import keys as rules
from pawl.job_store.domain.key_events import KeyEventKind, event_of
from pawl.job_store.domain.keys import Governor
from tests.keys import LOCAL_KEY, SERVICE_KEY
from tests.rpc.job_store.test_keys import World, create, refused, world

if TYPE_CHECKING:
    from pawl.identity.v1.key_pb2_grpc import KeyServiceAsyncStub

__all__ = ["world"]

CREATED, REVOKED = pb.KEY_EVENT_KIND_KEY_CREATED, pb.KEY_EVENT_KIND_KEY_REVOKED
BOOTSTRAPPED, FAILED = pb.KEY_EVENT_KIND_KEY_BOOTSTRAPPED, pb.KEY_EVENT_KIND_LOGINS_FAILED
NOW = datetime(2027, 1, 1, tzinfo=UTC)


async def events(stub: KeyServiceAsyncStub, **fields: Any) -> list[pb.KeyEvent]:
    return list((await stub.ListKeyEvents(pb.ListKeyEventsRequest(**fields))).events)


def report(number: int, *, key_id: str = "", kind: FailureKind = FailureKind.UNKNOWN) -> FailureReport:
    summed = FailureSum(kind=kind, source="10.0.0.1", count=number, first_time=NOW, last_time=NOW)
    return FailureReport(report_id=f"rep_{number}", key_id=KeyId(key_id), sum=summed)


async def test_making_and_revoking_a_key_are_events_with_who_did_it(world: World) -> None:
    """OPS-1: once each, however often they are asked for."""
    deployment = await world.deployment()
    fields: dict[str, Any] = {"user_id": "bob", "store_id": "acme", "roles": ["viewer", "member"], "name": "laptop"}
    for _ in range(2):
        made = await create(deployment, "req_1", **fields)
    for _ in range(2):
        await deployment.RevokeKey(pb.RevokeKeyRequest(key_id=made.key.key_id))
    revoked, created, first = await events(deployment)
    assert (first.kind, created.kind, revoked.kind) == (BOOTSTRAPPED, CREATED, REVOKED)
    for event in (created, revoked):
        assert (event.store_id, event.key_id, event.key_name) == ("acme", made.key.key_id, "laptop")
        assert (event.user_id, list(event.roles)) == ("bob", ["member", "viewer"])
        assert (event.by_store_id, event.by_user_id, event.by_credential_id) == ("", "deployment", first.key_id)
        assert not event.HasField("failures")
    assert first.event_id < created.event_id < revoked.event_id
    assert created.time == made.key.create_time
    assert (first.by_user_id, first.by_credential_id) == ("", "")


async def test_a_delegate_is_named_beside_whom_it_acts_for(world: World) -> None:
    roles = ["delegate", "operator", "member"]
    deployment = await world.deployment()
    made = await create(deployment, user_id="shop", store_id="acme", roles=roles, decides_for_users=True)
    shop = await world.stub(made.secret)
    await shop.CreateKey(
        pb.CreateKeyRequest(key=pb.Key(user_id="ann", roles=["member"])),
        metadata=(("pawl-user", "olga"), ("pawl-roles", "operator,member")),
    )
    event, *_ = await events(deployment, store_id="acme")
    assert (event.by_store_id, event.by_user_id, event.by_delegate_user_id) == ("acme", "olga", "shop")
    assert event.by_credential_id == made.key.key_id


async def test_an_event_is_kept_only_with_its_change(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = await world.stub(LOCAL_KEY)
    monkeypatch.setattr(
        "pawl.job_store.adapters.keys._ADD_EVENT", "SELECT 1 / 0, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12"
    )
    async with refused("INTERNAL"):
        await create(owner)
    assert await world.database.fetchval("SELECT count(*) FROM job_store.api_keys") == 0


async def test_of_two_who_revoke_a_key_at_once_one_did_it(world: World) -> None:
    owner, repository = await world.stub(LOCAL_KEY), PostgresKeyRepository(world.database)
    made = await create(owner)
    key = await repository.get(KeyId(made.key.key_id), None)
    assert key is not None
    for user_id in ("ann", "bob"):
        governor = Governor(
            store_id=StoreId("local"), user_id=UserId(user_id), credential_id=user_id, roles=frozenset({"operator"})
        )
        event = event_of(KeyEventKind.KEY_REVOKED, key, time=NOW, governor=governor)
        await repository.revoke(rules.revoked(governor, key, now=NOW), event)
    assert [(each.kind, each.by_user_id) for each in await events(owner)] == [(REVOKED, "ann"), (CREATED, "me")]


async def test_an_operator_sees_the_events_of_its_store_and_the_deployment_all(world: World) -> None:
    """OPS-1."""
    deployment = await world.deployment()
    olga = await create(deployment, name="olga", store_id="acme", roles=["operator"])
    await create(deployment, name="other", store_id="other", roles=["operator"])
    operator = await world.stub(olga.secret)
    await (await world.sync_client()).sync_keys(0, (), [report(1), report(2, key_id=olga.key.key_id)])
    assert [event.kind for event in await events(operator)] == [FAILED, CREATED]
    assert {event.store_id for event in await events(operator)} == {"acme"}
    assert len(await events(operator, store_id="acme")) == 2
    async with refused("PERMISSION_DENIED"):
        await events(operator, store_id="other")
    assert [event.store_id for event in await events(deployment)] == ["acme", "", "other", "acme", ""]
    assert len(await events(deployment, store_id="other")) == 1
    member = await create(deployment, store_id="acme")
    for secret in (member.secret, SERVICE_KEY):
        async with refused("PERMISSION_DENIED"):
            await events(await world.stub(secret))


async def test_events_are_listed_in_pages_and_by_key_and_kind(world: World) -> None:
    owner = await world.stub(LOCAL_KEY)
    made = [await create(owner, name=f"k{number}") for number in range(5)]
    await owner.RevokeKey(pb.RevokeKeyRequest(key_id=made[1].key.key_id))
    first = await owner.ListKeyEvents(pb.ListKeyEventsRequest(page_size=2, kind=CREATED))
    rest = await events(owner, page_token=first.next_page_token, kind=CREATED)
    assert [event.key_name for event in (*first.events, *rest)] == ["k4", "k3", "k2", "k1", "k0"]
    assert [event.kind for event in await events(owner, key_id=made[1].key.key_id)] == [REVOKED, CREATED]
    assert [event.key_name for event in await events(owner, kind=REVOKED)] == ["k1"]
    wrong: list[dict[str, Any]] = [{"page_token": first.next_page_token}, {"kind": 99}, {"key_id": "no key"}]
    for fields in wrong:
        async with refused("INVALID_ARGUMENT"):
            await events(owner, **fields)


async def test_reports_of_services_are_kept_once_with_the_service_and_the_key(world: World) -> None:
    owner, source = await world.stub(LOCAL_KEY), await world.sync_client()
    made = await create(owner, name="laptop", user_id="bob")
    reports = [
        report(1),
        report(2, key_id=made.key.key_id, kind=FailureKind.REVOKED),
        report(3, key_id="key_that_is_none", kind=FailureKind.EXPIRED),
    ]
    for _ in range(2):
        await source.sync_keys(0, (), reports)
    found = await events(await world.deployment(), kind=FAILED)
    assert [event.failures.count for event in found] == [3, 2, 1]
    assert {event.service for event in found} == {"agent-loop"}
    assert [(event.store_id, event.key_name, event.user_id) for event in found] == [
        ("", "", ""),
        ("local", "laptop", "bob"),
        ("", "", ""),
    ]
    sums = found[1].failures
    assert (sums.kind, sums.source) == (pb.LOGIN_FAILURE_KIND_REVOKED, "10.0.0.1")
    assert sums.first_time.ToDatetime(tzinfo=UTC) == sums.last_time.ToDatetime(tzinfo=UTC) == NOW


async def test_a_report_with_a_time_out_of_range_is_refused_by_name(world: World) -> None:
    source = await world.sync_client()
    for name in ("first_time", "last_time"):
        sent = REPORTS.write(report(1))
        getattr(sent.sum, name).seconds = 2**60
        with pytest.raises(InvalidField, match=f"failure_reports.sum.{name}"):
            await source._stub.SyncKeys(SyncKeysRequest(failure_reports=[sent]))


async def test_the_logins_that_fail_here_are_summed_without_a_secret(world: World) -> None:
    """OPS-1: job-store has its own failures without a call over the wire."""
    owner, deployment = await world.stub(LOCAL_KEY), await world.deployment()
    gone = await create(owner, roles=["operator"])
    await owner.RevokeKey(pb.RevokeKeyRequest(key_id=gone.key.key_id))
    unknown = secret_of(bytes(32))
    for secret in (gone.secret, gone.secret, unknown, "short"):
        async with refused("UNAUTHENTICATED"):
            await events(await world.stub(secret))
    found: list[pb.KeyEvent] = []
    async with asyncio.timeout(60):
        while sum(event.failures.count for event in found) < 4:
            found = await events(deployment, kind=FAILED)
    told = Counter[tuple[str, str]]()
    for event in found:
        told[pb.LoginFailureKind.Name(event.failures.kind), event.key_id] += event.failures.count
    assert told == {("LOGIN_FAILURE_KIND_REVOKED", gone.key.key_id): 2, ("LOGIN_FAILURE_KIND_UNKNOWN", ""): 2}
    assert {(event.service, event.failures.source) for event in found} == {("job-store", "unix")}
    (text,) = await world.database.fetch("SELECT string_agg(key_events::text, '') AS all FROM job_store.key_events")
    assert not [secret for secret in (gone.secret, unknown) if secret[5:40] in text["all"]]


async def test_what_is_no_report_is_refused(world: World) -> None:
    source = await world.sync_client()
    too_many = [report(number) for number in range(1, REPORTS_MAX + 2)]
    for wrong in (too_many, [report(0)], [report(1, key_id="no key")]):
        with pytest.raises(InvalidField):
            await source.sync_keys(0, (), wrong)
