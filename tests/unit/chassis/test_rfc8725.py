"""The cases of RFC 8725, JSON Web Token Best Current Practices, by section. OPS-1."""

from __future__ import annotations

import base64
import hmac
import json
import re
from typing import Any

import pytest
from joserfc import jwk

from pawl.chassis.tokens import (
    PublicKey,
    TokenCredential,
    TokenRefused,
    check_claims,
    credential_of,
    fitting,
    is_signed,
    provider_of,
    read_token,
)
from tests.fakes.issuer import AUDIENCE, CLAIMS, ISSUER, NOW, key, keys, part, provider, published, token
from tests.tables import not_refused, refusal

ANYTHING = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"]


def accept(text: str, *, published_keys: tuple[PublicKey, ...] | None = None, **more: Any) -> TokenCredential:
    """Return the credential of a token for an issuer with these keys, the usual one if not said, at NOW."""
    known = keys(key()) if published_keys is None else published_keys
    read = read_token(text)
    found = provider_of([provider(**{"algorithms": ANYTHING} | more)], read)
    check_claims(found, read, NOW)
    if not is_signed(read, fitting(known, read)):
        raise TokenRefused("signature")
    return credential_of(found, read.claims)


def refused(text: str, match: str = ".", **more: Any) -> None:
    __tracebackhide__ = True
    said = refusal(TokenRefused, lambda: accept(text, **more))
    assert said is not None, f"accepted {text}"
    assert re.search(match, said), f"{said!r} for {text}"


def test_a_good_token_is_accepted() -> None:
    """Else all that is refused below might be refused for another reason."""
    assert (accept(token()).store_id, accept(token()).user_id) == ("acme", "ann")
    assert accept(token(aud=["other", AUDIENCE])).user_id == "ann", "RFC 8725, 3.9: it may be for others too"
    for kind in ("JWT", "jwt", "at+jwt", "AT+JWT", "application/at+jwt", None):
        assert accept(token(header={"typ": kind})).user_id == "ann", f"RFC 8725, 3.11: {kind}"


def test_rfc8725_2_1_and_3_2_no_token_without_a_signature() -> None:
    for alg in (
        "none",
        "None",
        "nOnE",
        "NONE",
        "",
    ):
        for signature in ("", "AA"):
            refused(f"{part({'alg': alg})}.{part(CLAIMS)}.{signature}", "algorithm")


def test_rfc8725_2_1_and_3_1_a_public_key_is_no_secret_of_an_hmac() -> None:
    """The attack by which RS256 becomes HS256, signed with what everybody knows."""
    for kind, form in (("RSA", 2048), ("EC", "P-256")):
        private = key(kind, form)
        for secret in (private.as_pem(), private.as_der(), json.dumps(published(private)).encode()):  # type: ignore[union-attr]
            signed = f"{part({'alg': 'HS256', 'kid': 'k1'})}.{part(CLAIMS)}"
            signature = part(hmac.digest(secret, signed.encode(), "sha256"))
            refused(f"{signed}.{signature}", "algorithm", published_keys=keys(private))


def test_rfc8725_3_1_no_provider_can_be_given_other_than_asymmetric_algorithms() -> None:
    rows = [["HS256"], ["none"], [], ["RS256", "HS512"], ["RSA1_5"], ["dir"], ["ES256K"]]
    assert not_refused(ValueError, lambda row: provider(algorithms=row), rows) == []


def test_rfc8725_3_1_the_algorithm_is_one_of_the_providers() -> None:
    for alg, kind, form in (
        *((f"{family}{bits}", "RSA", 2048) for family in ("RS", "PS") for bits in (256, 384, 512)),
        ("ES256", "EC", "P-256"),
        ("ES384", "EC", "P-384"),
        ("ES512", "EC", "P-521"),
        ("EdDSA", "OKP", "Ed25519"),
        ("Ed25519", "OKP", "Ed25519"),
        ("Ed448", "OKP", "Ed448"),
    ):
        private = key(kind, form)
        text = token(private=private, alg=alg)
        assert accept(text, algorithms=[alg], published_keys=keys(private)).user_id == "ann"
        others = [each for each in ANYTHING if each != alg]
        refused(text, "algorithm", algorithms=others, published_keys=keys(private))


