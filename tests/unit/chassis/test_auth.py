from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis import auth
from pawl.chassis.auth import Principal, principal_of, service_principal
from pawl.chassis.credentials import (
    UNKNOWN,
    ApiKey,
    FileCredential,
    WatchedFile,
    gone_from_file,
    parse_keys,
    parse_service_keys,
    service_key,
)
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.roles import ANYBODY, CALLERS, ROLES, ROLES_OF_A_STORE, Role, rights
from pawl.chassis.settings import ServiceSettings, read
from pawl.chassis.start import StartError
from pawl.errors import InvalidId, PermissionDenied, Unauthenticated
from tests.fakes.manual_clock import ManualClock
from tests.keys import authenticator

ENTRY = '{"key": "0123456789abcdef", "store_id": "acme", "user_id": "ann", "roles": ["member"]}'
ANN = auth.user_principal(StoreId("acme"), UserId("ann"), frozenset({"member"}))


def credential(*roles: str, decides_for_users: bool = False) -> FileCredential:
    return FileCredential(
        credential_id=CredentialId("file-1"),
        store_id=StoreId("" if "deployment" in roles else "acme"),
        user_id=UserId("backend"),
        roles=frozenset(roles),
        decides_for_users=decides_for_users,
    )


async def test_each_task_has_its_own_caller() -> None:
    """I13: two requests served side by side never see each other's principal."""

    async def serve(principal: Principal) -> Principal:
        auth.set_principal(principal)
        await asyncio.sleep(0)
        return auth.current_principal()

    principals = [Principal(store_id=StoreId(f"s{n}"), user_id=UserId("u")) for n in range(5)]
    assert await asyncio.gather(*(serve(principal) for principal in principals)) == principals
    with pytest.raises(Unauthenticated):
        auth.current_principal()


async def test_a_user_is_required() -> None:
    async def serve() -> None:
        auth.set_principal(ANN)
        assert auth.require_user() == ANN
        for other in (service_principal("agent-loop"), principal_of(credential("deployment"), {})):
            auth.set_principal(other)
            with pytest.raises(PermissionDenied):
                auth.require_user()

    await asyncio.create_task(serve())


async def test_a_key_is_known_again_and_an_unknown_one_stays_unknown() -> None:
    keys = authenticator(
        [ApiKey(key="0123456789abcdef", store_id="acme", user_id="ann")], service_key="s" * 16, local_key="l" * 16
    )

    async def caller(key: str, **more: str) -> Principal:
        return await keys.authenticate({"authorization": f"Bearer {key}", **more}, source="ipv4:127.0.0.1:1")

    for _ in range(3):
        assert (await caller("0123456789abcdef")).user_id == "ann"
        assert await caller("s" * 16) == service_principal("agent-loop")
        for user in ("bob", "eve"):
            assert (await caller("l" * 16, **{"pawl-user": user})).user_id == user
        for unknown in ("0123456789abcdeF", "s" * 17, "l" * 15):
            with pytest.raises(Unauthenticated, match=UNKNOWN):
                await caller(unknown)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "0123456789abcdef", f"Bearer {'x' * 8193}"]
)
async def test_what_is_no_bearer_key_is_refused(header: str | None) -> None:
    metadata = {} if header is None else {"authorization": header}
    with pytest.raises(Unauthenticated):
        await authenticator(local_key="l" * 16).authenticate(metadata, source="")


def test_a_delegate_acts_for_a_user_of_its_store_with_the_roles_that_it_hands_on() -> None:
    backend = credential("delegate", "member", "approver", "finance")
    ann = principal_of(backend, {"pawl-user": "ann"})
    assert (ann.store_id, ann.user_id, ann.roles) == ("acme", "ann", frozenset({"member"}))
    assert (ann.credential_id, ann.decides) == ("file-1", False)
    named = principal_of(backend, {"pawl-user": "ann", "pawl-roles": "approver, finance"})
    assert named.roles == {"approver", "finance"}
    assert principal_of(credential("delegate", "member", decides_for_users=True), {"pawl-user": "ann"}).decides
    for metadata in (
        {"pawl-user": "ann", "pawl-roles": "admin"},
        {"pawl-user": "ann", "pawl-roles": "delegate"},
        {"pawl-user": "ann", "pawl-roles": ""},
        {"pawl-user": "ann", "pawl-store": "other"},
    ):
        with pytest.raises(PermissionDenied):
            principal_of(backend, metadata)
    with pytest.raises(InvalidId):
        principal_of(backend, {"pawl-user": "a.b"})


