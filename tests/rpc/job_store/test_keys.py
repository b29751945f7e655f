"""API keys over real gRPC and a real database."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pawl.chassis.auth import service_principal
from pawl.chassis.bus import Bus
from pawl.chassis.clock import SystemClock
from pawl.chassis.credentials import UNKNOWN, KeyAuthenticator
from pawl.chassis.database import Database
from pawl.chassis.ids import IdSource
from pawl.chassis.key_rows import KeyRows, digest_of, is_secret
from pawl.chassis.key_sync import KeySyncClient
from pawl.chassis.lifecycle import Background
from pawl.chassis.login_failures import FailureSums
from pawl.chassis.metrics import Metrics
from pawl.chassis.rpc_client import open_channel
from pawl.chassis.rpc_server import RpcServer
from pawl.identity.v1 import key_pb2 as pb
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.identity.v1.key_sync_pb2 import SyncKeysRequest
from pawl.identity.v1.key_sync_pb2_grpc import KeySyncServiceStub
from pawl.job_store import bootstrap
from pawl.job_store.adapters.retention import PostgresRetention
from pawl.job_store.app.keys import Keys, KeysExist
from pawl.job_store.app.ports import Limits
from pawl.job_store.wiring import on_postgres
from tests.keys import LOCAL_KEY, SERVICE_KEY
from tests.rpc.job_store.conftest import PLACES, RETENTION

if TYPE_CHECKING:
    from pawl.identity.v1.key_pb2_grpc import KeyServiceAsyncStub


class World:
    """A job store that asks for keys, and its clients."""

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
        """The API as the deployment sees it."""
        return await self.stub((await self.keys.bootstrap()).secret)


@pytest.fixture
async def world(database: Database, tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        clock = SystemClock()
        metrics = Metrics("job_store")
        limits = Limits(crashes_max=3, queue_max=5, store_queue_max=5, places=PLACES)
        bus = await stack.enter_async_context(Bus(None, name="test", metrics=metrics))
        parts = on_postgres(
            database,
            bus,
            limits,
            RETENTION,
            clock=clock,
            ids=IdSource(clock),
            metrics=metrics,
            keeps_lifecycle=False,
        )
        await stack.enter_async_context(parts.group_commit)
        assert parts.keys is not None
        sums = FailureSums(clock)
        rows = KeyRows(parts.keys, clock, sums)
        background = await stack.enter_async_context(Background())
        background.start("keys", rows.run)
        services = {digest_of(SERVICE_KEY): service_principal("agent-loop")}
        server = RpcServer(
            f"unix:{tmp_path}/keys",
            authenticator=KeyAuthenticator(rows=rows, services=lambda: services, local_key=LOCAL_KEY),
            ids=IdSource(clock),
            metrics=metrics,
            failure_sums=sums,
        )
        parts.add_to(server)
        await stack.enter_async_context(server)
        yield World(f"unix:{tmp_path}/keys", stack, database, parts.keys)


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


async def test_a_key_is_made_used_and_revoked(world: World) -> None:
    """OPS-1: and its secret is told once."""
    owner = await world.stub(LOCAL_KEY)
    made = await create(owner, name="laptop", roles=["operator"])
    assert is_secret(made.secret)
    assert made.key.store_id == "local"
    assert made.key.create_credential_id == "local"
    assert made.key.create_user_id == "me"
    mine = await world.stub(made.secret)
    assert await listed(mine) == ["laptop"]
    await owner.RevokeKey(pb.RevokeKeyRequest(key_id=made.key.key_id))
    async with refused("UNAUTHENTICATED", UNKNOWN), asyncio.timeout(60):
        while await listed(mine) is not None:
            await asyncio.sleep(0.05)
    (row,) = (await owner.ListKeys(pb.ListKeysRequest(include_ended=True))).keys
    assert row.revoke_credential_id == "local"
    assert row.HasField("revoke_time")


async def test_unknown_revoked_and_expired_keys_get_one_answer(world: World) -> None:
    """OPS-1."""
    owner = await world.stub(LOCAL_KEY)
    gone = await create(owner, roles=["operator"])
    await owner.RevokeKey(pb.RevokeKeyRequest(key_id=gone.key.key_id))
    over = await create(owner, roles=["operator"], expire_time=datetime.now(UTC) + timedelta(hours=1))
    await world.database.execute(
        "UPDATE job_store.api_keys SET expire_time = now() - interval '1 second' WHERE key_id = $1", over.key.key_id
    )
    for secret in (gone.secret, over.secret, "pawl_garbage", "of-something-else-altogether"):
        async with refused("UNAUTHENTICATED", UNKNOWN):
            await listed(await world.stub(secret))


async def test_a_repeated_request_makes_one_key_and_tells_no_secret_again(world: World) -> None:
    owner = await world.stub(LOCAL_KEY)
    made, again = [await create(owner, "req_1", name="laptop") for _ in range(2)]
    assert again.key == made.key
    assert again.secret == ""
    async with refused("ALREADY_EXISTS"):
        await create(owner, "req_1", name="another")
    assert len(await listed(owner)) == 1
    await create(owner, name="laptop")
    assert len(await listed(owner)) == 2


async def test_keys_are_listed_in_pages_the_newest_first(world: World) -> None:
    owner = await world.stub(LOCAL_KEY)
    for number in range(5):
        await create(owner, name=f"k{number}")
    names, token = [], ""
    while True:
        page = await owner.ListKeys(pb.ListKeysRequest(page_size=2, page_token=token))
        names += [each.name for each in page.keys]
        assert len(page.keys) <= 2
        token = page.next_page_token
        if not token:
            break
    assert names == ["k4", "k3", "k2", "k1", "k0"]
    first = await owner.ListKeys(pb.ListKeysRequest(page_size=2))
    async with refused("INVALID_ARGUMENT"):
        await owner.ListKeys(pb.ListKeysRequest(page_token=first.next_page_token, include_ended=True))
    async with refused("INVALID_ARGUMENT"):
        await owner.ListKeys(pb.ListKeysRequest(page_token="garbage"))


async def test_ended_keys_are_listed_when_asked_for(world: World) -> None:
    owner = await world.stub(LOCAL_KEY)
    gone = await create(owner, name="gone")
    await create(owner, name="over", expire_time=datetime.now(UTC) + timedelta(hours=1))
    await create(owner, name="here")
    await owner.RevokeKey(pb.RevokeKeyRequest(key_id=gone.key.key_id))
    await world.database.execute("UPDATE job_store.api_keys SET expire_time = create_time WHERE name = 'over'")
    assert await listed(owner) == ["here"]
    assert await listed(owner, include_ended=True) == ["here", "over", "gone"]


async def test_the_deployment_governs_all_stores_and_an_operator_its_own(world: World) -> None:
    """OPS-1: an operator of one store does not own the deployment."""
    deployment = await world.deployment()
    olga = await create(deployment, name="olga", store_id="acme", roles=["operator"])
    rival = await create(deployment, name="rival", store_id="other", roles=["operator", "delegate"])
    operator = await world.stub(olga.secret)
    assert await listed(deployment, store_id="acme") == ["olga"]
    assert await listed(deployment) == ["bootstrap"]
    assert await listed(operator) == ["olga"]
    async with refused("PERMISSION_DENIED"):
        await listed(operator, store_id="other")
    async with refused("PERMISSION_DENIED"):
        await create(operator, store_id="other")
    async with refused("NOT_FOUND"):
        await operator.RevokeKey(pb.RevokeKeyRequest(key_id=rival.key.key_id))
    async with refused("NOT_FOUND"):
        await operator.RevokeKey(pb.RevokeKeyRequest(key_id="key_that_is_none"))
    async with refused("PERMISSION_DENIED", "admin"):
        await create(operator, roles=["admin"])
    made = await create(operator)
    await deployment.RevokeKey(pb.RevokeKeyRequest(key_id=made.key.key_id))
    another = await create(deployment, roles=["deployment"])
    assert another.key.store_id == ""


@pytest.mark.parametrize("roles", [["member"], ["viewer"], ["approver", "admin"], ["worker"], []])
async def test_others_govern_no_keys(world: World, roles: list[str]) -> None:
    made = await create(await world.deployment(), store_id="acme", roles=roles)
    async with refused("PERMISSION_DENIED", "operator"):
        await listed(await world.stub(made.secret))


async def test_a_key_says_from_whose_keys_it_comes_and_so_do_those_from_before_this_was_kept(world: World) -> None:
    """HITL-4: which is why it is no key of somebody else where several people are needed."""
    deployment = await world.deployment()
    made = await create(deployment, user_id="olga", store_id="acme", roles=["operator"])
    expected: dict[str, list[str]] = {"deployment": [], "olga": []}
    hands = ["olga"]
    for user in ("otto", "zoe", "zed"):
        made = await create(await world.stub(made.secret), user_id=user, roles=["operator"])
        expected[user] = sorted(hands)
        hands.append(user)
    await create(await world.stub(LOCAL_KEY), user_id="dan")
    expected["dan"] = []

    async def makers() -> dict[str, list[str]]:
        rows = await world.database.fetch("SELECT user_id, maker_user_ids FROM job_store.api_keys")
        return {row["user_id"]: sorted(row["maker_user_ids"]) for row in rows}

    assert list(made.key.maker_user_ids) == ["olga", "otto", "zoe"]
    assert await makers() == expected
    await world.database.execute("UPDATE job_store.api_keys SET maker_user_ids = '{}'")
    before = (await world.keys.sync_keys(0, ())).last_change
    migration = resources.files("pawl.job_store.adapters.sql.migrations") / "0016_tell_who_made_keys.sql"
    _, _, filled = migration.read_text().partition("DEFAULT '{}';\n")
    statement, _, _ = filled.partition(";")
    await world.database.execute(re.sub(r"\b(FROM|JOIN|UPDATE) (api_key|key_change)s", r"\1 job_store.\2s", statement))
    assert await makers() == expected
    changed = await world.keys.sync_keys(before, ())
    heard = {grant.user_id: sorted(grant.maker_user_ids) for grant in changed.keys}
    assert heard == {user: users for user, users in expected.items() if users}
    assert changed.last_change == before + len(heard)


async def test_a_delegate_that_decides_nothing_governs_no_keys(world: World) -> None:
    """Else it could decide with one that it makes; and the answer does not tell which keys there are."""
    deployment = await world.deployment()
    roles = ["delegate", "operator", "approver"]
    for decides in (True, False):
        made = await create(deployment, store_id="acme", roles=roles, decides_for_users=decides)
        acting = (("pawl-user", "ann"), ("pawl-roles", "operator,approver"))
        for metadata in (acting, ()):
            delegate = await world.stub(made.secret)
            if decides:
                assert (await delegate.ListKeys(pb.ListKeysRequest(), metadata=metadata)).keys
                continue
            for key_id in (made.key.key_id, "key_that_is_none", "no id"):
                async with refused("PERMISSION_DENIED", "governs no keys"):
                    await delegate.RevokeKey(pb.RevokeKeyRequest(key_id=key_id), metadata=metadata)
            async with refused("PERMISSION_DENIED", "governs no keys"):
                await delegate.CreateKey(pb.CreateKeyRequest(key=key()), metadata=metadata)
            async with refused("PERMISSION_DENIED", "governs no keys"):
                await delegate.ListKeys(pb.ListKeysRequest(), metadata=metadata)


async def test_a_service_governs_no_keys_and_a_user_syncs_none(world: World) -> None:
    async with refused("PERMISSION_DENIED"):
        await listed(await world.stub(SERVICE_KEY))
    channel = open_channel(world.address, service_key=LOCAL_KEY)
    async with channel, refused("PERMISSION_DENIED"):
        await KeySyncServiceStub(channel).SyncKeys(SyncKeysRequest())


async def test_no_change_is_missed_however_many_are_made_at_once(world: World) -> None:
    """Who reads on from the last change that it saw has seen all of before."""
    owner, source = await world.stub(LOCAL_KEY), await world.sync_client()
    making = [asyncio.ensure_future(create(owner)) for _ in range(40)]
    seen: set[str] = set()
    after = 0
    while not all(task.done() for task in making):
        changes = await source.sync_keys(after, ())
        after = changes.last_change
        seen |= {grant.key_id for grant in changes.keys}
    seen |= {grant.key_id for grant in (await source.sync_keys(after, ())).keys}
    assert seen == {(await task).key.key_id for task in making}


async def test_the_last_use_is_kept_with_one_write_a_minute(world: World) -> None:
    owner, source = await world.stub(LOCAL_KEY), await world.sync_client()
    made = await create(owner)
    assert not made.key.HasField("last_use_time")
    await source.sync_keys(0, [made.key.key_id, "key_that_is_none"])
    (first,) = (await owner.ListKeys(pb.ListKeysRequest())).keys
    assert first.HasField("last_use_time")
    await source.sync_keys(0, [made.key.key_id])
    (second,) = (await owner.ListKeys(pb.ListKeysRequest())).keys
    assert second.last_use_time == first.last_use_time
    await world.database.execute("UPDATE job_store.api_keys SET last_use_time = now() - interval '61 seconds'")
    before = (await source.sync_keys(0, ())).last_change
    after = (await source.sync_keys(0, [made.key.key_id])).last_change
    (third,) = (await owner.ListKeys(pb.ListKeysRequest())).keys
    assert third.last_use_time.ToDatetime() >= first.last_use_time.ToDatetime()
    assert after == before, "a use is no change that the replicas hear of"


async def test_the_first_key_of_the_deployment_is_made_once(world: World, database_url: str) -> None:
    """OPS-1: also by several at once; again once it is revoked."""
    made = await asyncio.gather(*(bootstrap.bootstrap(database_url) for _ in range(3)), return_exceptions=True)
    (first,) = (each for each in made if not isinstance(each, BaseException))
    assert [type(each) for each in made if isinstance(each, BaseException)] == [KeysExist, KeysExist]
    deployment = await world.stub(first.secret)
    assert await listed(deployment) == ["bootstrap"]
    await deployment.RevokeKey(pb.RevokeKeyRequest(key_id=first.key.key_id))
    await bootstrap.bootstrap(database_url)


async def test_keys_that_ended_long_ago_are_forgotten(world: World) -> None:
    owner, retention = await world.stub(LOCAL_KEY), PostgresRetention(world.database)
    gone, over, _ = [await create(owner, name=name) for name in ("gone", "over", "here")]
    await owner.RevokeKey(pb.RevokeKeyRequest(key_id=gone.key.key_id))
    assert await retention.remove_keys(older_than_seconds=3600, rows_max=10) == 0
    await world.database.execute(
        "UPDATE job_store.api_keys SET revoke_time = now() - interval '2 hours' WHERE name = 'gone'"
    )
    await world.database.execute(
        "UPDATE job_store.api_keys SET expire_time = now() - interval '2 hours' WHERE name = 'over'"
    )
    assert await retention.remove_keys(older_than_seconds=3600, rows_max=10) == 2
    assert await listed(owner, include_ended=True) == ["here"]
    assert over.key.key_id


async def writes_nothing(world: World, ask: Callable[[], Awaitable[object]]) -> None:
    """Fail if PostgreSQL writes whenever it is asked so; now and then it does for reasons of its own."""
    for _ in range(10):
        before = await world.database.fetchval("SELECT pg_current_wal_insert_lsn()::text")
        for _ in range(20):
            await ask()
        if await world.database.fetchval("SELECT pg_current_wal_insert_lsn()::text") == before:
            return
    raise AssertionError("it writes")
