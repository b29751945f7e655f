"""Tokens: validity times, claims, the resulting caller, and RFC 8725 by section (OPS-1)."""

from __future__ import annotations

import base64
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jwk

from pawl.chassis.identity.auth import Credential, principal_of
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import is_id
from pawl.chassis.process.address import is_safe_url
from pawl.chassis.process.start import StartError
from pawl.chassis.process.watched_file import WatchedFile
from pawl.errors import PermissionDenied
from pawl.server.identity.tokens import (
    PublicKey,
    TokenRefused,
    check_claims,
    credential_of,
    fitting,
    is_signed,
    parse_keys,
    parse_providers,
    provider_of,
    read_token,
    to_id,
)
from tests.fakes.issuer import AUDIENCE, CLAIMS, ISSUER, NOW, key, key_set, keys, part, provider, published, token
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each, not_explained, not_refused

ENTRY = {"issuer": ISSUER, "audience": "pawl", "store": {"value": "acme"}, "user": {"claim": "sub"}}


def test_a_token_is_valid_for_its_lifetime_plus_the_provider_leeway() -> None:
    rows: list[tuple[dict[str, Any], bool]] = [
        ({"exp": NOW + 1}, True),
        ({"exp": NOW - 59}, True),
        ({"exp": NOW - 60}, False),
        ({"exp": None}, False),
        ({"exp": "1800000600"}, False),
        ({"exp": True}, False),
        ({"exp": 0}, False),
        ({"exp": 2**63}, False),
        ({"exp": 1e300}, False),
        ({"exp": 253402300800 - 60}, False),
        ({"exp": 253402300799 - 60}, True),
        ({"nbf": NOW + 60}, True),
        ({"nbf": NOW + 61}, False),
        ({"nbf": "now"}, False),
        ({"iat": NOW + 60}, True),
        ({"iat": NOW + 61}, False),
        ({"iat": None}, True),
    ]
    for times, holds in rows:
        read = read_token(token(**times))
        refused = not_refused(TokenRefused, lambda each: check_claims(provider(), each, NOW), [read]) == []
        assert refused is not holds, times
    read = read_token(token(exp=NOW - 5))
    check_claims(provider(leeway_seconds=6), read, NOW)
    with pytest.raises(TokenRefused):
        check_claims(provider(leeway_seconds=5), read, NOW)
    assert credential_of(provider(leeway_seconds=6), read.claims).expire_time == NOW + 1


@given(st.text(max_size=60), st.binary(max_size=60))
def test_garbage_tokens_are_refused(text: str, content: bytes) -> None:
    for garbage in (text, f"{text}.{text}.{text}", token(content)):
        with pytest.raises(TokenRefused):
            provider_of([], read_token(garbage))


def test_an_issuer_may_have_several_audiences_with_separate_rules() -> None:
    first, second = provider(), provider(audience="pawl-ci", store={"value": "ci"})
    assert provider_of([first, second], read_token(token(aud="pawl-ci"))) == second
    assert provider_of([first, second], read_token(token(aud=["pawl-ci", "pawl"]))) == first


def test_the_user_comes_from_a_claim_and_the_credential_from_the_subject() -> None:
    found = credential_of(provider(user={"claim": "name"}), CLAIMS | {"name": "ann-b"})
    assert (found.store_id, found.user_id, found.roles) == ("acme", "ann-b", frozenset())
    assert is_id(found.credential_id)
    assert credential_of(provider(), CLAIMS | {"exp": NOW + 9000, "jti": "2"}).credential_id == found.credential_id
    for other in ({"sub": "bob"}, {"iss": f"{ISSUER}/a"}):
        assert credential_of(provider(), CLAIMS | other).credential_id != found.credential_id


def test_a_token_without_a_store_or_user_is_refused() -> None:
    values: list[Any] = [None, "", 5, ["acme"], {}, "x" * 1025]
    for wanted in ({"store": {"claim": "x"}}, {"user": {"claim": "x"}}, {"user": {"claim": ["x", "y"]}}):
        rule = provider(**wanted)
        assert not_refused(TokenRefused, lambda x, rule=rule: credential_of(rule, CLAIMS | {"x": x}), values) == []  # type: ignore[misc]


