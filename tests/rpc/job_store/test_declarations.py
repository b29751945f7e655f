"""Declarations over real gRPC and a real database: one owner per resource, and no lost change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.agent.v1.declaration_pb2 import Declaration
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.rpc.client import translated
from pawl.errors import Conflict, InvalidField, PawlError, PermissionDenied, ScheduleNotFound, TooLarge
from pawl.event.v1.schedule_pb2 import ScheduleDefinition
from pawl.event.v1.trigger_pb2 import TriggerDefinition, WebhookSource
from pawl.job_store.declarations import store
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.user import forwarded


def user(name: str = "ann", *roles: str, store: str = "acme") -> Principal:
    return Principal(
        store_id=StoreId(store), user_id=UserId(name), credential_id=CredentialId("key_1"), roles=frozenset(roles)
    )


ADMIN = user("ann", "admin")


async def ask(replica: Replica, caller: Principal, method: str, **fields: Any) -> Any:
    return await translated(forwarded(replica.channel, caller, method, **fields))


async def put(
    replica: Replica, caller: Principal = ADMIN, *, kind: str = "agent", name: str = "clerk", **f: Any
) -> Any:
    declaration = Declaration(kind=kind, name=name, **{"set": "shop"} | f)
    return (await ask(replica, caller, "PutDeclaration", declaration=declaration)).declaration


async def listed(replica: Replica, caller: Principal) -> list[tuple[str, str, str, int]]:
    found = (await ask(replica, caller, "ListDeclarations")).declarations
    return [(each.kind, each.name, each.set, each.version) for each in found]


async def test_one_of_two_concurrent_changes_gets_a_conflict_that_names_the_other_user(replica: Replica) -> None:
    assert (await put(replica)).version == 1
    done = await asyncio.gather(
        *(put(replica, user(name, "admin"), version=1, set=name) for name in ("bob", "eve")), return_exceptions=True
    )
    (refused,) = (each for each in done if isinstance(each, BaseException))
    (kept,) = (each for each in done if not isinstance(each, BaseException))
    assert isinstance(refused, Conflict)
    assert f"the agent 'clerk' was changed by {kept.update_user_id}, so version 1 is outdated" in refused.message
    assert await listed(replica, ADMIN) == [("agent", "clerk", kept.set, 2)]
    for version in (0, 1, 3):
        with pytest.raises(Conflict):
            await put(replica, version=version)
        with pytest.raises(Conflict):
            gone = Declaration(kind="agent", name="clerk", version=version)
            await ask(replica, ADMIN, "DeleteDeclaration", declaration=gone)
    gone = Declaration(kind="agent", name="clerk", version=2)
    await ask(replica, ADMIN, "DeleteDeclaration", declaration=gone)
    with pytest.raises(Conflict, match="has no declaration"):
        await put(replica, version=2)
    assert (await put(replica)).version == 1


async def test_declarations_of_users_and_stores_are_separate(replica: Replica) -> None:
    await put(replica)
    await put(replica, user("bob"), kind="schedule", name="daily", set="own")
    await put(replica, kind="schedule", name="daily")
    assert await listed(replica, ADMIN) == [("agent", "clerk", "shop", 1), ("schedule", "daily", "shop", 1)]
    assert await listed(replica, user("bob")) == [("agent", "clerk", "shop", 1), ("schedule", "daily", "own", 1)]
    assert await listed(replica, user("ann", "admin", store="other")) == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"kind": "recipe"}, InvalidField),
        ({"name": ""}, InvalidField),
        ({"name": "a\nb"}, InvalidField),
        ({"version": 2**63}, InvalidField),
        ({"caller": user("bob")}, PermissionDenied),
    ],
)
async def test_invalid_declarations_are_refused(
    replica: Replica, fields: dict[str, Any], error: type[PawlError]
) -> None:
    with pytest.raises(error):
        await put(replica, **fields)


async def test_declarations_of_one_user_do_not_use_up_the_limit_of_others(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "DECLARATIONS_MAX", 1)
    bob = user("bob")
    await put(replica, bob, kind="channel")
    with pytest.raises(TooLarge):
        await put(replica, bob, kind="trigger")
    await put(replica)
    await put(replica, kind="channel")


async def test_a_set_is_leased_to_one_holder(replica: Replica) -> None:
    async def lease(holder_id: str, seconds: int, caller: Principal = ADMIN) -> None:
        await ask(replica, caller, "LeaseSet", set="shop", holder_id=holder_id, lease_seconds=seconds)

    await lease("one", 60)
    await lease("one", 60)
    with pytest.raises(Conflict, match="applying the set 'shop'"):
        await lease("two", 60)
    await lease("two", 60, user("bob", "member"))  # Private, like a member's resources.
    await lease("one", 0)
    await lease("two", 60)
    with pytest.raises(InvalidField, match="at most 60, got 61"):
        await lease("two", 61)


async def test_validation_saves_nothing(replica: Replica) -> None:
    schedule = ScheduleDefinition(name="daily", text="x", interval_seconds=60)
    trigger = TriggerDefinition(name="order", text="x", webhook=WebhookSource())
    definition: Any
    for kind, definition in (("Schedule", schedule), ("Trigger", trigger)):
        asked: dict[str, Any] = {"definition": definition, "validate_only": True}
        made = await ask(replica, ADMIN, f"Create{kind}", **asked)
        assert getattr(made, kind.lower()).definition.name == definition.name
        assert not getattr(made, "secret", "")
        with pytest.raises(PawlError, match="You have no such"):
            await ask(replica, ADMIN, f"Update{kind}", **asked)
        await ask(replica, ADMIN, f"Create{kind}", definition=definition)
        changed = type(definition)()
        changed.CopyFrom(definition)
        changed.text = "y"
        await ask(replica, ADMIN, f"Update{kind}", definition=changed, validate_only=True)
        found = await ask(replica, ADMIN, f"Get{kind}", name=definition.name)
        assert getattr(found, kind.lower()).definition.text == "x"
    bad = ScheduleDefinition(name="bad", text="x", cron="nonsense")
    with pytest.raises(InvalidField, match="cron"):
        await ask(replica, ADMIN, "CreateSchedule", definition=bad, validate_only=True)
    with pytest.raises(ScheduleNotFound):
        await ask(replica, ADMIN, "GetSchedule", name="bad")
