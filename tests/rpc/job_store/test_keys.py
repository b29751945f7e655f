"""API keys and their events over real gRPC and a real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.identity.auth import UNKNOWN, service_principal
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.rpc.client import open_channel
from pawl.identity.v1 import key_pb2 as pb
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.job_store import bootstrap
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.keys import rules
from pawl.job_store.keys.keys import Keys, KeysExist
from pawl.server.db.database import Database
from pawl.server.identity.credentials import KeyAuthenticator
from pawl.server.identity.key_rows import KeyRows, digest_of, is_secret
from pawl.server.identity.key_sync import KeySyncClient
from pawl.server.process.service import Background
from tests.keys import LOCAL_KEY, SERVICE_KEY
from tests.rpc.job_store.conftest import StartReplica
from tests.rpc.stubs import KeyServiceAsyncStub


class World:
    def __init__(self, address: str, stack: AsyncExitStack, database: Database, keys: Keys) -> None:
        self._stack = stack
        self.address = address
        self.database = database
        self.keys = keys

    async def stub(self, key: str) -> KeyServiceAsyncStub:
        return KeyServiceStub(await self._stack.enter_async_context(open_channel(self.address, service_key=key)))

    async def sync_client(self) -> KeySyncClient:
        channel = open_channel(self.address, service_key=SERVICE_KEY, batches=True)
        return KeySyncClient(await self._stack.enter_async_context(channel))

    async def deployment(self) -> KeyServiceAsyncStub:
        return await self.stub((await self.keys.bootstrap()).secret)


@pytest.fixture
async def world(start: StartReplica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    for name in ("_SYNC_SECONDS", "_SYNC_INTERVAL_SECONDS_MIN"):
        monkeypatch.setattr(f"pawl.server.identity.key_rows.{name}", 0.02)
    async with AsyncExitStack() as stack:
        background = await stack.enter_async_context(Background())
        known: list[Keys] = []

        def knowing(keys: Keys) -> KeyAuthenticator:
            known.append(keys)
            rows, services = KeyRows(keys, SystemClock()), {digest_of(SERVICE_KEY): service_principal("agent-loop")}
            background.start("keys", rows.run)
            return KeyAuthenticator(rows=rows, services=lambda: services, local_key=LOCAL_KEY)

        yield World(f"unix:{tmp_path}/1", stack, (await start(knowing=knowing)).database, *known)


@pytest.fixture
async def owner(world: World) -> KeyServiceAsyncStub:
    """The API as the user of the local key sees it."""
    return await world.stub(LOCAL_KEY)


@pytest.fixture
async def deployment(world: World) -> KeyServiceAsyncStub:
    return await world.deployment()


@asynccontextmanager
async def refused(code: str, says: str = "") -> AsyncIterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code().name == code
    assert says in (caught.value.details() or "")


def key(**fields: Any) -> pb.Key:
    return pb.Key(**{"user_id": "ann", "roles": ["member"], **fields})


async def create(stub: KeyServiceAsyncStub, request_id: str = "", **fields: Any) -> pb.CreateKeyResponse:
    return await stub.CreateKey(pb.CreateKeyRequest(request_id=request_id, key=key(**fields)))


async def listed(stub: KeyServiceAsyncStub, **fields: Any) -> list[str]:
    return [each.name for each in (await stub.ListKeys(pb.ListKeysRequest(**fields))).keys]


async def revoke(stub: KeyServiceAsyncStub, key_id: str) -> None:
    await stub.RevokeKey(pb.RevokeKeyRequest(key_id=key_id))


async def test_a_key_works_until_it_is_revoked_and_its_secret_is_returned_only_once(
    world: World, capfd: pytest.CaptureFixture[str], owner: KeyServiceAsyncStub
) -> None:
    """OPS-1: the secret is neither stored nor logged."""
    made = await create(owner, name="laptop", roles=["operator"])
    assert is_secret(made.secret)
    assert (made.key.store_id, made.key.create_credential_id, made.key.create_user_id) == ("local", "local", "me")
    mine = await world.stub(made.secret)
    assert await listed(mine) == ["laptop"]
    for _ in range(2):
        await revoke(owner, made.key.key_id)
    async with refused("UNAUTHENTICATED", UNKNOWN), asyncio.timeout(60):
        while await listed(mine) is not None:
            await asyncio.sleep(0.05)
    (row,) = (await owner.ListKeys(pb.ListKeysRequest(include_ended=True))).keys
    assert (row.revoke_credential_id, row.HasField("revoke_time")) == ("local", True)
    kept = await world.database.fetchval("SELECT api_keys::text FROM job_store.api_keys")
    log = "".join(capfd.readouterr())
    assert [log.count(event) for event in ("key.created", "key.revoked")] == [1, 1]
    for place in (kept, log):
        assert made.secret[5:48] not in place


async def test_a_repeated_request_creates_one_key_and_does_not_return_the_secret_again(
    world: World, owner: KeyServiceAsyncStub
) -> None:
    made, again = [await create(owner, "req_1", name="laptop") for _ in range(2)]
    assert (again.key, again.secret) == (made.key, "")
    async with refused("ALREADY_EXISTS"):
        await create(owner, "req_1", name="another")
    assert len(await listed(owner)) == 1


async def test_keys_are_listed_newest_first_and_ended_keys_only_on_request(
    world: World, owner: KeyServiceAsyncStub
) -> None:
    oldest, *_ = [await create(owner, name=f"k{number}") for number in range(5)]
    await revoke(owner, oldest.key.key_id)
    await world.database.execute("UPDATE job_store.api_keys SET expire_time = create_time WHERE name = 'k1'")
    assert await listed(owner) == ["k4", "k3", "k2"]
    tokens, names = [""], list[str]()
    while len(tokens) == 1 or tokens[-1]:
        page = await owner.ListKeys(pb.ListKeysRequest(page_size=2, page_token=tokens[-1], include_ended=True))
        names += [each.name for each in page.keys]
        tokens.append(page.next_page_token)
    assert (names, len(tokens)) == (["k4", "k3", "k2", "k1", "k0"], 4)
    for token in (tokens[1], "garbage"):
        async with refused("INVALID_ARGUMENT"):
            await listed(owner, page_token=token)


async def test_the_deployment_manages_all_stores_while_an_operator_manages_only_its_own(
    world: World, deployment: KeyServiceAsyncStub
) -> None:
    """OPS-1: an operator of one store does not control the deployment."""
    olga = await create(deployment, name="olga", store_id="acme", roles=["operator"])
    rival = await create(deployment, name="rival", store_id="other", roles=["operator", "delegate"])
    operator = await world.stub(olga.secret)
    assert [await listed(deployment, store_id="acme"), await listed(deployment)] == [["olga"], ["bootstrap"]]
    assert await listed(operator) == ["olga"]
    for code, call in (
        ("PERMISSION_DENIED", listed(operator, store_id="other")),
        ("PERMISSION_DENIED", create(operator, store_id="other")),
        ("PERMISSION_DENIED", create(operator, roles=["admin"])),
        ("NOT_FOUND", revoke(operator, rival.key.key_id)),
        ("NOT_FOUND", revoke(operator, "key_that_is_none")),
        ("INVALID_ARGUMENT", create(operator, user_id="no user")),
    ):
        async with refused(code):
            await call
    await revoke(deployment, (await create(operator)).key.key_id)


async def test_key_names_the_key_that_created_it(world: World) -> None:
    """HITL-4: otherwise it could count as another person's key where several approvals are needed."""
    made = await create(await world.deployment(), user_id="olga", store_id="acme", roles=["operator"])
    for user in ("otto", "zoe", "zed"):
        made = await create(await world.stub(made.secret), user_id=user, roles=["operator"])
    assert list(made.key.maker_user_ids) == ["olga", "otto", "zoe"]
    assert {grant.user_id: sorted(grant.maker_user_ids) for grant in (await world.keys.sync_keys(0, ())).keys} == {
        "deployment": [],
        "olga": [],
        "otto": ["olga"],
        "zoe": ["olga", "otto"],
        "zed": ["olga", "otto", "zoe"],
    }