def test_an_email_identifies_a_user_only_if_the_issuer_verified_it() -> None:
    claims = CLAIMS | {"email": "ann@example.com"}
    for by_email in (provider(user={"claim": "email"}), provider(user={"claim": ["email"]})):
        for unproven in (claims, claims | {"email_verified": False}, claims | {"email_verified": "true"}):
            with pytest.raises(TokenRefused, match="e-mail"):
                credential_of(by_email, unproven)
        assert credential_of(by_email, claims | {"email_verified": True}).user_id.startswith("sha256-")


@given(st.lists(st.text(min_size=1, max_size=80), min_size=2, max_size=20, unique=True))
def test_distinct_claim_values_get_distinct_ids(values: list[str]) -> None:
    assert to_id("auth0|123") == "sha256-QENEXq3u6ypdiFrzwTP2DvV1I6H_h7og7cxbbeOS62w"
    ids = {value: to_id(value) for value in values}
    assert (len(set(ids.values())), all(map(is_id, ids.values()))) == (len(values), True)
    assert all(made == value or to_id(made) != made for value, made in ids.items())


def test_roles_come_from_the_map_and_a_user_without_roles_is_refused() -> None:
    rule = {"claim": "groups", "map": {"staff": ["member"], "leads": ["approver", "finance"]}}
    rows: list[tuple[Any, set[str] | None]] = [
        (["staff"], {"member"}),
        (["staff", "leads", "unknown", 5], {"member", "approver", "finance"}),
        ("staff leads", {"member", "approver", "finance"}),
        ("staff,leads", None),
        (["admin", "deployment", "member"], None),
        ("", None),
        (None, None),
        ({"staff": 1}, None),
    ]
    for claim, expected in rows:
        claims = CLAIMS | {"groups": claim}
        if expected is None:
            with pytest.raises(TokenRefused, match="role"):
                credential_of(provider(roles=rule), claims)
        found = credential_of(provider(roles=rule | {"default": ["viewer"]}), claims).roles
        assert found == (expected or {"viewer"}), claim


def test_a_token_caller_has_its_stores_rights_until_expiry() -> None:
    caller = principal_of(credential_of(provider(), CLAIMS), {})
    assert (caller.store_id, caller.user_id, caller.expires_at) == ("acme", "ann", NOW + 660)
    assert caller.rights == {Role.MEMBER}
    for metadata in ({"pawl-user": "bob"}, {"pawl-store": "other"}):
        with pytest.raises(PermissionDenied):
            principal_of(credential_of(provider(), CLAIMS), metadata)
    rule = {"claim": "sub", "map": {"ann": ["delegate", "member"]}}
    acting = principal_of(credential_of(provider(roles=rule), CLAIMS), {"pawl-user": "bob"})
    assert (acting.user_id, acting.decides, acting.expires_at) == ("bob", False, NOW + 660)


def test_an_invalid_providers_file_gives_one_clear_error(tmp_path: Path) -> None:
    def start(entries: list[Any]) -> None:
        (tmp_path / "oidc.json").write_text(json.dumps(entries))
        WatchedFile(tmp_path / "oidc.json", "PAWL_OIDC_FILE", parse_providers, ManualClock())

    rows: list[tuple[dict[str, Any], str]] = [
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
        (ENTRY | {"roles": {"claim": "r", "map": {"guests": ["veiwer"]}}}, "at least one of viewer, member"),
        (ENTRY | {"roles": {"claim": "r", "map": {}, "default": ["veiwer"]}}, "at least one of viewer, member"),
        ({"issuer": ISSUER}, "audience"),
    ]
    wrong = [([entry], f"^PAWL_OIDC_FILE: .*{says}") for entry, says in rows]
    assert not_explained(StartError, start, [*wrong, ([ENTRY, ENTRY], "twice")]) == []
    start([ENTRY, ENTRY | {"audience": "other"}])