@pytest.mark.parametrize(
    "caller", [credential("approver"), credential("delegate", "approver")], ids=["own", "delegate"]
)
def test_who_cannot_hand_on_roles_is_told_so(caller: FileCredential) -> None:
    """Somebody who asks for less than the key has must not get more."""
    with pytest.raises(PermissionDenied, match="`pawl-roles` is for a delegate that names a user"):
        principal_of(caller, {"pawl-roles": "viewer"})


def test_it_is_known_for_whom_a_delegate_acts_and_who_it_is() -> None:
    backend = credential("delegate", "member")
    assert principal_of(backend, {"pawl-user": "ann"}).delegate_user_id == "backend"
    for metadata in ({}, {"pawl-user": "backend"}):
        assert principal_of(backend, metadata).delegate_user_id == ""
    assert principal_of(credential("member"), {}).delegate_user_id == ""


def test_whose_act_it_is_where_several_people_are_needed() -> None:
    """HITL-4: who made a key, and whose delegate it is, acts too, whatever name comes with it."""
    makers = frozenset({UserId("olga"), UserId("otto")})
    backend = msgspec.structs.replace(credential("delegate", "member"), maker_user_ids=makers)
    assert principal_of(backend, {"pawl-user": "ann"}).people == {"backend", "olga", "otto"}
    assert principal_of(backend, {"pawl-user": "otto"}).people == {"backend", "olga"}
    assert principal_of(backend, {}).people == {"olga", "otto"}
    assert principal_of(credential("member"), {}).people == frozenset()


async def test_a_delegate_decides_nothing_in_its_own_name_either() -> None:
    """Else it would decide as an approver what it started for a user."""
    own = principal_of(credential("delegate", "approver"), {})
    assert not own.decides
    auth.set_principal(own)
    with pytest.raises(PermissionDenied, match="a delegate does not decide"):
        auth.require_decider()
    for decider in (credential("approver"), credential("delegate", "approver", decides_for_users=True)):
        auth.set_principal(principal_of(decider, {}))
        assert auth.require_decider().decides


def test_a_key_without_the_role_acts_for_its_own_user_only() -> None:
    assert principal_of(credential("admin"), {"pawl-user": "backend", "pawl-store": "acme"}).user_id == "backend"
    for metadata in ({"pawl-user": "ann"}, {"pawl-store": "other"}):
        with pytest.raises(PermissionDenied):
            principal_of(credential("admin", "operator"), metadata)


@given(
    own=st.frozensets(st.sampled_from([*sorted(ROLES_OF_A_STORE), "finance"])),
    wanted=st.frozensets(st.sampled_from([*sorted(ROLES), "finance"])),
)
def test_nobody_gets_more_from_a_delegate_than_it_has(own: frozenset[str], wanted: frozenset[str]) -> None:
    backend = credential("delegate", *own)
    try:
        acting = principal_of(backend, {"pawl-user": "ann", "pawl-roles": ",".join(wanted)})
    except PermissionDenied:
        return
    assert acting.roles <= own
    for callers in CALLERS.values():
        if not callers.isdisjoint(acting.rights):
            assert not callers.isdisjoint(rights({"delegate", *own}))


def test_rights_are_of_known_roles_and_without_roles_those_of_a_member() -> None:
    assert rights(()) == {Role.MEMBER}
    assert rights(["viewer", "finance"]) == {Role.VIEWER}


@given(st.frozensets(st.text(min_size=1)))
def test_roles_that_are_all_unknown_open_nothing(roles: frozenset[str]) -> None:
    """Else a misspelt `viewer` would write."""
    strange = roles - ROLES or {"veiwer"}
    for caller in (credential(*strange), credential("delegate", *strange)):
        for callers in CALLERS.values():
            with pytest.raises(PermissionDenied, match="beside one of viewer, member, approver"):
                auth.check_may_call(principal_of(caller, {}), callers)


def test_who_only_views_changes_nothing() -> None:
    for name, callers in CALLERS.items():
        verb = name.rpartition("/")[2]
        if Role.VIEWER in callers and not verb.startswith("ServerReflection"):
            assert verb.startswith(("Get", "List", "Watch", "Preview", "Subscribe", "WhoAmI")), name
    assert all(callers <= ANYBODY for callers in CALLERS.values())


