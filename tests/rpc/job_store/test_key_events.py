"""Events of API keys over real gRPC and a real database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pawl.identity.v1 import key_pb2 as pb
from tests.keys import SERVICE_KEY
from tests.rpc.job_store.test_keys import World, create, deployment, owner, refused, world

if TYPE_CHECKING:
    from pawl.identity.v1.key_pb2_grpc import KeyServiceAsyncStub

__all__ = ["deployment", "owner", "world"]

CREATED, REVOKED = pb.KEY_EVENT_KIND_KEY_CREATED, pb.KEY_EVENT_KIND_KEY_REVOKED
BOOTSTRAPPED = pb.KEY_EVENT_KIND_KEY_BOOTSTRAPPED


async def events(stub: KeyServiceAsyncStub, **fields: Any) -> list[pb.KeyEvent]:
    return list((await stub.ListKeyEvents(pb.ListKeyEventsRequest(**fields))).events)


async def test_creating_and_revoking_a_key_records_an_event_with_its_actor(
    world: World, deployment: KeyServiceAsyncStub
) -> None:
    """OPS-1: each event is recorded once, however often the change is requested."""
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
    assert first.event_id < created.event_id < revoked.event_id
    assert created.time == made.key.create_time
    assert (first.by_user_id, first.by_credential_id) == ("", "")


async def test_event_names_the_delegate_and_the_user_it_acts_for(world: World) -> None:
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


async def test_event_is_stored_only_with_its_change(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: KeyServiceAsyncStub
) -> None:
    monkeypatch.setattr(
        "pawl.job_store.keys.store._ADD_EVENT", "SELECT 1 / 0, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11"
    )
    async with refused("INTERNAL"):
        await create(owner)
    assert await world.database.fetchval("SELECT count(*) FROM job_store.api_keys") == 0


async def test_operator_sees_events_of_its_store_and_the_deployment_sees_all(
    world: World, deployment: KeyServiceAsyncStub
) -> None:
    """OPS-1: members and services see none."""
    olga = await create(deployment, name="olga", store_id="acme", roles=["operator"])
    await create(deployment, name="other", store_id="other", roles=["operator"])
    operator = await world.stub(olga.secret)
    assert [(event.kind, event.store_id) for event in await events(operator)] == [(CREATED, "acme")]
    assert len(await events(operator, store_id="acme")) == 1
    async with refused("PERMISSION_DENIED"):
        await events(operator, store_id="other")
    assert [event.store_id for event in await events(deployment)] == ["other", "acme", ""]
    assert len(await events(deployment, store_id="other")) == 1
    member = await create(deployment, store_id="acme")
    for secret in (member.secret, SERVICE_KEY):
        async with refused("PERMISSION_DENIED"):
            await events(await world.stub(secret))


async def test_events_are_listed_in_pages_and_filtered_by_key_and_kind(
    world: World, owner: KeyServiceAsyncStub
) -> None:
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
