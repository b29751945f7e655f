"""Times, claims and what they make of a caller; RFC 8725 has a module of its own. OPS-1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.auth import KEY_LENGTH_MAX, principal_of
from pawl.chassis.credentials import WatchedFile
from pawl.chassis.ids import is_id
from pawl.chassis.roles import Role
from pawl.chassis.start import StartError
from pawl.chassis.tokens import (
    TokenRefused,
    check_claims,
    credential_of,
    fitting,
    is_safe_url,
    parse_keys,
    parse_providers,
    provider_of,
    read_token,
    to_id,
)
from pawl.errors import PermissionDenied
from tests.fakes.issuer import CLAIMS, ISSUER, NOW, key, key_set, keys, provider, published, token
from tests.fakes.manual_clock import ManualClock

ENTRY = {"issuer": ISSUER, "audience": "pawl", "store": {"value": "acme"}, "user": {"claim": "sub"}}


@pytest.mark.parametrize(
    ("times", "holds"),
    [
        ({"exp": NOW + 1}, True),
        ({"exp": NOW - 59}, True),
        ({"exp": NOW - 60}, False),
        ({"exp": None}, False),
        ({"exp": "1800000600"}, False),
        ({"exp": True}, False),
        ({"exp": 0}, False),
        ({"nbf": NOW + 60}, True),
        ({"nbf": NOW + 61}, False),
        ({"nbf": "now"}, False),
        ({"iat": NOW + 60}, True),
        ({"iat": NOW + 61}, False),
        ({"iat": None}, True),
    ],
)
def test_a_token_holds_for_its_time_and_a_leeway(times: dict[str, Any], holds: bool) -> None:
    read = read_token(token(**times))
    if holds:
        check_claims(provider(), read, NOW)
        return
    with pytest.raises(TokenRefused):
        check_claims(provider(), read, NOW)


def test_the_leeway_is_the_providers_own() -> None:
    read = read_token(token(exp=NOW - 5))
    check_claims(provider(leeway_seconds=6), read, NOW)
    with pytest.raises(TokenRefused):
        check_claims(provider(leeway_seconds=5), read, NOW)
    assert credential_of(provider(leeway_seconds=6), read.claims).expires_at == NOW + 1


@pytest.mark.parametrize("text", ["", "..", "a.b.c", "e30.e30.", "é.é.é", "x" * KEY_LENGTH_MAX + "..", "." * 9000])
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(TokenRefused):
        read_token(text)


@given(st.text(max_size=60), st.binary(max_size=60))
def test_any_garbage_is_refused(text: str, content: bytes) -> None:
    for garbage in (text, f"{text}.{text}.{text}", token(content)):
        with pytest.raises(TokenRefused):
            provider_of([], read_token(garbage))


def test_one_issuer_may_have_several_audiences_each_with_rules_of_its_own() -> None:
    first, second = provider(), provider(audience="pawl-ci", store={"value": "ci"})
    assert provider_of([first, second], read_token(token(aud="pawl-ci"))) == second
    assert provider_of([first, second], read_token(token(aud=["pawl-ci", "pawl"]))) == first


def test_the_user_is_a_claim_and_the_credential_is_of_issuer_and_subject() -> None:
    found = credential_of(provider(user={"claim": "name"}), CLAIMS | {"name": "ann-b"})
    assert (found.store_id, found.user_id, found.roles) == ("acme", "ann-b", frozenset())
    assert is_id(found.credential_id)
    later = credential_of(provider(), CLAIMS | {"exp": NOW + 9000, "jti": "2"})
    assert later.credential_id == found.credential_id
    for other in ({"sub": "bob"}, {"iss": f"{ISSUER}/a"}):
        assert credential_of(provider(), CLAIMS | other).credential_id != found.credential_id


def test_a_claim_may_be_within_another() -> None:
    roles = {"claim": ["realm_access", "roles"], "map": {"a": ["approver"]}}
    claims = CLAIMS | {"realm_access": {"roles": ["a", "b"]}, "realm_access.roles": ["x"]}
    assert credential_of(provider(roles=roles), claims).roles == {"approver"}


@pytest.mark.parametrize("value", [None, "", 5, ["acme"], {}, "x" * 1025])
def test_a_token_without_a_store_or_user_is_refused(value: Any) -> None:
    for wanted in ({"store": {"claim": "x"}}, {"user": {"claim": "x"}}, {"user": {"claim": ["x", "y"]}}):
        with pytest.raises(TokenRefused):
            credential_of(provider(**wanted), CLAIMS | {"x": value})


def test_an_email_is_a_user_only_if_the_issuer_has_verified_it() -> None:
    claims = CLAIMS | {"email": "ann@example.com"}
    for by_email in (provider(user={"claim": "email"}), provider(user={"claim": ["email"]})):
        for unproven in (claims, claims | {"email_verified": False}, claims | {"email_verified": "true"}):
            with pytest.raises(TokenRefused, match="e-mail"):
                credential_of(by_email, unproven)
        assert credential_of(by_email, claims | {"email_verified": True}).user_id.startswith("sha256-")


def test_what_is_no_id_gets_one() -> None:
    assert to_id("ann_B-1") == "ann_B-1"
    assert to_id("auth0|123") == "sha256-QENEXq3u6ypdiFrzwTP2DvV1I6H_h7og7cxbbeOS62w"


@given(st.lists(st.text(min_size=1, max_size=80), min_size=2, max_size=20, unique=True))
def test_two_values_never_get_the_same_id(values: list[str]) -> None:
    ids = {to_id(value) for value in values}
    assert len(ids | {to_id(made) for made in ids}) >= len(values)
    assert len(ids) == len(values)
    assert all(is_id(made) for made in ids)


@given(st.text(min_size=1))
def test_nobody_can_take_the_id_that_another_was_given(value: str) -> None:
    made = to_id(value)
    assert made == value or to_id(made) != made


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (["staff"], {"member"}),
        (["staff", "leads", "unknown", 5], {"member", "approver", "finance"}),
        ("staff leads", {"member", "approver", "finance"}),
        ("staff,leads", None),
        (["admin", "deployment", "member"], None),
        ("", None),
        (None, None),
        ({"staff": 1}, None),
    ],
)
def test_roles_are_those_of_the_map_and_who_has_none_is_refused(claim: Any, expected: set[str] | None) -> None:
    rule = {"claim": "groups", "map": {"staff": ["member"], "leads": ["approver", "finance"]}}
    claims = CLAIMS | {"groups": claim}
    if expected is None:
        with pytest.raises(TokenRefused, match="role"):
            credential_of(provider(roles=rule), claims)
        assert credential_of(provider(roles=rule | {"default": ["viewer"]}), claims).roles == {"viewer"}
    else:
        assert credential_of(provider(roles=rule), claims).roles == expected


def test_who_calls_with_a_token_is_of_its_store_with_its_rights_until_it_expires() -> None:
    caller = principal_of(credential_of(provider(), CLAIMS), {})
    assert (caller.store_id, caller.user_id) == ("acme", "ann")
    assert caller.rights == {Role.MEMBER}
    assert caller.expires_at == NOW + 660
    for metadata in ({"pawl-user": "bob"}, {"pawl-store": "other"}):
        with pytest.raises(PermissionDenied):
            principal_of(credential_of(provider(), CLAIMS), metadata)
    rule = {"claim": "sub", "map": {"ann": ["delegate", "member"]}}
    acting = principal_of(credential_of(provider(roles=rule), CLAIMS), {"pawl-user": "bob"})
    assert (acting.user_id, acting.decides) == ("bob", False)
    assert acting.expires_at == NOW + 660


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (ENTRY | {"issuer": "http://id.example.com"}, "https"),
        (ENTRY | {"issuer": "https://user@id.example.com"}, "https"),
        (ENTRY | {"issuer": "https://id.example.com/?x=1"}, "https"),
        (ENTRY | {"jwks_url": "http://id.example.com/keys"}, "jwks_url"),
        (ENTRY | {"jwks_url": "file:///etc/passwd"}, "jwks_url"),
        (ENTRY | {"audience": ""}, "audience"),
        (ENTRY | {"leeway_seconds": 301}, "leeway_seconds"),
        (ENTRY | {"store": {}}, "store"),
        (ENTRY | {"store": {"claim": "a", "value": "b"}}, "store"),
        (ENTRY | {"store": {"value": "a.b"}}, "value"),
        (ENTRY | {"users": {}}, "unknown field"),
        (ENTRY | {"roles": {"claim": "r", "map": {"root": ["deployment"]}}}, "deployment"),
        (ENTRY | {"roles": {"claim": "r", "map": {}, "default": ["deployment"]}}, "deployment"),
        (ENTRY | {"roles": {"claim": "r"}}, "map"),
        (ENTRY | {"roles": {"claim": "r", "map": {"guests": []}}}, "length >= 1"),
        (ENTRY | {"roles": {"claim": "r", "map": {}, "default": []}}, "length >= 1"),
        (ENTRY | {"roles": {"claim": "r", "map": {"guests": ["veiwer"]}}}, "beside one of viewer, member"),
        (ENTRY | {"roles": {"claim": "r", "map": {}, "default": ["veiwer"]}}, "beside one of viewer, member"),
        ({"issuer": ISSUER}, "audience"),
    ],
)
def test_a_wrong_file_of_providers_is_one_clear_sentence(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    path = tmp_path / "oidc.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(StartError, match=says) as caught:
        WatchedFile(path, "PAWL_OIDC_FILE", parse_providers, ManualClock())
    assert str(caught.value).startswith("PAWL_OIDC_FILE: ")


def test_an_issuer_is_named_once_for_an_audience() -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_providers(json.dumps([ENTRY, ENTRY]).encode())
    assert len(parse_providers(json.dumps([ENTRY, ENTRY | {"audience": "other"}]).encode())) == 2


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://id.example.com/realms/a", True),
        ("https://10.0.0.1:8443", True),
        ("http://127.0.0.1:8080/realms/a", True),
        ("http://localhost", True),
        ("http://[::1]:1", True),
        ("http://127.0.0.1.example.com", False),
        ("http://localhost@example.com", False),
        ("https://", False),
        ("https://a:b@c", False),
        ("https://[", False),
        ("https://a:99999999", False),
        ("ftp://a", False),
        ("", False),
    ],
)
def test_keys_come_over_https_or_from_this_machine(url: str, safe: bool) -> None:
    assert is_safe_url(url) is safe


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"keys": {}}', b"{}", b'{"keys": [], "keys": []}', b"x" * 600_000, key_set(*[{}] * 101)]
)
def test_what_is_no_set_of_keys_is_an_outage(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_keys(content)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"kty": ["RSA"]},
        {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA"},
        {"kty": "RSA"},
        {"kty": "RSA", "n": 5, "e": "AQAB"},
        {"kty": "RSA", "n": "", "e": "AQAB"},
        {"kty": "EC", "crv": "P-999", "x": "AA", "y": "AA"},
        {"kty": "OKP", "crv": "X25519", "x": "A" * 43, "use": "sig", "alg": "ECDH-ES"},
        published(key(), use="tls"),
        published(key(), kid=5),
    ],
)
def test_a_key_that_cannot_be_used_spoils_no_others(entry: dict[str, Any]) -> None:
    found = keys(entry, key(), published(key("RSA", 2048), x5c=["not base64!"], x5u=5))
    assert [each.key_id for each in found] == ["k1", "k1"]


def test_a_signature_is_checked_with_a_few_keys_only() -> None:
    many = keys(*(published(key(), kid="k") for _ in range(9)))
    assert len(fitting(many, read_token(token(header={"kid": "k"})))) == 4