def test_rfc8725_3_1_a_key_is_for_the_algorithm_that_it_names() -> None:
    private = key("RSA", 2048)
    for_ps = keys(published(private, alg="PS256"))
    assert accept(token(private=private, alg="PS256"), published_keys=for_ps).user_id == "ann"
    refused(token(private=private, alg="RS256"), published_keys=for_ps)


def test_rfc8725_3_1_a_key_is_for_algorithms_of_its_own_kind() -> None:
    """A signature of one kind, said to be of another, for a set in which both keys have the same id."""
    both = keys(key(), key("RSA", 2048), key("EC", "P-384"))
    good = token(private=key("RSA", 2048), alg="RS256")
    assert accept(good, published_keys=both).user_id == "ann"
    for alg in ("ES256", "ES384", "PS256", "EdDSA"):
        _, claims, signature = good.split(".")
        refused(f"{part({'alg': alg, 'kid': 'k1'})}.{claims}.{signature}", published_keys=both)


def test_rfc8725_3_1_a_key_for_something_else_checks_no_signature() -> None:
    for more in (
        {"use": "enc"},
        {"key_ops": ["encrypt"]},
        {"key_ops": []},
        {"alg": "RSA-OAEP-256"},
    ):
        private = key("RSA", 2048)
        refused(token(private=private, alg="RS256"), published_keys=keys(published(private, **more)))
        good = keys(published(private, use="sig", key_ops=["verify"], alg="RS256"))
        assert accept(token(private=private, alg="RS256"), published_keys=good).user_id == "ann"


def test_rfc8725_3_2_weak_rsa_keys_do_not_count() -> None:
    with pytest.warns(UserWarning, match="2048"):
        weak = jwk.generate_key("RSA", 1024, {"kid": "k1"})
    assert keys(weak) == ()


def test_rfc8725_2_3_and_3_3_every_part_of_a_token_is_under_its_signature() -> None:
    header, claims, signature = token().split(".")
    other = part(CLAIMS | {"sub": "root"})
    refused(f"{header}.{other}.{signature}", "signature")
    refused(f"{part({'alg': 'ES256', 'kid': 'k1', 'typ': 'JWT'})}.{claims}.{signature}", "signature")
    for broken in ("", part(b"\1" * 63), part(b"\1" * 65), part(b"\0" * 64), part(b"\xff" * 64)):
        refused(f"{header}.{claims}.{broken}", "signature")


def test_rfc8725_2_3_and_3_3_nested_and_encrypted_tokens_are_refused() -> None:
    """There is one operation, which is always checked."""
    refused(token(token().encode(), header={"cty": "JWT"}), "strict JSON")
    refused(token(header={"cty": "JWT"}), "cty")
    refused(token(header={"enc": "A256GCM"}), "enc")
    refused(token(header={"zip": "DEF"}), "zip")


def test_rfc8725_2_2_3_4_and_3_5_keys_that_nobody_may_trust_do_not_count() -> None:
    off_the_curve = published(key())
    off_the_curve["y"] = off_the_curve["x"]
    shared = {"kty": "oct", "k": part(b"0" * 32), "kid": "k1", "alg": "HS256"}
    assert keys(off_the_curve, shared, key().as_dict(private=True)) == ()
    assert len(keys(off_the_curve, key())) == 1, "the other keys of the set do"


