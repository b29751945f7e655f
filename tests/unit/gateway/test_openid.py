"""Logins by an identity provider: what goes there, and what may come back."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.errors import InvalidField, Unauthenticated
from pawl.gateway.domain import openid
from pawl.gateway.domain.openid import Provider, Tokens
from tests.fakes.issuer import token

PROVIDER = Provider(name="id", issuer="https://id.example.com", client_id="a b", client_secret="s:1")
PUBLIC = Provider(name="id", issuer="https://id.example.com", client_id="pawl", parameters={"audience": "pawl"})
BACK = "https://pawl.example.com/login/return"


def attempt(to: str = "/") -> openid.Attempt:
    texts = (f"random-{number}" for number in itertools.count())
    return openid.begin(PROVIDER, to, 100.0, lambda: next(texts))


def test_the_browser_is_sent_with_a_challenge_and_nothing_secret() -> None:
    began = attempt()
    url = openid.authorization_url(PUBLIC, "https://id.example.com/auth?realm=a", began, BACK)
    asked = {name: value for name, [value] in parse_qs(urlsplit(url).query).items()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(began.verifier.encode()).digest()).rstrip(b"=").decode()
    assert asked == {
        "realm": "a",
        "audience": "pawl",
        "response_type": "code",
        "client_id": "pawl",
        "redirect_uri": BACK,
        "scope": "openid",
        "state": began.state,
        "nonce": began.nonce,
        "code_challenge": digest,
        "code_challenge_method": "S256",
    }
    assert began.verifier not in url
    assert len({began.state, began.nonce, began.verifier}) == 3


def test_a_code_is_shown_with_its_verifier_and_by_whom() -> None:
    began = attempt()
    form = openid.code_form(PROVIDER, "the-code", began, BACK)
    assert (form["code"], form["code_verifier"], form["redirect_uri"]) == ("the-code", began.verifier, BACK)
    assert "client_id" not in form
    assert openid.authorization(PROVIDER) == "Basic " + base64.b64encode(b"a%20b:s%3A1").decode()
    form = openid.renewal_form(PUBLIC, "next")
    assert form == {
        "audience": "pawl",
        "client_id": "pawl",
        "grant_type": "refresh_token",
        "refresh_token": "next",
    }
    assert openid.authorization(PUBLIC) is None


@pytest.mark.parametrize(
    ("state", "issuer", "now"),
    [
        ("other", "", 100.0),
        ("", "", 100.0),
        ("\u00e9", "", 100.0),
        ("random-0", "https://evil.example.com", 100.0),
        ("random-0", "", 700.0),
    ],
)
def test_a_browser_that_comes_back_from_elsewhere_is_refused(state: str, issuer: str, now: float) -> None:
    openid.check_return(attempt(), state="random-0", issuer=PROVIDER.issuer, provider=PROVIDER, now=699.0)
    with pytest.raises(Unauthenticated):
        openid.check_return(attempt(), state=state, issuer=issuer, provider=PROVIDER, now=now)


def test_the_token_that_is_chosen_is_the_key_and_of_this_login() -> None:
    good = token(nonce="n1")
    by_id = msgspec.structs.replace(PROVIDER, token="id_token")  # a choice
    tokens = Tokens(access_token="at", id_token=good)
    assert openid.key_of(PROVIDER, tokens, "n1") == "at"
    assert openid.key_of(by_id, tokens, "n1") == good
    for wrong in (Tokens(access_token="at", id_token=token(nonce="n2")), Tokens(id_token=good), Tokens()):
        with pytest.raises(Unauthenticated):
            openid.key_of(PROVIDER, wrong, "n1")
    with pytest.raises(Unauthenticated):
        openid.key_of(by_id, Tokens(access_token="at"), None)


@given(st.text(max_size=60) | st.sampled_from(["..", "a.e30.b", "a.bnVsbA.b", "a.eyJleHAiOiJ4In0.b"]))
def test_what_is_no_token_says_nothing(text: str) -> None:
    found = openid.claims(text)
    assert (found.nonce, found.exp) == (None, None)


@pytest.mark.parametrize(
    "to",
    ["https://evil.example.com", "//evil.example.com", "/\\evil.example.com", "", "runs", "/a\nb", "/" + "a" * 600],
)
def test_a_login_leads_to_a_page_of_the_console_only(to: str) -> None:
    assert attempt(to).to == "/"
    assert attempt("/runs?view=open").to == "/runs?view=open"


GOOD: dict[str, Any] = {"name": "id", "issuer": "https://id.example.com", "client_id": "pawl"}


@pytest.mark.parametrize(
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
def test_a_file_with_a_fault_is_refused(entries: Any) -> None:
    assert openid.find(openid.parse_providers(json.dumps([GOOD]).encode()), "id").client_id == "pawl"
    with pytest.raises(ValueError):  # noqa: PT011  # of several kinds
        openid.parse_providers(json.dumps(entries).encode())


def test_an_unknown_provider_is_said_so() -> None:
    with pytest.raises(InvalidField):
        openid.find((PROVIDER,), "other")