def test_keys_are_fetched_over_https_or_from_loopback() -> None:
    urls = {
        "https://id.example.com/realms/a": True,
        "https://10.0.0.1:8443": True,
        "http://127.0.0.1:8080/realms/a": True,
        "http://localhost": True,
        "http://[::1]:1": True,
        "http://127.0.0.1.example.com": False,
        "http://localhost@example.com": False,
        "https://": False,
        "https://a:b@c": False,
        "https://[": False,
        "https://a:99999999": False,
        "ftp://a": False,
        "": False,
    }
    assert {url: is_safe_url(url) for url in urls} == urls


def test_an_invalid_key_set_counts_as_an_outage() -> None:
    contents = [b"", b"[]", b'{"keys": {}}', b"{}", b'{"keys": [], "keys": []}', b"x" * 600_000, key_set(*[{}] * 101)]
    assert not_refused(ValueError, parse_keys, contents) == []


def test_unusable_keys_are_skipped_and_candidates_are_limited() -> None:
    entries: list[dict[str, Any]] = [
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
    ]
    for entry in entries:
        found = keys(entry, key(), published(key("RSA", 2048), x5c=["not base64!"], x5u=5))
        assert [each.key_id for each in found] == ["k1", "k1"], entry
    many = keys(*(published(key(), kid="k") for _ in range(9)))
    assert len(fitting(many, read_token(token(header={"kid": "k"})))) == 4


ANYTHING = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"]


def accept(text: str, *, published_keys: tuple[PublicKey, ...] | None = None, **more: Any) -> Credential:
    known = keys(key()) if published_keys is None else published_keys
    read = read_token(text)
    found = provider_of([provider(**{"algorithms": ANYTHING} | more)], read)
    check_claims(found, read, NOW)
    if not is_signed(read, fitting(known, read)):
        raise TokenRefused("signature")
    return credential_of(found, read.claims)


def refused(text: str, match: str = ".", **more: Any) -> None:
    __tracebackhide__ = True
    assert not_explained(TokenRefused, lambda each: accept(each, **more), [(text, match)]) == []


def test_a_valid_token_is_accepted() -> None:
    """Otherwise the tests below might refuse their tokens for another reason."""
    assert (accept(token()).store_id, accept(token()).user_id) == ("acme", "ann")
    assert accept(token(aud=["other", AUDIENCE])).user_id == "ann", "RFC 8725, 3.9: a token may have more audiences"
    for kind in ("JWT", "jwt", "at+jwt", "AT+JWT", "application/at+jwt", None):
        assert accept(token(header={"typ": kind})).user_id == "ann", f"RFC 8725, 3.11: {kind}"


@for_each("alg", ["none", "None", "nOnE", "NONE", ""])
def test_rfc8725_2_1_and_3_2_unsigned_tokens_are_refused(alg: str) -> None:
    for signature in ("", "AA"):
        refused(f"{part({'alg': alg})}.{part(CLAIMS)}.{signature}", "algorithm")


@for_each(("kind", "form"), [("RSA", 2048), ("EC", "P-256")])
def test_rfc8725_2_1_and_3_1_a_public_key_is_not_an_hmac_secret(kind: str, form: int | str) -> None:
    """In this attack, a token for RS256 is changed to HS256 and signed with the public key."""
    private = key(kind, form)
    for secret in (private.as_pem(), private.as_der(), json.dumps(published(private)).encode()):  # type: ignore[union-attr]
        signed = f"{part({'alg': 'HS256', 'kid': 'k1'})}.{part(CLAIMS)}"
        signature = part(hmac.digest(secret, signed.encode(), "sha256"))
        refused(f"{signed}.{signature}", "algorithm", published_keys=keys(private))


def test_rfc8725_3_1_providers_allow_only_asymmetric_algorithms() -> None:
    rows = [["HS256"], ["none"], [], ["RS256", "HS512"], ["RSA1_5"], ["dir"], ["ES256K"]]
    assert not_refused(ValueError, lambda row: provider(algorithms=row), rows) == []


