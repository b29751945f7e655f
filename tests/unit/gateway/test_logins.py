"""Logins by an identity provider: what a browser keeps of them, and whose session goes on."""

from __future__ import annotations

import json
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from pawl.errors import DependencyUnavailable
from pawl.gateway.adapters.openid import Endpoints, Providers
from pawl.gateway.adapters.seal import Seal
from pawl.gateway.domain.openid import Provider, Tokens
from pawl.gateway.domain.session import Session
from tests.fakes.issuer import token
from tests.unit.gateway.test_app import HOST, SEAL, Door, reason

pytestmark = pytest.mark.asyncio

AT = f"https://{HOST}"
ORIGIN = {"origin": AT}
LOGINS = [{"name": name, "issuer": f"https://{name}.example.com", "client_id": "pawl"} for name in ("staff", "guests")]


class World(Door):
    """A gateway with two providers, of which `staff` gives refresh tokens, and a browser at it."""

    def __init__(self, logins: Path) -> None:
        super().__init__(gateway_oidc_file=logins, public_url=AT, gateway_session_hours=1.0)
        self.cookies: dict[str, str] = {}
        self.is_away = False

    async def endpoints(self, provider: Provider) -> Endpoints:
        if self.is_away:
            raise DependencyUnavailable
        at = provider.issuer
        return Endpoints(
            issuer=at, jwks_uri=f"{at}/keys", authorization_endpoint=f"{at}/auth", token_endpoint=f"{at}/token"
        )

    async def tokens(self, provider: Provider, _: object) -> Tokens:
        key = token(sub=provider.name, exp=self.clock.now() + 60)
        return Tokens(access_token=key, refresh_token="next" if provider.name == "staff" else "")

    async def go(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """Ask, and keep the cookies as a browser does."""
        answer = await self.ask(method, path, at=AT, cookies=self.cookies, **more)
        for line in answer.headers.get_list("set-cookie"):
            for cookie in SimpleCookie(line).values():
                self.cookies.pop(cookie.key, None)
                if cookie["max-age"] != "0":
                    self.cookies[cookie.key] = cookie.value
        return answer

    async def log_in(self, name: str) -> None:
        """Log in at a provider, which asks nothing."""
        begun = await self.go("GET", f"/login/openid/{name}")
        [state] = parse_qs(urlsplit(begun.headers["location"]).query)["state"]
        done = await self.go("GET", "/login/return", params={"state": state, "code": "c"})
        assert done.headers["location"] == "/"

    async def renew(self) -> httpx2.Response:
        return await self.go("POST", "/login/renew", json={}, headers=ORIGIN)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "logins.json").write_text(json.dumps(LOGINS))
    found = World(tmp_path / "logins.json")
    monkeypatch.setattr(Providers, "endpoints", lambda _, *given: found.endpoints(*given))
    monkeypatch.setattr(Providers, "tokens", lambda _, *given: found.tokens(*given))
    return found


def key_of(world: World) -> str:
    return Seal(SEAL).open(world.cookies["__Host-pawl_session"], Session).key


async def test_a_session_goes_on_with_the_next_token(world: World) -> None:
    await world.log_in("staff")
    for _ in range(3):
        before = key_of(world)
        await world.clock.advance(61.0)
        assert (await world.renew()).status_code == 200
        assert key_of(world) != before
    await world.clock.advance(3600.0)
    assert reason(await world.renew()) == "SESSION_EXPIRED"


@pytest.mark.parametrize("then", ["guests", "key", "nobody"])
async def test_a_session_never_goes_on_as_that_of_who_was_logged_in_before(world: World, then: str) -> None:
    await world.log_in("staff")
    kept = world.cookies["pawl_renewal"]
    if then == "guests":
        await world.log_in("guests")
    elif then == "key":
        await world.go("POST", "/login", json={"key": "key"}, headers=ORIGIN)
    else:
        await world.go("POST", "/logout", headers=ORIGIN)
    world.cookies["pawl_renewal"] = kept  # As it is left, or as another host of the domain sets it.
    before = world.cookies.get("__Host-pawl_session")
    await world.clock.advance(61.0)
    assert (await world.renew()).status_code == 401
    assert world.cookies.get("__Host-pawl_session") == before


async def test_no_other_host_can_put_a_login_of_its_own_into_a_browser(world: World) -> None:
    begun = await world.go("GET", "/login/openid/staff")
    [cookie] = SimpleCookie(begun.headers["set-cookie"]).values()
    assert cookie.key == "__Host-pawl_login"
    assert (cookie["path"], cookie["domain"], cookie["secure"]) == ("/", "", True)
    await world.log_in("staff")
    assert "__Host-pawl_login" not in world.cookies


async def test_a_provider_that_is_away_is_told_on_the_page_of_the_login(world: World) -> None:
    world.is_away = True
    begun = await world.go("GET", "/login/openid/staff")
    assert (begun.status_code, begun.headers["location"]) == (303, "/#login=away")
    assert (await world.go("GET", "/login/openid/nobody")).status_code == 400