def test_rfc8725_2_6_and_3_7_header_and_claims_are_utf_8() -> None:
    for encoding in (
        "utf-16",
        "utf-16-le",
        "utf-32",
        "utf-8-sig",
        "latin-1",
    ):
        text = json.dumps(CLAIMS | {"sub": "änn"}, ensure_ascii=False)
        assert accept(token(text.encode())).user_id.startswith("sha256-")
        refused(token(text.encode(encoding)), "strict JSON")
        _, claims, signature = token().split(".")
        header = '{"alg": "ES256", "kid": "kä"}'.encode(encoding)
        refused(f"{part(header)}.{claims}.{signature}", "strict JSON")


def test_rfc8725_2_6_what_readers_of_json_may_read_in_two_ways_is_refused() -> None:
    for text in (
        b'{"iss": "https://id.example.com", "sub": "ann", "sub": "root"}',
        b"[]",
        b"null",
        b"{} {}",
        b'{"exp": NaN}',
        b'{"exp": 1e999}',
        b"",
    ):
        refused(token(text))


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


def test_rfc8725_2_7_and_3_8_the_issuer_is_exactly_the_providers() -> None:
    for issuer in (
        f"{ISSUER}/",
        "https://ID.example.com",
        f"{ISSUER}.evil.com",
        "http://id.example.com",
        "",
        None,
        [ISSUER],
    ):
        refused(token(iss=issuer), "issuer")


def test_rfc8725_3_8_the_keys_of_an_issuer_are_for_its_own_tokens() -> None:
    """A token that another issuer has signed with a key of the same id."""
    refused(token(private=key(name="k1", form="P-384"), alg="ES384"))
    refused(token(private=jwk.generate_key("EC", "P-256", {"kid": "k1"})), "signature")


def test_rfc8725_3_8_a_token_has_a_subject() -> None:
    for subject in (
        None,
        "",
        5,
        ["ann"],
        {},
    ):
        refused(token(sub=subject), "sub")


def test_rfc8725_2_7_and_3_9_a_token_for_somebody_else_is_refused() -> None:
    for audience in (
        None,
        "",
        "pawl2",
        "paw",
        "Pawl",
        ["other"],
        [],
        {"pawl": 1},
        5,
        [["pawl"]],
    ):
        refused(token(aud=audience))


def test_rfc8725_2_9_and_3_10_a_key_id_is_only_compared() -> None:
    for key_id in ("../../etc/passwd", "k1' OR '1'='1", "http://127.0.0.1/", "k1\x00", "K1"):
        refused(token(header={"kid": key_id}))
    for odd in (5, ["k1"], {"kid": "k1"}, True):
        refused(token(header={"kid": odd}), "kid")


def test_rfc8725_2_9_and_3_10_no_key_comes_with_a_token() -> None:
    mine = jwk.generate_key("EC", "P-256", {"kid": "mine"})
    certificate = base64.b64encode(mine.as_der()).decode()
    for header in (
        {"jwk": published(mine)},
        {"jwk": published(mine), "kid": None},
        {"x5c": [certificate]},
        {"jku": "https://evil.example.com/keys", "x5u": "https://evil.example.com/certificate"},
    ):
        refused(token(private=mine, header=header))
        assert accept(token(header=header)).user_id == "ann", "by the key of the issuer it is a good one"


def test_rfc8725_2_8_and_3_11_tokens_of_other_types_are_refused() -> None:
    for kind in (
        "secevent+jwt",
        "logout+jwt",
        "dpop+jwt",
        "JOSE",
        "rt+jwt",
        "token-introspection+jwt",
        "",
        5,
        ["JWT"],
    ):
        refused(token(header={"typ": kind}), "typ")


def test_rfc8725_2_8_and_3_12_a_logout_token_logs_nobody_in() -> None:
    event: dict[str, Any] = {"http://schemas.openid.net/event/backchannel-logout": {}}
    refused(token(header={"typ": "JWT"}, events=event), "event")


def test_rfc7515_4_1_11_what_must_be_understood_and_is_not_is_refused() -> None:
    for header in (
        {"crit": ["exp"], "exp": NOW + 9},
        {"crit": []},
        {"b64": False},
        {"b64": True},
    ):
        refused(token(header=header), "header has")