@for_each(
    ("alg", "kind", "form"),
    [
        *((f"{family}{bits}", "RSA", 2048) for family in ("RS", "PS") for bits in (256, 384, 512)),
        ("ES256", "EC", "P-256"),
        ("ES384", "EC", "P-384"),
        ("ES512", "EC", "P-521"),
        ("EdDSA", "OKP", "Ed25519"),
        ("Ed25519", "OKP", "Ed25519"),
        ("Ed448", "OKP", "Ed448"),
    ],
)
def test_rfc8725_3_1_the_algorithm_must_be_allowed_by_the_provider(alg: Any, kind: Any, form: Any) -> None:
    private = key(kind, form)
    text = token(private=private, alg=alg)
    assert accept(text, algorithms=[alg], published_keys=keys(private)).user_id == "ann"
    refused(text, "algorithm", algorithms=[each for each in ANYTHING if each != alg], published_keys=keys(private))


def test_rfc8725_3_1_a_key_is_used_only_for_its_algorithm() -> None:
    private = key("RSA", 2048)
    for_ps = keys(published(private, alg="PS256"))
    assert accept(token(private=private, alg="PS256"), published_keys=for_ps).user_id == "ann"
    refused(token(private=private, alg="RS256"), published_keys=for_ps)


def test_rfc8725_3_1_a_key_is_used_only_for_its_key_type() -> None:
    """The token names a different algorithm from the one that signed it, and keys of both types share an id."""
    both = keys(key(), key("RSA", 2048), key("EC", "P-384"))
    good = token(private=key("RSA", 2048), alg="RS256")
    assert accept(good, published_keys=both).user_id == "ann"
    for alg in ("ES256", "ES384", "PS256", "EdDSA"):
        _, claims, signature = good.split(".")
        refused(f"{part({'alg': alg, 'kid': 'k1'})}.{claims}.{signature}", published_keys=both)


@for_each("more", [{"use": "enc"}, {"key_ops": ["encrypt"]}, {"key_ops": []}, {"alg": "RSA-OAEP-256"}])
def test_rfc8725_3_1_a_key_for_another_use_is_not_used_to_verify_signatures(more: dict[str, Any]) -> None:
    private = key("RSA", 2048)
    refused(token(private=private, alg="RS256"), published_keys=keys(published(private, **more)))
    good = keys(published(private, use="sig", key_ops=["verify"], alg="RS256"))
    assert accept(token(private=private, alg="RS256"), published_keys=good).user_id == "ann"


def test_rfc8725_3_2_weak_rsa_keys_are_ignored() -> None:
    with pytest.warns(UserWarning, match="2048"):
        weak = jwk.generate_key("RSA", 1024, {"kid": "k1"})
    assert keys(weak) == ()


def test_rfc8725_2_3_and_3_3_the_signature_covers_every_part() -> None:
    header, claims, signature = token().split(".")
    other = part(CLAIMS | {"sub": "root"})
    refused(f"{header}.{other}.{signature}", "signature")
    refused(f"{part({'alg': 'ES256', 'kid': 'k1', 'typ': 'JWT'})}.{claims}.{signature}", "signature")
    for broken in ("", part(b"\1" * 63), part(b"\1" * 65), part(b"\0" * 64), part(b"\xff" * 64)):
        refused(f"{header}.{claims}.{broken}", "signature")


def test_rfc8725_2_2_3_4_and_3_5_untrustworthy_keys_are_ignored() -> None:
    off_the_curve = published(key())
    off_the_curve["y"] = off_the_curve["x"]
    shared = {"kty": "oct", "k": part(b"0" * 32), "kid": "k1", "alg": "HS256"}
    assert keys(off_the_curve, shared, key().as_dict(private=True)) == ()
    assert len(keys(off_the_curve, key())) == 1, "other keys of the set are used"


@for_each("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1"])
def test_rfc8725_2_6_and_3_7_header_and_claims_are_utf_8(encoding: str) -> None:
    text = json.dumps(CLAIMS | {"sub": "änn"}, ensure_ascii=False)
    assert accept(token(text.encode())).user_id.startswith("sha256-")
    refused(token(text.encode(encoding)), "strict JSON")
    _, claims, signature = token().split(".")
    header = '{"alg": "ES256", "kid": "kä"}'.encode(encoding)
    refused(f"{part(header)}.{claims}.{signature}", "strict JSON")


