"""Rules for logins with an identity provider, using the authorization code flow with PKCE.

Sources: OpenID Connect Core 1.0, RFC 7636, RFC 9700. The resulting token is the session's key. The services check it
like any other key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from typing import Annotated, Final, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec

from pawl.chassis.process.address import is_safe_url
from pawl.errors import InvalidField, Unauthenticated

# How long a user may take to log in at the provider.
ATTEMPT_SECONDS: Final = 600.0

_PATH_LENGTH_MAX: Final = 512
_Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,32}$")]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_OWN: Final = frozenset(
    {"response_type", "client_id", "client_secret", "redirect_uri", "scope", "state", "nonce", "code", "grant_type"}
    | {"code_challenge", "code_challenge_method", "code_verifier", "refresh_token"}
)


class Provider(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A provider listed in PAWL_GATEWAY_OIDC_FILE."""

    name: _Name
    title: _Text = "Log in"
    issuer: _Text
    client_id: _Text
    client_secret: _Text | None = None
    scope: _Text = "openid"
    # The token used as the session's key. PAWL_OIDC_FILE defines how it is checked.
    token: Literal["access_token", "id_token"] = "access_token"  # noqa: S105  # a choice
    # Parameters to add to each request, such as `audience` or `resource`.
    parameters: Annotated[dict[_Name, _Text], msgspec.Meta(max_length=8)] = {}

    def __post_init__(self) -> None:
        if not is_safe_url(self.issuer):
            raise ValueError("`issuer` must be an https:// URL without a user, a query or a fragment")
        if taken := sorted(_OWN & self.parameters.keys()):
            raise ValueError(f"`parameters` must not contain {taken[0]}, which the gateway sets itself")


_Providers = Annotated[tuple[Provider, ...], msgspec.Meta(max_length=8)]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A login in progress. The callback must match it."""

    provider: str
    state: str
    verifier: str
    nonce: str
    # The page to open after login.
    to: str
    # Unix seconds.
    end_time: float


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """A browser's right to get a new token when its current token expires."""

    # Matches the id in the session, so that a renewal never applies to another user's session.
    renewal_id: str
    provider: str
    # The credential from the first login. A renewed token must belong to the same user at the same provider.
    credential_id: str
    refresh_token: str
    # Unix seconds at which the session ends permanently.
    end_time: float


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    access_token: str = ""
    id_token: str = ""
    refresh_token: str = ""


def parse_providers(content: bytes) -> tuple[Provider, ...]:
    """Parse PAWL_GATEWAY_OIDC_FILE, a JSON list.

    Raises:
        ValueError: The file is invalid. The message describes the first fault.
    """
    found: tuple[Provider, ...] = msgspec.json.decode(content, type=_Providers)
    if len({provider.name for provider in found}) < len(found):
        raise ValueError("two providers have the same name")
    return found


def start_attempt(provider: Provider, to: str, now: float, random_text: Callable[[], str]) -> Attempt:
    """Start a login. `random_text` must return unpredictable strings."""
    return Attempt(
        provider=provider.name,
        state=random_text(),
        verifier=random_text() + random_text(),
        nonce=random_text(),
        to=safe_path(to),
        end_time=now + ATTEMPT_SECONDS,
    )


def authorization_url(provider: Provider, endpoint: str, attempt: Attempt, redirect_uri: str) -> str:
    digest = hashlib.sha256(attempt.verifier.encode()).digest()
    asked = {
        **provider.parameters,
        "response_type": "code",
        "client_id": provider.client_id,
        "redirect_uri": redirect_uri,
        "scope": provider.scope,
        "state": attempt.state,
        "nonce": attempt.nonce,
        "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
        "code_challenge_method": "S256",
    }
    parts = urlsplit(endpoint)
    return parts._replace(query=urlencode([*parse_qsl(parts.query, keep_blank_values=True), *asked.items()])).geturl()


def check_return(
    attempt: Attempt, *, state: str, issuer: str, provider: Provider, requires_issuer: bool, now: float
) -> None:
    """Check that a callback belongs to the attempt and comes from the attempt's provider.

    `requires_issuer` means that the provider has announced the issuer as part of its responses.

    Raises:
        Unauthenticated: The callback does not match, or the attempt has expired.
    """
    if now >= attempt.end_time or not hmac.compare_digest(state.encode(), attempt.state.encode()):
        raise Unauthenticated("This login was not started here, or has expired. Log in again.")
    # RFC 9207: protects against mix-up attacks between providers.
    if (issuer or requires_issuer) and issuer != provider.issuer:
        raise Unauthenticated("This login was started with another provider. Log in again.")


def code_form(provider: Provider, code: str, attempt: Attempt, redirect_uri: str) -> dict[str, str]:
    return _form(
        provider, grant_type="authorization_code", code=code, redirect_uri=redirect_uri, code_verifier=attempt.verifier
    )


def renewal_form(provider: Provider, refresh_token: str) -> dict[str, str]:
    return _form(provider, grant_type="refresh_token", refresh_token=refresh_token)


def revocation_form(provider: Provider, refresh_token: str) -> dict[str, str]:
    """Return the form that revokes a refresh token (RFC 7009)."""
    return _form(provider, token=refresh_token, token_type_hint="refresh_token")  # noqa: S106  # a kind of token


def authorization(provider: Provider) -> str | None:
    """Return the header that authenticates the gateway (RFC 6749, 2.3.1), or None without a client secret."""
    if provider.client_secret is None:
        return None
    pair = f"{quote(provider.client_id, safe='')}:{quote(provider.client_secret, safe='')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def key_of(provider: Provider, tokens: Tokens, nonce: str | None) -> str:
    """Return the session key from tokens. If `nonce` is set, the tokens must come from the login with this nonce.

    The tokens come directly from the provider. Their signature is therefore not checked here (OpenID Connect Core,
    3.1.3.7). The services check the token that is used.

    Raises:
        Unauthenticated: The token is missing, or belongs to another login.
    """
    has_id_token = bool(tokens.id_token) or "openid" in provider.scope.split()
    if nonce is not None and has_id_token and _nonce(tokens.id_token) != nonce:
        raise Unauthenticated("The response belongs to another login. Log in again.")
    key = tokens.id_token if provider.token == "id_token" else tokens.access_token  # noqa: S105  # a choice
    if not key:
        raise Unauthenticated(f"The provider returned no {provider.token}.")
    return key


class _Claims(msgspec.Struct, frozen=True):
    nonce: str | None = None


def _nonce(token: str) -> str | None:
    """Return a token's nonce, or None if it has no nonce or is malformed. The signature is not checked."""
    payload = token.split(".")[1] if token.count(".") == 2 else ""  # noqa: PLR2004  # header, payload, signature
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), type=_Claims).nonce
    except (ValueError, msgspec.DecodeError):
        return None


def safe_path(to: str) -> str:
    """Return `to` if it is a path on this site. For anything else, such as another site's URL, return `/`."""
    is_ours = to.startswith("/") and not to.startswith(("//", "/\\")) and len(to) <= _PATH_LENGTH_MAX
    return to if is_ours and to.isascii() and to.isprintable() else "/"


def find(providers: tuple[Provider, ...], name: str) -> Provider:
    """Return a provider by name.

    Raises:
        InvalidField: The provider does not exist.
    """
    for provider in providers:
        if provider.name == name:
            return provider
    raise InvalidField("There is no such identity provider.", field="name")


def _form(provider: Provider, **form: str) -> dict[str, str]:
    known = {} if provider.client_secret is not None else {"client_id": provider.client_id}
    return {**provider.parameters, **known, **form}
