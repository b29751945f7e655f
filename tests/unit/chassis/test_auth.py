from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pawl.chassis import auth
from pawl.chassis.auth import ApiKey, KeyAuthenticator, Principal, read_keys
from pawl.chassis.start import StartError
from pawl.errors import PermissionDenied, Unauthenticated

USER = Principal(store_id="acme", user_id="ann")
ENTRY = '{"key": "0123456789abcdef", "store_id": "acme", "user_id": "ann", "roles": ["member"]}'


async def test_each_task_has_its_own_caller() -> None:
    """I13: two requests served side by side never see each other's principal."""

    async def serve(principal: Principal) -> Principal:
        auth.set_principal(principal)
        await asyncio.sleep(0)
        return auth.current_principal()

    principals = [Principal(store_id=f"s{n}", user_id="u") for n in range(5)]
    assert await asyncio.gather(*(serve(principal) for principal in principals)) == principals
    with pytest.raises(Unauthenticated):
        auth.current_principal()


async def test_a_user_is_required() -> None:
    async def serve() -> None:
        auth.set_principal(USER)
        assert auth.require_user() == USER
        auth.set_principal(auth.SERVICE)
        with pytest.raises(PermissionDenied):
            auth.require_user()

    await asyncio.create_task(serve())


def test_a_key_is_known_again_and_an_unknown_one_stays_unknown() -> None:
    keys = KeyAuthenticator(
        [ApiKey(key="0123456789abcdef", store_id="acme", user_id="ann")], service_key="s" * 16, local_key="l" * 16
    )

    def caller(key: str, **more: str) -> Principal:
        return keys.authenticate({"authorization": f"Bearer {key}", **more}, service_only=False)

    for _ in range(3):
        assert caller("0123456789abcdef", **{"pawl-user": "bob"}) == USER
        assert caller("s" * 16) == auth.SERVICE
        for user in ("bob", "eve"):
            assert caller("l" * 16, **{"pawl-user": user}).user_id == user
        for unknown in ("0123456789abcdeF", "s" * 17, "l" * 15):
            with pytest.raises(Unauthenticated):
                caller(unknown)


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(f"[{ENTRY}]")
    entry = read_keys(path)[0]
    assert (entry.store_id, entry.user_id, entry.roles) == ("acme", "ann", ["member"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "Expected `array`"),
        (f"[{ENTRY}, {ENTRY}]", "same key twice"),
        (f"[{ENTRY.replace('acme', 'a.b')}]", "store_id"),
        (f"[{ENTRY.replace('0123456789abcdef', 'short')}]", "key"),
        (f"[{ENTRY.replace('roles', 'rolls')}]", "unknown field"),
        ("[", "truncated"),
    ],
)
def test_a_wrong_keys_file_is_one_clear_sentence_without_keys(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(StartError, match=says) as caught:
        read_keys(path)
    assert str(caught.value).startswith("PAWL_API_KEYS_FILE: ")
    assert "0123456789abcdef" not in str(caught.value)


def test_a_missing_keys_file_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot read"):
        read_keys(tmp_path / "none")