def test_rfc8725_2_6_a_token_has_one_encoding() -> None:
    good = token()
    header, claims, signature = good.split(".")
    final = {"A": "B", "Q": "R", "g": "h", "w": "x"}[signature[-1]]
    for text in (
        f"{header}=.{claims}.{signature}",
        f"{header}.{claims}.{signature}==",
        f"{header}.{claims}.{signature[:-1]}{final}",
        f"{header}.{claims}\n.{signature}",
        f" {good}",
        json.dumps({"payload": claims, "protected": header, "signature": signature}).replace(":", "."),
    ):
        refused(text)


def test_rfc8725_2_9_and_3_10_keys_inside_a_token_are_ignored() -> None:
    mine = jwk.generate_key("EC", "P-256", {"kid": "mine"})
    certificate = base64.b64encode(mine.as_der()).decode()
    for header in (
        {"jwk": published(mine)},
        {"jwk": published(mine), "kid": None},
        {"x5c": [certificate]},
        {"jku": "https://evil.example.com/keys", "x5u": "https://evil.example.com/certificate"},
    ):
        refused(token(private=mine, header=header))
        assert accept(token(header=header)).user_id == "ann", "with the key of the issuer it is valid"


_ISSUERS = (f"{ISSUER}/", "https://ID.example.com", f"{ISSUER}.evil.com", "http://id.example.com", "", None, [ISSUER])
_AUDIENCES: tuple[Any, ...] = (None, "", "pawl2", "paw", "Pawl", ["other"], [], {"pawl": 1}, 5, [["pawl"]])
_TYPES = ("secevent+jwt", "logout+jwt", "dpop+jwt", "JOSE", "rt+jwt", "token-introspection+jwt", "", 5, ["JWT"])
_KEY_IDS = ("../../etc/passwd", "k1' OR '1'='1", "http://127.0.0.1/", "k1\x00", "K1")
_AMBIGUOUS = (
    b'{"iss": "https://id.example.com", "sub": "ann", "sub": "root"}',
    *(b"[]", b"null", b"{} {}", b'{"exp": NaN}', b'{"exp": 1e999}', b""),
)
_NO_SUBJECTS: tuple[Any, ...] = (None, "", 5, ["ann"], {})
_CRITICAL: tuple[dict[str, Any], ...] = ({"crit": ["exp"], "exp": NOW + 9}, {"crit": []}, {"b64": False}, {"b64": True})
_LOGOUT: dict[str, Any] = {"http://schemas.openid.net/event/backchannel-logout": {}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("2.3, 3.3: a nested token", {"claims": token().encode(), "header": {"cty": "JWT"}}, "strict JSON"),
    *(("2.3, 3.3: an encrypted token", {"header": each}, str(*each)) for each in ({"cty": "JWT"}, {"enc": "A"})),
    ("2.3, 3.3: a compressed token", {"header": {"zip": "DEF"}}, "zip"),
    *(("2.6: JSON that readers may read in two ways", {"claims": each}, ".") for each in _AMBIGUOUS),
    *(("2.7, 3.8: another issuer", {"iss": each}, "issuer") for each in _ISSUERS),
    ("3.8: a key of another issuer, of the same id", {"private": key(form="P-384"), "alg": "ES384"}, "."),
    ("3.8: a key of another issuer", {"private": jwk.generate_key("EC", "P-256", {"kid": "k1"})}, "signature"),
    *(("3.8: no subject", {"sub": each}, "sub") for each in _NO_SUBJECTS),
    *(("2.7, 3.9: another audience", {"aud": each}, ".") for each in _AUDIENCES),
    *(("2.9, 3.10: an unknown key id", {"header": {"kid": each}}, ".") for each in _KEY_IDS),
    *(("2.9, 3.10: no key id", {"header": {"kid": each}}, "kid") for each in (5, ["k1"], {"kid": "k1"}, True)),
    *(("2.8, 3.11: another type", {"header": {"typ": each}}, "typ") for each in _TYPES),
    ("2.8, 3.12: a logout token", {"header": {"typ": "JWT"}, "events": _LOGOUT}, "event"),
    *(("RFC 7515, 4.1.11: a critical header", {"header": each}, "header has") for each in _CRITICAL),
]


@for_each(("section", "made_of", "says"), REFUSED)
def test_rfc8725_forbidden_tokens_are_refused(section: str, made_of: dict[str, Any], says: str) -> None:
    refused(token(**made_of), says)
