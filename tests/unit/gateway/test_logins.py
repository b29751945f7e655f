"""OpenID logins: redirects, returns from the provider, and renewal of sessions."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
from contextlib import nullcontext
from functools import partial
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.errors import DependencyUnavailable, Unauthenticated
from pawl.gateway.login import rules as openid
from pawl.gateway.login.providers import Endpoints, Providers
from pawl.gateway.login.rules import Provider, Tokens
from pawl.gateway.login.session import Seal, Session
from pawl.server.identity.discovery import FetchFailed
from tests.fakes.issuer import token
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each
from tests.unit.gateway.test_app import HOST, SEAL, WHO, Browser, reason

AT = f"https://{HOST}"
ORIGIN = {"origin": AT}
LOGINS = [{"name": name, "issuer": f"https://{name}.example.com", "client_id": "pawl"} for name in ("staff", "guests")]


class World(Browser):
    def __init__(self, logins: Path) -> None:
        super().__init__(gateway_oidc_file=logins, public_url=AT, gateway_session_hours=1.0)
        self.cookies: dict[str, str] = {}
        self.is_unavailable = False
        self.subject = "ann"
        self.revoked: list[str] = []

    async def endpoints(self, provider: Provider) -> Endpoints:
        if self.is_unavailable:
            raise DependencyUnavailable
        at = provider.issuer
        return Endpoints(
            issuer=at,
            jwks_uri=f"{at}/keys",
            authorization_endpoint=f"{at}/auth",
            token_endpoint=f"{at}/token",
            authorization_response_iss_parameter_supported=provider.name == "staff",
        )

    async def tokens(self, provider: Provider, _: object) -> Tokens:
        """Return tokens of `subject`. Regardless of their own expiry, the services accept them for 60 s."""
        caller = self.channel.who.caller
        caller.credential_id = f"{provider.name}-{self.subject}"
        caller.expire_time.FromSeconds(int(self.clock.now()) + 60)
        key = token(sub=self.subject, exp=self.clock.now() - 1)
        id_token = token(nonce=self.nonce)
        return Tokens(access_token=key, id_token=id_token, refresh_token="next" if provider.name == "staff" else "")

    async def revoke(self, provider: Provider, refresh_token: str) -> None:
        self.revoked += [provider.name, refresh_token]

    async def go(self, method: str, path: str, **more: Any) -> httpx2.Response:
        answer = await self.ask(method, path, at=AT, cookies=self.cookies, **more)
        for line in answer.headers.get_list("set-cookie"):
            for cookie in SimpleCookie(line).values():
                self.cookies.pop(cookie.key, None)
                if cookie["max-age"] != "0":
                    self.cookies[cookie.key] = cookie.value
        return answer

    async def log_in(self, name: str, back: str = "", issuer: str | None = None) -> str:
        redirect = await self.go("GET", f"/login/openid/{name}")
        asked = parse_qs(urlsplit(redirect.headers["location"]).query)
        [state], [self.nonce] = asked["state"], asked["nonce"]
        query = {"state": state, "code": "c", "iss": f"https://{name}.example.com" if issuer is None else issuer}
        done = await self.go("GET", f"/login/return/{back or name}", params=query)
        assert asked["redirect_uri"] == [f"{AT}/login/return/{name}"]
        return done.headers["location"]

    async def renew(self) -> httpx2.Response:
        return await self.go("POST", "/login/renew", json={}, headers=ORIGIN)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "logins.json").write_text(json.dumps(LOGINS))
    found = World(tmp_path / "logins.json")
    monkeypatch.setattr(Providers, "endpoints", lambda _, *given: found.endpoints(*given))
    monkeypatch.setattr(Providers, "tokens", lambda _, *given: found.tokens(*given))
    monkeypatch.setattr(Providers, "revoke", lambda _, *given: found.revoke(*given))
    return found


def key_of(world: World) -> str:
    return Seal(SEAL).open(world.cookies["__Host-pawl_session"], Session).key


async def test_a_session_is_renewed_with_the_next_token(world: World) -> None:
    await world.log_in("staff")
    for _ in range(3):
        before = key_of(world)
        assert (await world.go("POST", WHO, json={}, headers=ORIGIN)).status_code == 200, (
            "the expiry of the services counts"
        )
        await world.clock.advance(61.0)
        assert (await world.renew()).status_code == 200
        assert key_of(world) != before
    await world.clock.advance(3600.0)
    assert reason(await world.renew()) == "SESSION_EXPIRED"


@pytest.mark.parametrize("then", ["guests", "key", "nobody", "another user"])
async def test_a_session_is_never_renewed_as_the_previous_user(world: World, then: str) -> None:
    await world.log_in("staff")
    kept = world.cookies["pawl_renewal"]
    if then == "guests":
        await world.log_in("guests")
    elif then == "another user":
        world.subject = "eve"
    elif then == "key":
        await world.go("POST", "/login", json={"key": "key"}, headers=ORIGIN)
    else:
        await world.go("POST", "/login/out", headers=ORIGIN)
    world.cookies["pawl_renewal"] = kept  # As left behind by an earlier login, or as set by another host of the domain.
    before = world.cookies.get("__Host-pawl_session")
    assert world.revoked == (["staff", "next"] if then == "nobody" else [])
    await world.clock.advance(61.0)
    assert ((await world.renew()).status_code, world.cookies.get("__Host-pawl_session")) == (401, before)


@pytest.mark.parametrize(
    ("name", "back", "issuer", "leads_to"),
    [
        ("staff", "staff", None, "/"),
        ("staff", "staff", "", "/#login=refused"),
        ("staff", "guests", None, "/#login=refused"),
        ("guests", "guests", "", "/"),
        ("guests", "guests", "https://staff.example.com", "/#login=refused"),
    ],
)
async def test_a_response_from_another_provider_is_refused(
    world: World, name: str, back: str, issuer: str | None, leads_to: str
) -> None:
    """Each provider has its own return address, and `staff` also announces its name in the response (RFC 9207)."""
    assert await world.log_in(name, back, issuer) == leads_to


async def test_a_failing_provider_is_asked_at_most_once_in_five_seconds(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def describe(_: object, issuer: str, __: object) -> Endpoints:
        asked.append(issuer)
        await asyncio.sleep(0)
        raise FetchFailed("status 500")

    monkeypatch.setattr("pawl.gateway.login.providers.describe", describe)
    providers = Providers(clock)
    for times in (1, 2):
        found = await asyncio.gather(*(providers.endpoints(PROVIDER) for _ in range(60)), return_exceptions=True)
        assert {type(each) for each in found} == {DependencyUnavailable}
        assert len(asked) == times
        await clock.advance(5.0)


async def test_an_unavailable_provider_is_reported_on_the_login_page(world: World) -> None:
    world.is_unavailable = True
    redirect = await world.go("GET", "/login/openid/staff")
    assert (redirect.status_code, redirect.headers["location"]) == (303, "/#login=unavailable")
    assert (await world.go("GET", "/login/openid/nobody")).status_code == 400


PROVIDER = Provider(name="id", issuer="https://id.example.com", client_id="a b", client_secret="s:1")
PUBLIC = Provider(name="id", issuer="https://id.example.com", client_id="pawl", parameters={"audience": "pawl"})
BACK = "https://pawl.example.com/login/return"


def attempt(to: str = "/") -> openid.Attempt:
    texts = (f"random-{number}" for number in itertools.count())
    return openid.start_attempt(PROVIDER, to, 100.0, lambda: next(texts))


def test_the_redirect_has_a_challenge_and_no_secret() -> None:
    pending = attempt()
    url = openid.authorization_url(PUBLIC, "https://id.example.com/auth?realm=a", pending, BACK)
    asked = {name: value for name, [value] in parse_qs(urlsplit(url).query).items()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(pending.verifier.encode()).digest()).rstrip(b"=").decode()
    assert asked == {
        "realm": "a",
        "audience": "pawl",
        "response_type": "code",
        "client_id": "pawl",
        "redirect_uri": BACK,
        "scope": "openid",
        "state": pending.state,
        "nonce": pending.nonce,
        "code_challenge": digest,
        "code_challenge_method": "S256",
    }
    assert (pending.verifier in url, len({pending.state, pending.nonce, pending.verifier})) == (False, 3)


def test_a_code_is_exchanged_with_verifier_and_client_credentials() -> None:
    pending = attempt()
    form = openid.code_form(PROVIDER, "the-code", pending, BACK)
    assert {"code": "the-code", "code_verifier": pending.verifier, "redirect_uri": BACK}.items() <= form.items()
    basic = "Basic " + base64.b64encode(b"a%20b:s%3A1").decode()
    assert ("client_id" in form, openid.authorization(PROVIDER)) == (False, basic)
    assert openid.renewal_form(PUBLIC, "next") == {
        "audience": "pawl",
        "client_id": "pawl",
        "grant_type": "refresh_token",
        "refresh_token": "next",
    }
    assert openid.authorization(PUBLIC) is None


@for_each(
    ("state", "issuer", "now"),
    [
        ("other", "", 100.0),
        ("", "", 100.0),
        ("\u00e9", "", 100.0),
        ("random-0", "https://evil.example.com", 100.0),
        ("random-0", "", 700.0),
    ],
)
def test_a_callback_with_the_wrong_state_or_issuer_is_refused(state: str, issuer: str, now: float) -> None:
    check = partial(openid.check_return, attempt(), provider=PROVIDER, requires_issuer=False)
    check(state="random-0", issuer=PROVIDER.issuer, now=699.0)
    with pytest.raises(Unauthenticated):
        check(state=state, issuer=issuer, now=now)


GOOD_TOKEN = token(nonce="n1")
BY_ID = msgspec.structs.replace(PROVIDER, token="id_token")  # a choice


@for_each(
    ("provider", "tokens", "nonce", "key"),
    [
        (PROVIDER, Tokens(access_token="at", id_token=GOOD_TOKEN), "n1", "at"),
        (BY_ID, Tokens(access_token="at", id_token=GOOD_TOKEN), "n1", GOOD_TOKEN),
        (msgspec.structs.replace(PROVIDER, scope="pawl"), Tokens(access_token="at"), "n1", "at"),
        (PROVIDER, Tokens(access_token="at", id_token=token(nonce="n2")), "n1", None),
        (PROVIDER, Tokens(access_token="at", id_token="no.e30.token"), "n1", None),
        (PROVIDER, Tokens(access_token="at"), "n1", None),
        (PROVIDER, Tokens(id_token=GOOD_TOKEN), "n1", None),
        (PROVIDER, Tokens(), "n1", None),
        (BY_ID, Tokens(access_token="at"), None, None),
    ],
)
def test_the_configured_token_becomes_the_key_if_its_nonce_matches(
    provider: Provider, tokens: Tokens, nonce: str | None, key: str | None
) -> None:
    with pytest.raises(Unauthenticated) if key is None else nullcontext():
        assert openid.key_of(provider, tokens, nonce) == key


@given(st.text(min_size=1, max_size=60) | st.sampled_from(["..", "a.e30.b", "a.bnVsbA.b", "a.eyJub25jZSI6MX0.b"]))
def test_an_invalid_id_token_is_refused(text: str) -> None:
    with pytest.raises(Unauthenticated):
        openid.key_of(PROVIDER, Tokens(access_token="at", id_token=text), "n1")


@for_each(
    "to",
    [
        "https://evil.example.com",
        "//evil.example.com",
        "/\\evil.example.com",
        "",
        "runs",
        "/a\nb",
        "/" + "a" * 600,
    ],
)
def test_a_login_redirects_only_to_console_pages(to: str) -> None:
    assert attempt(to).to == "/"
    assert attempt("/runs?view=open").to == "/runs?view=open"


GOOD: dict[str, Any] = {"name": "id", "issuer": "https://id.example.com", "client_id": "pawl"}


@for_each(
    "entries",
    [
        [GOOD | {"issuer": "http://id.example.com"}],
        [GOOD | {"parameters": {"redirect_uri": "https://evil.example.com"}}],
        [GOOD | {"token": "refresh_token"}],
        [GOOD | {"nope": 1}],
        [GOOD | {"name": "a/b"}],
        [GOOD, GOOD],
        [{"name": "id"}],
        GOOD,
    ],
)
def test_an_invalid_providers_file_is_refused(entries: Any) -> None:
    assert openid.find(openid.parse_providers(json.dumps([GOOD]).encode()), "id").client_id == "pawl"
    with pytest.raises(ValueError):  # noqa: PT011  # of several kinds
        openid.parse_providers(json.dumps(entries).encode())
