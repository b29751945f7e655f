"""Permissions for creating and revoking keys."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import ROLES, ROLES_OF_A_STORE, Role
from pawl.chassis.ids import CredentialId, KeyId, StoreId, UserId
from pawl.errors import InvalidField, InvalidId, KeyNotFound, PawlError, PermissionDenied, TooLarge
from pawl.job_store.keys.rules import MAKERS_MAX, Key, check_new, governed_store, is_deployment, new_key, revoked

NOW = datetime(2026, 5, 1, tzinfo=UTC)
CUSTOM = ("finance", "night-shift")
STORES = ("acme", "other")


def operator(store_id: str = "acme", *roles: str) -> Principal:
    return Principal(
        store_id=StoreId(store_id),
        user_id=UserId("olga"),
        credential_id=CredentialId("key_o"),
        roles=frozenset({Role.OPERATOR, *roles}),
    )


DEPLOYMENT = Principal(
    store_id=StoreId(""),
    user_id=UserId("deployment"),
    credential_id=CredentialId("key_d"),
    roles=frozenset({Role.DEPLOYMENT}),
)
OPERATORS = st.builds(
    lambda store, roles: operator(store, *roles),
    st.sampled_from(STORES),
    st.frozensets(st.sampled_from([*sorted(ROLES_OF_A_STORE), *CUSTOM])),
)
GOVERNORS = OPERATORS | st.just(DEPLOYMENT)
# Mostly valid keys, so that the rules do not refuse nearly all of them.
KEYS = st.builds(
    Key,
    name=st.sampled_from(["", "laptop", "x" * 200]) | st.sampled_from(["x" * 201, "two\nlines"]),
    store_id=st.just(StoreId("")) | st.sampled_from([*map(StoreId, STORES), StoreId("no store")]),
    user_id=st.just(UserId("ann")) | st.sampled_from([UserId("ann"), UserId(""), UserId("no user")]),
    roles=st.just(frozenset({"deployment"}))
    | st.frozensets(st.sampled_from([*sorted(ROLES_OF_A_STORE), *CUSTOM]), max_size=3)
    | st.frozensets(st.sampled_from([*sorted(ROLES), "no role"])),
    decides_for_users=st.sampled_from([False, False, False, True]),
    expire_time=st.sampled_from([None, NOW + timedelta(days=1)]) | st.sampled_from([None, NOW]),
    create_time=st.just(NOW),
)
ORDINARY = Key(user_id=UserId("ann"), roles=frozenset({"member"}), create_time=NOW)


def made(governor: Principal, asked: Key) -> Key | None:
    try:
        key = new_key(governor, asked, key_id=KeyId("key_1"), now=NOW)
        check_new(key, 0, 0)
    except PawlError:
        return None
    return key


@given(OPERATORS, KEYS)
def test_an_operator_cannot_grant_more_than_it_has(governor: Principal, asked: Key) -> None:
    """OPS-1: an operator creates keys only for its own store, and cannot grant a decision right that it lacks."""
    key = made(governor, asked)
    if key is None:
        return
    assert (key.store_id, Role.DEPLOYMENT in key.roles) == (governor.store_id, False)
    assert key.roles - {"viewer", "member"} <= governor.roles
    assert key.roles or governor.roles & {"approver", "admin"}


@given(GOVERNORS, KEYS)
def test_every_created_key_is_consistent(governor: Principal, asked: Key) -> None:
    key = made(governor, asked)
    if key is None:
        return
    assert ((key.store_id == ""), key.user_id) == (key.roles == {Role.DEPLOYMENT}, "ann")
    assert key.expire_time is None or key.expire_time > NOW
    assert not key.decides_for_users or Role.DELEGATE in key.roles
    assert not key.roles or key.roles & ROLES
    assert (key.create_user_id, key.create_credential_id) == (governor.user_id, governor.credential_id)
    assert (key.key_id, key.create_time, key.revoke_time, key.last_use_time) == ("key_1", NOW, None, None)


@given(st.frozensets(st.sampled_from([*sorted(ROLES_OF_A_STORE), *CUSTOM])), st.sampled_from(STORES))
def test_the_deployment_may_grant_any_role_in_any_store(roles: frozenset[str], store_id: str) -> None:
    assert made(DEPLOYMENT, with_fields(ORDINARY, roles=roles | {Role.VIEWER}, store_id=StoreId(store_id))) is not None


@given(GOVERNORS, st.sampled_from(["", *STORES]), st.booleans())
def test_only_key_managers_of_a_store_may_list_and_revoke_its_keys(
    governor: Principal, store_id: str, ended: bool
) -> None:
    key = with_fields(ORDINARY, store_id=StoreId(store_id), revoke_time=NOW if ended else None)
    later = NOW + timedelta(hours=1)
    if not is_deployment(governor) and store_id != governor.store_id:
        with pytest.raises(KeyNotFound):
            revoked(governor, key, now=later)
        if store_id:
            with pytest.raises(PermissionDenied):
                governed_store(governor, store_id)
        return
    assert governed_store(governor, store_id) == store_id
    assert revoked(governor, key, now=later).revoke_time == (NOW if ended else later)
    again = revoked(governor, revoked(governor, key, now=later), now=later + timedelta(hours=1))
    assert again.revoke_time == (NOW if ended else later)


def test_the_callers_store_is_the_default() -> None:
    assert [governed_store(caller, "") for caller in (operator(), DEPLOYMENT)] == ["acme", ""]


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        (with_fields(ORDINARY, roles=frozenset({"admin"})), PermissionDenied, "roles that you do not have: admin"),
        (with_fields(ORDINARY, roles=frozenset({"delegate"})), PermissionDenied, "delegate"),
        (with_fields(ORDINARY, roles=frozenset({"deployment"})), InvalidField, "deployment keys have no store"),
        (with_fields(ORDINARY, roles=frozenset()), PermissionDenied, "may decide on its own calls"),
        (with_fields(ORDINARY, roles=frozenset({"veiwer"})), InvalidField, "at least one of viewer, member"),
        (with_fields(ORDINARY, store_id=StoreId("other")), PermissionDenied, "managed only by its operators"),
        (with_fields(ORDINARY, user_id=UserId("")), InvalidId, "user_id"),
        (with_fields(ORDINARY, decides_for_users=True), InvalidField, "requires the delegate role"),
        (with_fields(ORDINARY, expire_time=NOW), InvalidField, "in the future"),
        (with_fields(ORDINARY, name="x" * 201), InvalidField, "name"),
        (with_fields(ORDINARY, roles=frozenset(f"role-{number}" for number in range(33))), InvalidField, "roles"),
    ],
)
def test_a_refused_key_gives_the_reason(asked: Key, error: type[PawlError], says: str) -> None:
    with pytest.raises(error, match=says):
        check_new(new_key(operator(), asked, key_id=KeyId("key_1"), now=NOW), 0, 0)


def key_of(governor: Principal, user_id: str) -> Key:
    store_id = StoreId("acme") if is_deployment(governor) else StoreId("")
    asked = with_fields(ORDINARY, store_id=store_id, roles=frozenset({Role.OPERATOR}), user_id=UserId(user_id))
    return new_key(governor, asked, key_id=KeyId("key_1"), now=NOW)


def with_key(key: Key) -> Principal:
    return replace(
        operator(),
        user_id=key.user_id,
        credential_id=CredentialId(key.key_id),
        people=key.maker_user_ids - {key.user_id},
    )


USERS = st.sampled_from([UserId("olga"), UserId("otto"), UserId("zoe"), UserId("zed")])
KEY_MAKERS = st.builds(
    lambda user_id, people, local: replace(
        operator(),
        user_id=user_id,
        people=people - {user_id},
        credential_id=CredentialId("local" if local else "key_o"),
    ),
    USERS,
    st.frozensets(USERS, max_size=2),
    st.booleans(),
)


@given(KEY_MAKERS | st.just(DEPLOYMENT), st.lists(USERS, min_size=1, max_size=5))
def test_a_key_records_all_users_in_its_chain_of_creators(first: Principal, users: list[UserId]) -> None:
    """HITL-4: no user counts as a second person with a key that they created directly or indirectly."""
    # Keys made by the deployment or the local key start a new chain, whose holder answers for later keys.
    is_root = is_deployment(first) or first.credential_id == "local"
    hands = set() if is_root else {first.user_id, *first.people}
    governor = first
    for user_id in users:
        key = key_of(governor, user_id)
        assert key.maker_user_ids == hands
        governor = with_key(key)
        hands.add(user_id)


def test_the_number_of_recorded_key_creators_is_limited() -> None:
    """The limit equals the number of people that the ledger accepts for one decision."""
    governor = operator()
    for number in range(MAKERS_MAX):
        key = key_of(governor, f"u{number}")
        governor = with_key(key)
    assert len(key.maker_user_ids) == MAKERS_MAX
    with pytest.raises(InvalidField, match="at most 7 users"):
        key_of(governor, "one_more")


@pytest.mark.parametrize(("makers", "keys_max", "kept_max"), [((), 1000, 10_000), (("ops",), 900, 9000)])
def test_keys_per_store_are_limited_with_a_reserve_for_the_deployment(
    makers: tuple[str, ...], keys_max: int, kept_max: int
) -> None:
    key = with_fields(ORDINARY, maker_user_ids=frozenset(makers))
    check_new(key, keys_max - 1, kept_max - 1)
    with pytest.raises(InvalidField, match="revoke one first"):
        check_new(key, keys_max, keys_max)
    with pytest.raises(TooLarge, match="within the last 90 days: create fewer keys"):
        check_new(key, 0, kept_max)
