"""Validates tokens (JWT, RFC 7519 and 9068) by the rules of RFC 8725.

Everything here is pure. `issuers` provides the keys and the time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from joserfc import jwk
from joserfc.errors import JoseError
from joserfc.jws import JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from pawl.chassis import strict_json
from pawl.chassis.identity.auth import KEY_LENGTH_MAX, Credential
from pawl.chassis.identity.roles import OWN_ROLES_GO_BESIDE, Role, rights
from pawl.chassis.ids import CredentialId, UserId, is_id
from pawl.chassis.process.address import is_safe_url
from pawl.errors import InvalidJson, TooLarge

# The size limit of a key set and of an issuer's metadata.
KEYS_BYTES_MAX: Final = 512 * 1024

_KEYS_MAX: Final = 100
_TIME_MAX: Final = 253402300799  # The last second of the year 9999, which a Timestamp can hold.
# Maximum number of keys with the same id that are tried for one signature.
_TRIED_MAX: Final = 4
_TEXT_LENGTH_MAX: Final = 1024
_RSA_BITS: Final = range(2048, 8192 + 1)
_DIGEST_PREFIX: Final = "sha256-"
_TYPES: Final = frozenset({"jwt", "application/jwt", "at+jwt", "application/at+jwt"})
# `crit` and `b64` change how a token is read; `enc` and `zip` belong to encrypted tokens, `cty` to nested ones.
_REFUSED_HEADERS: Final = ("crit", "b64", "enc", "zip", "cty")

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519", "Ed448"
]
_ALGORITHMS: Final[tuple[Algorithm, ...]] = get_args(Algorithm)
# The public parameters of a JWK by type. Certificate and private parameters are ignored.
_PUBLIC: Final = {
    "RSA": frozenset({"n", "e"}),
    "EC": frozenset({"crv", "x", "y"}),
    "OKP": frozenset({"crv", "x"}),
}
_ABOUT: Final = frozenset({"kty", "kid", "use", "alg", "key_ops"})

_Id = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
# An empty list would grant more than some roles do: a caller without roles decides on its own calls.
_Roles: TypeAlias = Annotated[list[_Id], msgspec.Meta(min_length=1)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=_TEXT_LENGTH_MAX)]
# The name of a claim, or its path through nested claims.
_Claim: TypeAlias = _Text | Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1, max_length=8)]


class TokenRefused(Exception):
    """Raised when a token is not valid. The message is only for the log. The caller does not learn the reason."""


class StoreOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule for finding a token's store, which is fixed for an issuer or taken from a claim."""

    claim: _Claim | None = None
    value: _Id | None = None

    def __post_init__(self) -> None:
        if (self.claim is None) == (self.value is None):
            raise ValueError("`store` must have either a `claim` or a `value`")


class UserOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    claim: _Claim


class RolesOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule for finding a token's roles: `map` applied to a claim, or `default`.

    Tokens without roles are refused.
    """

    claim: _Claim
    map: dict[str, _Roles]
    default: _Roles | None = None

    def __post_init__(self) -> None:
        given = (*self.map.values(), self.default or ())
        if any(Role.DEPLOYMENT in roles for roles in given):
            raise ValueError("tokens cannot have the deployment role: create a key for it")
        if not all(map(rights, given)):
            raise ValueError(f"for each value of the claim, {OWN_ROLES_GO_BESIDE}")


class Provider(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of PAWL_OIDC_FILE: an issuer and audience whose tokens are accepted, and how claims map to callers."""

    issuer: _Text
    audience: _Text
    jwks_url: _Text | None = None
    algorithms: Annotated[tuple[Algorithm, ...], msgspec.Meta(min_length=1)] = ("RS256", "ES256")
    leeway_seconds: Annotated[int, msgspec.Meta(ge=0, le=300)] = 60
    store: StoreOf
    user: UserOf
    roles: RolesOf | None = None

    def __post_init__(self) -> None:
        for name, url in (("issuer", self.issuer), ("jwks_url", self.jwks_url)):
            if url is not None and not is_safe_url(url):
                raise ValueError(f"`{name}` must be an https:// URL without a user, a query or a fragment")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    key_id: str | None
    algorithms: frozenset[str]
    key: jwk.Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A parsed token that has not been verified yet."""

    algorithm: str
    key_id: str | None
    claims: dict[str, Any]
    signed: bytes
    signature: bytes


def parse_providers(content: bytes) -> tuple[Provider, ...]:
    """Return the providers of PAWL_OIDC_FILE, a JSON list.

    Raises:
        ValueError: The file is malformed, or lists an issuer twice for one audience.
    """
    providers = tuple(msgspec.json.decode(content, type=list[Provider]))
    if len({(provider.issuer, provider.audience) for provider in providers}) != len(providers):
        raise ValueError("it lists an issuer twice for the same audience")
    return providers


def is_token(key: str) -> bool:
    return key.count(".") == 2  # noqa: PLR2004  # see above


def read_token(text: str) -> Token:
    """Parse a token without verifying it.

    Raises:
        TokenRefused: The token is too long, malformed, encrypted or nested, is not meant for logging in, or has a
            header that changes its interpretation.
    """
    if len(text) > KEY_LENGTH_MAX:
        raise TokenRefused(f"it has more than {KEY_LENGTH_MAX} characters")
    if not is_token(text):
        raise TokenRefused("it is not a token")
    parts = text.encode().split(b".")
    header, claims, signature = map(_decode, parts)
    head, body = _object(header, "header"), _object(claims, "claims")
    if found := [name for name in _REFUSED_HEADERS if name in head]:
        raise TokenRefused(f"the header has {found[0]}")
    if "events" in body:  # for example a logout token, which is about a user but does not authenticate one
        raise TokenRefused("it is a security event")
    algorithm, key_id, kind = head.get("alg"), head.get("kid"), head.get("typ", "JWT")
    if not isinstance(algorithm, str) or not isinstance(key_id, str | None):
        raise TokenRefused("alg or kid in the header is not a string")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise TokenRefused("typ in the header names another kind of token")
    return Token(algorithm=algorithm, key_id=key_id, claims=body, signed=b".".join(parts[:2]), signature=signature)


def provider_of(providers: Iterable[Provider], token: Token) -> Provider:
    """Return the first provider that matches a token's issuer and audience.

    Raises:
        TokenRefused: No provider matches, or the matching provider does not allow the token's algorithm.
    """
    issuer, audience = token.claims.get("iss"), token.claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    for provider in providers:
        if provider.issuer == issuer and provider.audience in audiences:
            if token.algorithm not in provider.algorithms:
                raise TokenRefused("the provider does not allow the algorithm")
            return provider
    raise TokenRefused("no provider matches its issuer and audience")


def check_claims(provider: Provider, token: Token, now: float) -> None:
    """Check a token's claims: issuer, audience, subject and times.

    Raises:
        TokenRefused: A claim is invalid.
    """
    expected = JWTClaimsRegistry(
        now=int(now),
        leeway=provider.leeway_seconds,
        iss={"essential": True, "value": provider.issuer},
        aud={"essential": True, "value": provider.audience},
        sub={"essential": True},
        exp={"essential": True},
    )
    try:
        expected.validate(token.claims)
    except JoseError as error:
        raise TokenRefused(f"claims: {error}") from None
    if token.claims["exp"] + provider.leeway_seconds > _TIME_MAX:
        raise TokenRefused("claims: exp is after the year 9999")


def parse_keys(content: bytes) -> tuple[PublicKey, ...]:
    """Return the keys of a JWK set (RFC 7517) that can verify signatures. Other keys are ignored.

    Raises:
        ValueError: The content is not a key set, or is too large.
    """
    try:
        found = strict_json.loads(content, bytes_max=KEYS_BYTES_MAX)
    except (InvalidJson, TooLarge) as error:
        raise ValueError(error.message) from None
    keys = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(keys, list) or len(keys) > _KEYS_MAX:
        raise ValueError(f"it is not a key set of at most {_KEYS_MAX} keys")
    return tuple(key for entry in keys if isinstance(entry, dict) if (key := _public_key(entry)))


def fitting(keys: Iterable[PublicKey], token: Token) -> list[PublicKey]:
    """Return up to _TRIED_MAX keys that may have signed a token.

    These keys have the token's algorithm and, if the token names a key id, that key id.
    """
    found = [
        key
        for key in keys
        if token.algorithm in key.algorithms and (token.key_id is None or key.key_id == token.key_id)
    ]
    return found[:_TRIED_MAX]


def is_signed(token: Token, keys: Iterable[PublicKey]) -> bool:
    algorithm = JWSRegistry.algorithms[token.algorithm]
    return any(_verifies(algorithm.verify, token, each.key) for each in keys)


def credential_of(provider: Provider, claims: Mapping[str, Any]) -> Credential:
    """Return the credential of a verified token.

    The credential's id is derived from the issuer and the subject. It is therefore the same for all tokens of a
    subject.

    Raises:
        TokenRefused: A required claim is missing or has no valid value.
    """
    if provider.user.claim in ("email", ("email",)) and claims.get("email_verified") is not True:
        raise TokenRefused("the issuer has not verified the user's e-mail address")
    store = provider.store
    subject = msgspec.json.encode([claims["iss"], claims["sub"]])
    return Credential(
        credential_id=CredentialId(f"token-{hashlib.sha256(subject).hexdigest()[:32]}"),
        store_id=store.value if store.claim is None else to_id(_text(claims, store.claim)),  # type: ignore[arg-type]
        user_id=UserId(to_id(_text(claims, provider.user.claim))),
        roles=frozenset() if provider.roles is None else _roles(provider.roles, claims),
        expire_time=float(claims["exp"]) + provider.leeway_seconds,
    )


def to_id(value: str) -> str:
    """Convert a claim's value to an id. If the value is not a valid id, the result is `sha256-` and the value's digest.

    A value that starts with `sha256-` is also hashed, so that distinct values get distinct ids.
    """
    if is_id(value) and not value.startswith(_DIGEST_PREFIX):
        return value
    digest = base64.urlsafe_b64encode(hashlib.sha256(value.encode()).digest()).rstrip(b"=").decode()
    return f"{_DIGEST_PREFIX}{digest}"


def _decode(part: bytes) -> bytes:
    """Decode base64url as in RFC 7515. Reject padding and text that is not canonical."""
    try:
        decoded = base64.b64decode(part + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise TokenRefused("it is not base64url") from None
    if base64.urlsafe_b64encode(decoded).rstrip(b"=") != part:
        raise TokenRefused("it is not base64url")
    return decoded


def _object(content: bytes, part: str) -> dict[str, Any]:
    try:
        value = strict_json.loads(content, bytes_max=KEY_LENGTH_MAX)
    except (InvalidJson, TooLarge):
        raise TokenRefused(f"the {part} is not strict JSON") from None
    if not isinstance(value, dict):
        raise TokenRefused(f"the {part} is not an object")
    return value


def _public_key(entry: dict[str, Any]) -> PublicKey | None:
    """Return a key from a key set, or None if it cannot verify signatures, is too weak or has a private part."""
    kind = entry.get("kty")
    if not isinstance(kind, str) or kind not in _PUBLIC or "d" in entry:
        return None
    try:
        if kind == "RSA" and int.from_bytes(_decode(entry["n"].encode())).bit_length() not in _RSA_BITS:
            return None
        key = jwk.import_key({name: value for name, value in entry.items() if name in _PUBLIC[kind] | _ABOUT})
    except (JoseError, TokenRefused, AttributeError, KeyError, TypeError, ValueError):
        return None  # Another kind of key, or malformed: the other keys of the set are used.
    algorithms = frozenset(each.name for each in JWSRegistry.filter_algorithms(key, list(_ALGORITHMS)))
    return PublicKey(key_id=key.kid, algorithms=algorithms, key=key) if algorithms else None


def _verifies(verify: Any, token: Token, key: jwk.Key) -> bool:
    try:
        return bool(verify(token.signed, token.signature, key))
    except (JoseError, ValueError):
        return False


def _claim(claims: Mapping[str, Any], path: str | tuple[str, ...]) -> Any:
    """Return the value of a claim, by name or path, or None if it is missing."""
    value: Any = claims
    for name in [path] if isinstance(path, str) else path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _text(claims: Mapping[str, Any], path: str | tuple[str, ...]) -> str:
    value = _claim(claims, path)
    if not isinstance(value, str) or not 0 < len(value) <= _TEXT_LENGTH_MAX:
        raise TokenRefused(f"the claim {path} must be a string of 1 to {_TEXT_LENGTH_MAX} characters")
    return value


def _roles(rule: RolesOf, claims: Mapping[str, Any]) -> frozenset[str]:
    value = _claim(claims, rule.claim)
    named = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    known = [rule.map[name] for name in named if isinstance(name, str) and name in rule.map]
    if not known and rule.default is None:
        raise TokenRefused(f"the claim {rule.claim} has no value that maps to a role")
    return frozenset(role for roles in known or [rule.default or []] for role in roles)