async def test_delegate_that_may_not_decide_cannot_manage_keys(world: World, deployment: KeyServiceAsyncStub) -> None:
    """Otherwise the delegate could decide with a key that it creates. The error does not reveal which keys exist."""
    roles = ["delegate", "operator", "approver"]
    decides, made = [
        await create(deployment, store_id="acme", roles=roles, decides_for_users=each) for each in (True, False)
    ]
    for metadata in ((("pawl-user", "ann"), ("pawl-roles", "operator,approver")), ()):
        assert (await (await world.stub(decides.secret)).ListKeys(pb.ListKeysRequest(), metadata=metadata)).keys
        delegate = await world.stub(made.secret)
        calls: list[Any] = [
            delegate.CreateKey(pb.CreateKeyRequest(key=key()), metadata=metadata),
            delegate.ListKeys(pb.ListKeysRequest(), metadata=metadata),
        ]
        keys = (made.key.key_id, "key_that_is_none", "no id")
        revokes = [delegate.RevokeKey(pb.RevokeKeyRequest(key_id=key_id), metadata=metadata) for key_id in keys]
        for call in [*calls, *revokes]:
            async with refused("PERMISSION_DENIED", "cannot manage keys"):
                await call


async def test_concurrent_key_changes_are_never_missed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading on from the last seen change returns all later changes, in order and in pages."""
    monkeypatch.setattr("pawl.job_store.keys.keys.CHANGES_MAX", 3)
    owner, source = await world.stub(LOCAL_KEY), await world.sync_client()
    making = [asyncio.ensure_future(create(owner)) for _ in range(40)]
    seen, after, is_over = list[str](), 0, False
    while not is_over:
        all_made = all(task.done() for task in making)
        changes = await source.sync_keys(after, ())
        assert len(changes.keys) <= 3
        after = changes.last_change
        seen += [grant.credential_id for grant in changes.keys]
        is_over = all_made and not changes.has_more
    assert sorted(seen) == sorted([(await task).key.key_id for task in making])
    await revoke(owner, seen[0])
    (revoked,) = (await source.sync_keys(after, ())).keys
    assert (revoked.credential_id, revoked.is_revoked) == (seen[0], True)


async def test_last_use_is_stored_at_most_once_a_minute(world: World) -> None:
    owner, source = await world.stub(LOCAL_KEY), await world.sync_client()
    made = await create(owner)
    before = (await source.sync_keys(0, ())).last_change

    async def used() -> Any:
        changes = await source.sync_keys(0, [made.key.key_id, "key_that_is_none"])
        assert changes.last_change == before, "a use is not announced to replicas"
        return await world.database.fetchval("SELECT last_use_time FROM job_store.api_keys")

    first = await used()
    assert first is not None
    assert await used() == first
    await world.database.execute("UPDATE job_store.api_keys SET last_use_time = now() - interval '61 seconds'")
    assert await used() >= first


async def test_first_key_of_the_deployment_is_created_once(world: World, database_url: str) -> None:
    """OPS-1: concurrent requests create only one key. After its revocation, another one can be created."""
    made = await asyncio.gather(*(bootstrap.bootstrap(database_url) for _ in range(3)), return_exceptions=True)
    (first,) = (each for each in made if not isinstance(each, BaseException))
    assert [type(each) for each in made if isinstance(each, BaseException)] == [KeysExist, KeysExist]
    deployment = await world.stub(first.secret)
    assert await listed(deployment) == ["bootstrap"]
    await revoke(deployment, first.key.key_id)
    await bootstrap.bootstrap(database_url)


async def test_old_ended_keys_and_events_are_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they are deleted, keys count towards the limit, so the creation of keys is bounded."""
    monkeypatch.setattr(rules, "KEPT_KEYS_MAX", 3)
    owner, retention = await world.stub(LOCAL_KEY), PostgresRetention(world.database)
    gone, *_ = [await create(owner, name=name) for name in ("gone", "over", "here")]
    await revoke(owner, gone.key.key_id)
    async with refused("RESOURCE_EXHAUSTED", "create fewer keys"):
        await create(owner)
    for column, name in (("revoke_time", "gone"), ("expire_time", "over")):
        assert await retention.remove_keys(older_than_seconds=3600, rows_max=10) == (name == "over")
        await world.database.execute(
            f"UPDATE job_store.api_keys SET {column} = now() - interval '2 hours' WHERE name = $1",  # noqa: S608
            name,
        )
    assert await retention.remove_keys(older_than_seconds=3600, rows_max=10) == 1
    assert (await listed(owner, include_ended=True), await retention.remove_key_events(rows_max=10)) == (["here"], 0)
    await world.database.execute(
        "UPDATE job_store.key_events SET time = now() - interval '91 days' WHERE key_name <> 'here'"
    )
    assert await retention.remove_key_events(rows_max=10) == 3