def test_keys_are_read_from_a_file() -> None:
    [found] = parse_keys(f"[{ENTRY}]".encode()).values()
    assert (found.store_id, found.user_id, found.roles) == ("acme", "ann", frozenset({"member"}))
    assert "0123456789abcdef" not in found.credential_id
    deployment = '{"key": "0123456789abcdef", "user_id": "root", "roles": ["deployment"]}'
    [found] = parse_keys(f"[{deployment}]".encode()).values()
    assert principal_of(found, {}).store_id == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "Expected `array`"),
        (f"[{ENTRY}, {ENTRY}]", "same key twice"),
        (f"[{ENTRY.replace('acme', 'a.b')}]", "store_id"),
        (f"[{ENTRY.replace('0123456789abcdef', 'short')}]", "key"),
        (f"[{ENTRY.replace('roles', 'rolls')}]", "unknown field"),
        (f"[{ENTRY.replace('member', 'deployment')}]", "deployment"),
        (f"[{ENTRY.replace('member', 'veiwer')}]", "beside one of viewer, member"),
        ("[", "truncated"),
    ],
)
def test_a_wrong_keys_file_is_one_clear_sentence_without_keys(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(StartError, match=says) as caught:
        WatchedFile(path, "PAWL_API_KEYS_FILE", parse_keys, ManualClock())
    assert str(caught.value).startswith("PAWL_API_KEYS_FILE: ")
    assert "0123456789abcdef" not in str(caught.value)


def test_a_missing_keys_file_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot read"):
        WatchedFile(tmp_path / "none", "PAWL_API_KEYS_FILE", parse_keys, ManualClock())


async def test_a_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", ManualClock()
    path.write_text(f"[{ENTRY}]")
    keys = WatchedFile(path, "PAWL_API_KEYS_FILE", parse_keys, clock)
    first = keys()
    before = first
    for text, wanted in (("[", first), ("[]", {})):
        draft = tmp_path / "draft"
        draft.write_text(text)
        draft.replace(path)
        assert keys() == before  # not looked at yet
        await clock.advance(1.0)
        assert keys() == wanted
        before = wanted


def of_key(credential_id: str, *roles: str, user_id: str = "ann", delegate_user_id: str = "") -> Principal:
    return Principal(
        store_id=StoreId("acme"),
        user_id=UserId(user_id),
        roles=frozenset(roles),
        credential_id=CredentialId(credential_id),
        delegate_user_id=UserId(delegate_user_id),
    )


async def test_a_key_that_is_taken_out_of_its_file_is_gone_and_no_other_credential_is(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", ManualClock()
    path.write_text(f"[{ENTRY}]")
    (found,) = parse_keys(path.read_bytes()).values()
    settings = ServiceSettings.model_construct(api_keys_file=path)
    is_gone = gone_from_file(settings, clock)
    all_of = [of_key(each) for each in (found.credential_id, "local", "key_1", "token-1")]
    assert [is_gone(each) for each in all_of] == [False] * 4
    path.write_text("[]")
    await clock.advance(1.0)
    assert [is_gone(each) for each in all_of] == [True, False, False, False]
    assert gone_from_file(ServiceSettings.model_construct(api_keys_file=None), clock)(all_of[0])


@pytest.mark.parametrize(
    ("roles", "user_id", "gone"),
    [
        (["member", "approver"], "ann", False),
        (["member"], "ann", True),
        (["member", "approver"], "bob", True),
        (["member", "approver", "delegate"], "ann", False),
    ],
)
async def test_a_key_of_a_file_that_has_lost_a_role_does_not_lend_it_any_more(
    tmp_path: Path, roles: list[str], user_id: str, *, gone: bool
) -> None:
    path = tmp_path / "keys.json"
    entry = {"key": "a" * 20, "store_id": "acme", "user_id": user_id, "roles": roles}
    path.write_bytes(msgspec.json.encode([entry]))
    (found,) = parse_keys(path.read_bytes()).values()
    is_gone = gone_from_file(ServiceSettings.model_construct(api_keys_file=path), ManualClock())
    assert is_gone(of_key(found.credential_id, "member", "approver")) is gone
    assert is_gone(of_key(found.credential_id, "member", user_id="eve", delegate_user_id=user_id)) is (
        "delegate" not in roles
    )


async def test_a_file_of_the_same_size_and_time_is_read_again_too(tmp_path: Path) -> None:
    """Tools that copy files over set the time of the original; a key that was taken out must not count on."""
    path, clock = tmp_path / "keys.json", ManualClock()
    path.write_text(f"[{ENTRY}]")
    keys, state = WatchedFile(path, "PAWL_API_KEYS_FILE", parse_keys, clock), path.stat()
    assert [found.user_id for found in keys().values()] == ["ann"]
    path.write_text(f"[{ENTRY.replace('ann', 'bob')}]")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    await clock.advance(1.0)
    assert [found.user_id for found in keys().values()] == ["bob"]


async def test_keys_of_a_file_that_is_gone_count_for_a_minute_and_then_no_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """OPS-1: as those of rows without job-store; the log says so once a minute."""
    path, clock = tmp_path / "keys.json", ManualClock()
    path.write_text(f"[{ENTRY}]")
    keys = WatchedFile(path, "PAWL_API_KEYS_FILE", parse_keys, clock, without=b"[]")
    own = WatchedFile(path, "PAWL_SERVICE_KEY_FILE", parse_keys, clock)
    there = keys()
    away = path.rename(tmp_path / "away")
    for _ in range(59):
        await clock.advance(1.0)
        assert keys() == there
    for _ in range(61):
        await clock.advance(1.0)
        assert keys() == {}
        assert own() == there, "what a service itself shows stays as it was"
    told = [line for line in "".join(capfd.readouterr()).splitlines() if "PAWL_API_KEYS_FILE" in line]
    assert [("file.not_read_again" in line, "still_counts=True" in line) for line in told] == [
        (True, True),
        (True, False),
    ]
    away.rename(path)
    await clock.advance(1.0)
    assert keys() == there, "it is back, the very same"
    path.unlink()
    await clock.advance(3600.0)
    assert keys() == {}, "nobody looked meanwhile, and it may be gone for long"


async def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    """Who opens one waits for a writer: all calls of the process would."""
    path, clock = tmp_path / "keys.json", ManualClock()
    path.write_text(f"[{ENTRY}]")
    keys = WatchedFile(path, "PAWL_API_KEYS_FILE", parse_keys, clock, without=b"[]")
    there = keys()
    path.unlink()
    os.mkfifo(path)
    await clock.advance(1.0)
    assert keys() == there
    await clock.advance(60.0)
    assert keys() == {}
    with pytest.raises(StartError, match="it is no file but a pipe"):
        WatchedFile(path, "PAWL_API_KEYS_FILE", parse_keys, clock)


async def test_a_broken_file_is_told_once_a_minute(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, clock = tmp_path / "keys.json", ManualClock()
    path.write_text(f"[{ENTRY}]")
    keys = WatchedFile(path, "PAWL_API_KEYS_FILE", parse_keys, clock, without=b"[]")
    there = keys()
    path.write_text("[")
    for _ in range(121):
        await clock.advance(1.0)
        assert keys() == there
    assert "".join(capfd.readouterr()).count("file.not_read_again") == 3


async def test_a_service_shows_the_key_that_its_file_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, clock = tmp_path / "key", ManualClock()
    file.write_text("one\n")
    monkeypatch.setenv("PAWL_SERVICE_KEY_FILE", str(file))
    shown = service_key(read(ServiceSettings), clock)
    assert shown is not None
    # What no header can carry would end every call.
    broken = [("\n", "two"), ("2\r\n", "two"), ("2\n2\n", "two"), ("zw\u00f6", "two")]
    for text, wanted in [("two\n", "two"), *broken, ("three", "three")]:
        file.write_bytes(text.encode())
        await clock.advance(1.0)
        assert shown() == wanted


def test_a_service_without_a_file_of_its_key_shows_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert service_key(read(ServiceSettings), ManualClock()) is None
    monkeypatch.setenv("PAWL_SERVICE_KEY", "one")
    shown = service_key(read(ServiceSettings), ManualClock())
    assert shown is not None
    assert shown() == "one"


def test_services_are_known_by_the_digests_of_their_keys() -> None:
    digest = "ab" * 32
    found = parse_service_keys(f'{{"agent-loop": ["{digest}"]}}'.encode())
    assert found == {bytes.fromhex(digest): service_principal("agent-loop")}
    with pytest.raises(ValueError, match="two services"):
        parse_service_keys(f'{{"agent-loop": ["{digest}"], "notifier": ["{digest}"]}}'.encode())
