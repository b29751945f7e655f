from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.identity import auth
from pawl.chassis.identity.auth import Credential, Principal, principal_of, service_principal
from pawl.chassis.identity.roles import ANYBODY, CALLERS, ROLES, ROLES_OF_A_STORE, Role, rights
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.process.start import StartError
from pawl.chassis.process.watched_file import WatchedFile
from pawl.errors import InvalidId, PermissionDenied, Unauthenticated
from pawl.server.identity.credentials import ApiKey, gone, parse_keys, parse_service_keys, service_key
from pawl.server.process.settings import ServiceSettings, read
from tests.fakes.manual_clock import ManualClock
from tests.keys import authenticator
from tests.tables import not_explained, not_refused

ENTRY = '{"key": "0123456789abcdef", "store_id": "acme", "user_id": "ann", "roles": ["member"]}'
ANN = auth.user_principal(StoreId("acme"), UserId("ann"), frozenset({"member"}))


def credential(*roles: str, decides_for_users: bool = False) -> Credential:
    return Credential(
        credential_id=CredentialId("file-1"),
        store_id=StoreId("" if "deployment" in roles else "acme"),
        user_id=UserId("backend"),
        roles=frozenset(roles),
        decides_for_users=decides_for_users,
    )


async def test_each_task_has_its_own_caller() -> None:
    """I13: concurrent requests never see each other's principal."""

    async def serve(principal: Principal) -> Principal:
        auth.set_principal(principal)
        await asyncio.sleep(0)
        return auth.current_principal()

    principals = [Principal(store_id=StoreId(f"s{n}"), user_id=UserId("u")) for n in range(5)]
    assert await asyncio.gather(*(serve(principal) for principal in principals)) == principals
    with pytest.raises(Unauthenticated):
        auth.current_principal()


async def test_a_caller_must_have_a_user() -> None:
    async def serve() -> None:
        auth.set_principal(ANN)
        assert auth.require_user() == ANN
        for other in (service_principal("agent-loop"), principal_of(credential("deployment"), {})):
            auth.set_principal(other)
            with pytest.raises(PermissionDenied):
                auth.require_user()

    await asyncio.create_task(serve())


async def test_known_keys_are_accepted_and_anything_else_is_refused() -> None:
    entry = ApiKey(key="0123456789abcdef", store_id="acme", user_id="ann")
    keys = authenticator([entry], service_key="s" * 16, local_key="l" * 16)
    wrong = ["", "Bearer", "Bearer ", "Basic abc", "0123456789abcdef", f"Bearer {'x' * 8193}"]
    wrong += [f"Bearer {key}" for key in ("0123456789abcdeF", "s" * 17, "l" * 15)]

    async def caller(key: str, **more: str) -> Principal:
        return await keys.authenticate({"authorization": f"Bearer {key}", **more}, source="ipv4:127.0.0.1:1")

    for _ in range(3):
        assert (await caller("0123456789abcdef")).user_id == "ann"
        assert await caller("s" * 16) == service_principal("agent-loop")
        acting = await caller("s" * 16, **{"pawl-store": "acme", "pawl-user": "ann"})
        assert (acting.is_service, acting.store_id, acting.user_id) == (True, "acme", "ann")
        assert [(await caller("l" * 16, **{"pawl-user": user})).user_id for user in ("bob", "eve")] == ["bob", "eve"]
        for metadata in ({}, *({"authorization": header} for header in wrong)):
            with pytest.raises(Unauthenticated):
                await keys.authenticate(metadata, source="")


def test_a_delegate_acts_for_a_user_with_the_roles_it_passes_on() -> None:
    backend = credential("delegate", "member", "approver", "finance")
    ann = principal_of(backend, {"pawl-user": "ann"})
    assert (ann.store_id, ann.user_id, ann.roles) == ("acme", "ann", frozenset({"member"}))
    assert (ann.credential_id, ann.decides, ann.delegate_user_id) == ("file-1", False, "backend")
    assert {principal_of(backend, own).delegate_user_id for own in ({}, {"pawl-user": "backend"})} == {""}
    named = principal_of(backend, {"pawl-user": "ann", "pawl-roles": "approver, finance"})
    assert named.roles == {"approver", "finance"}
    assert principal_of(credential("delegate", "member", decides_for_users=True), {"pawl-user": "ann"}).decides
    with pytest.raises(InvalidId):
        principal_of(backend, {"pawl-user": "a.b"})


def test_callers_never_get_more_rights_than_their_keys_allow() -> None:
    """A request for fewer roles than the key has must not get all of them."""
    admin, approver, delegate = credential("admin"), credential("approver"), credential("delegate", "approver")
    assert principal_of(admin, {"pawl-user": "backend", "pawl-store": "acme"}).user_id == "backend"
    rows: list[tuple[Credential, dict[str, str]]] = [
        (admin, {"pawl-user": "ann"}),
        (admin, {"pawl-store": "other"}),
        (approver, {"pawl-roles": "viewer"}),
        (delegate, {"pawl-roles": "viewer"}),
        (delegate, {"pawl-user": "ann", "pawl-store": "other"}),
        *((delegate, {"pawl-user": "ann", "pawl-roles": roles}) for roles in ("admin", "delegate", "")),
    ]
    assert not_refused(PermissionDenied, lambda row: principal_of(*row), rows) == []