CREATED, REVOKED = pb.KEY_EVENT_KIND_KEY_CREATED, pb.KEY_EVENT_KIND_KEY_REVOKED
BOOTSTRAPPED = pb.KEY_EVENT_KIND_KEY_BOOTSTRAPPED


async def events(stub: KeyServiceAsyncStub, **fields: Any) -> list[pb.KeyEvent]:
    return list((await stub.ListKeyEvents(pb.ListKeyEventsRequest(**fields))).events)


async def test_creating_or_revoking_a_key_records_an_event_that_names_the_actor(
    world: World, deployment: KeyServiceAsyncStub
) -> None:
    """OPS-1: each event is recorded once, even if the request is repeated."""
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
    assert (created.time, first.by_user_id, first.by_credential_id) == (made.key.create_time, "", "")


async def test_event_names_the_delegate_and_the_user_it_acts_for(world: World) -> None:
    roles = ["delegate", "operator", "member"]
    deployment = await world.deployment()
    made = await create(deployment, user_id="shop", store_id="acme", roles=roles, decides_for_users=True)
    await (await world.stub(made.secret)).CreateKey(
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


async def test_an_operator_sees_only_its_stores_events_while_the_deployment_sees_all(
    world: World, deployment: KeyServiceAsyncStub
) -> None:

    olga = await create(deployment, name="olga", store_id="acme", roles=["operator"])
    await create(deployment, name="other", store_id="other", roles=["operator"])
    operator = await world.stub(olga.secret)
    assert [(event.kind, event.store_id) for event in await events(operator)] == [(CREATED, "acme")]
    assert len(await events(operator, store_id="acme")) == 1
    async with refused("PERMISSION_DENIED"):
        await events(operator, store_id="other")
    assert [event.store_id for event in await events(deployment)] == ["other", "acme", ""]
    assert len(await events(deployment, store_id="other")) == 1


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