def test_the_users_behind_an_action_include_key_creators_and_delegates() -> None:
    """HITL-4: the creators of a key and its delegate user count as acting, even if the request names another user."""
    makers = frozenset({UserId("olga"), UserId("otto")})
    backend = msgspec.structs.replace(credential("delegate", "member"), maker_user_ids=makers)
    rows: list[tuple[Credential, dict[str, str], set[str]]] = [
        (backend, {"pawl-user": "ann"}, {"backend", "olga", "otto"}),
        (backend, {"pawl-user": "otto"}, {"backend", "olga"}),
        (backend, {}, {"olga", "otto"}),
        (credential("member"), {}, set()),
    ]
    assert [principal_of(key, metadata).people for key, metadata, _ in rows] == [people for *_, people in rows]


@given(
    own=st.frozensets(st.sampled_from([*sorted(ROLES_OF_A_STORE), "finance"])),
    wanted=st.frozensets(st.sampled_from([*sorted(ROLES), "finance"])),
)
def test_a_delegate_cannot_pass_on_more_rights_than_it_has(own: frozenset[str], wanted: frozenset[str]) -> None:
    backend = credential("delegate", *own)
    try:
        acting = principal_of(backend, {"pawl-user": "ann", "pawl-roles": ",".join(wanted)})
    except PermissionDenied:
        return
    assert acting.roles <= own
    own_rights = rights({"delegate", *own})
    assert all(not callers.isdisjoint(own_rights) for callers in CALLERS.values() if callers & acting.rights)


@given(st.frozensets(st.text(min_size=1)))
def test_unknown_roles_give_no_rights(roles: frozenset[str]) -> None:
    """Otherwise a misspelt `viewer` could write."""
    assert [*rights(()), *rights(["viewer", "finance"])] == [Role.MEMBER, Role.VIEWER]
    strange = roles - ROLES or {"veiwer"}
    callers = [principal_of(credential(*more, *strange), {}) for more in ((), ("delegate",))]
    rows = [(caller, allowed) for caller in callers for allowed in CALLERS.values()]
    assert not_refused(PermissionDenied, lambda row: auth.check_may_call(*row), rows) == []


def test_a_viewer_cannot_change_anything() -> None:
    verbs = [name.rpartition("/")[2] for name, callers in CALLERS.items() if Role.VIEWER in callers]
    reading = ("Get", "List", "Watch", "Preview", "Export", "Subscribe", "WhoAmI", "ServerReflection")
    assert [verb for verb in verbs if not verb.startswith(reading)] == []
    assert all(callers <= ANYBODY for callers in CALLERS.values())


def test_keys_are_read_from_a_file() -> None:
    [found] = parse_keys(f"[{ENTRY}]".encode()).values()
    assert (found.store_id, found.user_id, found.roles) == ("acme", "ann", frozenset({"member"}))
    assert "0123456789abcdef" not in found.credential_id
    deployment = '{"key": "0123456789abcdef", "user_id": "root", "roles": ["deployment"]}'
    [found] = parse_keys(f"[{deployment}]".encode()).values()
    assert principal_of(found, {}).store_id == ""


def test_an_invalid_keys_file_gives_one_clear_error_without_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def start(text: str | None) -> None:
        path.write_text(text) if text is not None else path.unlink()
        WatchedFile(path, "PAWL_API_KEYS_FILE", parse_keys, ManualClock())

    rows: list[tuple[str | None, str]] = [
        ("{}", "Expected `array`"),
        (f"[{ENTRY}, {ENTRY}]", "same key twice"),
        (f"[{ENTRY.replace('acme', 'a.b')}]", "store_id"),
        (f"[{ENTRY.replace('0123456789abcdef', 'short')}]", "key"),
        (f"[{ENTRY.replace('roles', 'rolls')}]", "unknown field"),
        (f"[{ENTRY.replace('member', 'deployment')}]", "deployment"),
        (f"[{ENTRY.replace('member', 'veiwer')}]", "at least one of viewer, member"),
        ("[", "truncated"),
        (None, "cannot read"),
    ]
    clear = r"^PAWL_API_KEYS_FILE: (?!.*0123456789abcdef).*"
    assert not_explained(StartError, start, [(text, clear + says) for text, says in rows]) == []


def key_file(folder: Path) -> tuple[Path, ManualClock, WatchedFile[Any]]:
    path, clock = folder / "keys.json", ManualClock()
    path.write_text(f"[{ENTRY}]")
    return path, clock, WatchedFile(path, "PAWL_API_KEYS_FILE", parse_keys, clock, without=b"[]")


def of_key(credential_id: str, *roles: str, user_id: str = "ann", delegate_user_id: str = "") -> Principal:
    return Principal(
        store_id=StoreId("acme"),
        user_id=UserId(user_id),
        roles=frozenset(roles),
        credential_id=CredentialId(credential_id),
        delegate_user_id=UserId(delegate_user_id),
    )


async def test_only_keys_removed_from_the_file_stop_working(tmp_path: Path) -> None:
    path, clock, keys = key_file(tmp_path)
    (found,) = keys().values()
    is_gone = gone(ServiceSettings.model_construct(api_keys_file=path), clock)
    all_of = [of_key(each) for each in (found.credential_id, "local", "key_1", "token-1")]
    assert [is_gone(each) for each in all_of] == [False] * 4
    path.write_text("[]")
    await clock.advance(1.0)
    assert [is_gone(each) for each in all_of] == [True, False, False, False]
    assert gone(ServiceSettings.model_construct(api_keys_file=None), clock)(all_of[0])


@pytest.mark.parametrize(
    ("roles", "is_gone"),
    [
        (("member", "approver"), [False, True, True, True]),
        (("member",), [True, True, True, True]),
        (("member", "approver", "delegate"), [False, True, False, False]),
        (("member", "delegate"), [True, True, False, True]),
    ],
)
def test_a_role_removed_from_a_key_in_the_file_no_longer_applies(
    tmp_path: Path, roles: tuple[str, ...], is_gone: list[bool]
) -> None:
    path, entry = tmp_path / "keys.json", {"key": "a" * 20, "store_id": "acme", "user_id": "ann", "roles": roles}
    path.write_bytes(msgspec.json.encode([entry]))
    (found,) = parse_keys(path.read_bytes()).values()
    callers = [
        of_key(found.credential_id, "member", "approver"),
        of_key(found.credential_id, "member", user_id="bob"),
        of_key(found.credential_id, "member", user_id="eve", delegate_user_id="ann"),
        of_key(found.credential_id, "approver", user_id="eve", delegate_user_id="ann"),
    ]
    check = gone(ServiceSettings.model_construct(api_keys_file=path), ManualClock())
    assert [check(caller) for caller in callers] == is_gone


async def test_a_changed_keys_file_is_reloaded_unless_it_is_broken(tmp_path: Path) -> None:
    """Even a change of neither size nor mtime counts, because a removed key must stop working."""
    path, clock, keys = key_file(tmp_path)
    state = path.stat()
    seen = [[found.user_id for found in keys().values()]]
    for text in (ENTRY.replace("ann", "bob"), "[", ""):
        path.write_text(f"[{text}]")
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert [found.user_id for found in keys().values()] == seen[-1], "it is not read before a second has passed"
        await clock.advance(1.0)
        seen.append([found.user_id for found in keys().values()])
    assert seen == [["ann"], ["bob"], ["bob"], []]


async def test_keys_of_a_missing_file_stay_valid_for_a_minute(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """OPS-1: stored keys also stay valid for a minute without job-store. The problem is logged once a minute."""
    path, clock, keys = key_file(tmp_path)
    own = WatchedFile(path, "PAWL_SERVICE_KEY_FILE", parse_keys, clock)
    there = keys()
    moved = path.rename(tmp_path / "away")
    for second in range(1, 121):
        await clock.advance(1.0)
        assert keys() == (there if second < 60 else {})
        assert own() == there, "the key of the service itself is unchanged"
    warnings = [line for line in "".join(capfd.readouterr()).splitlines() if "PAWL_API_KEYS_FILE" in line]
    assert ["old_content_used=True" in line for line in warnings if "file.not_reloaded" in line] == [True, False]
    moved.rename(path)
    await clock.advance(1.0)
    assert keys() == there, "the same file is back"
    path.unlink()
    await clock.advance(3600.0)
    assert keys() == {}, "it was not read for an hour"


async def test_a_service_uses_the_current_key_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, clock = tmp_path / "key", ManualClock()
    file.write_text("one\n")
    assert service_key(read(ServiceSettings), clock) is None
    monkeypatch.setenv("PAWL_SERVICE_KEY_FILE", str(file))
    shown = service_key(read(ServiceSettings), clock)
    assert shown is not None
    # If no header can carry the key, every call would fail.
    broken = [("\n", "two"), ("2\r\n", "two"), ("2\n2\n", "two"), ("zw\u00f6", "two")]
    for text, wanted in [("two\n", "two"), *broken, ("three", "three")]:
        file.write_bytes(text.encode())
        await clock.advance(1.0)
        assert shown() == wanted


def test_services_are_identified_by_their_key_digests() -> None:
    digest = "ab" * 32
    found = parse_service_keys(f'{{"agent-loop": ["{digest}"]}}'.encode())
    assert found == {bytes.fromhex(digest): service_principal("agent-loop")}
    with pytest.raises(ValueError, match="two services"):
        parse_service_keys(f'{{"agent-loop": ["{digest}"], "notifier": ["{digest}"]}}'.encode())
