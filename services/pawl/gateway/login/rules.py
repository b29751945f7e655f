"""Logins by an identity provider: the authorization code flow with PKCE (OpenID Connect Core 1.0, RFC 7636, RFC 9700).

The token that a login ends with is the key of the session; the services check it as that of any caller.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from typing import Annotated, Final, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec

from pawl.chassis.identity.tokens import is_safe_url
from pawl.errors import InvalidField, Unauthenticated

ATTEMPT_SECONDS: Final = 600.0
"""The time that a person has at the provider."""

_PATH_LENGTH_MAX: Final = 512
_Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,32}$")]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_OWN: Final = frozenset(
    {"response_type", "client_id", "client_secret", "redirect_uri", "scope", "state", "nonce", "code", "grant_type"}
    | {"code_challenge", "code_challenge_method", "code_verifier", "refresh_token"}
)


class Provider(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of PAWL_GATEWAY_OIDC_FILE: a provider by which people log in."""

    name: _Name
    title: _Text = "Log in"
    issuer: _Text
    client_id: _Text
    client_secret: _Text | None = None
    scope: _Text = "openid"
    token: Literal["access_token", "id_token"] = "access_token"  # noqa: S105  # a choice
    """The token with which calls are made; PAWL_OIDC_FILE says how it is checked."""
    parameters: Annotated[dict[_Name, _Text], msgspec.Meta(max_length=8)] = {}
    """Further ones of each request, `audience` or `resource` for example."""

    def __post_init__(self) -> None:
        if not is_safe_url(self.issuer):
            raise ValueError("`issuer` must be an https:// URL without user, query and fragment")
        if taken := sorted(_OWN & self.parameters.keys()):
            raise ValueError(f"`parameters` cannot have {taken[0]}, which is the gateway's own")


_Providers = Annotated[tuple[Provider, ...], msgspec.Meta(max_length=8)]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A login that a browser has begun: what it comes back with must fit to it."""

    provider: str
    state: str
    verifier: str
    nonce: str
    to: str
    """The page that is opened at the end."""
    end_time: float
    """Unix seconds."""


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The right of a browser to have another token once its own is over."""

    renewal_id: str
    """The id by which the session knows it: that of somebody who was logged in before is for no other session."""
    provider: str
    credential_id: str
    """The credential that the session began with. The next token is one of the same user at the same provider."""
    refresh_token: str
    end_time: float
    """Unix seconds, at which the session is over for good."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a provider's token endpoint."""

    access_token: str = ""
    id_token: str = ""
    refresh_token: str = ""


def parse_providers(content: bytes) -> tuple[Provider, ...]:
    """Return the providers of PAWL_GATEWAY_OIDC_FILE, a JSON list.

    Raises:
        ValueError: it is none, with its first fault.
    """
    found: tuple[Provider, ...] = msgspec.json.decode(content, type=_Providers)
    if len({provider.name for provider in found}) < len(found):
        raise ValueError("two providers have the same name")
    return found


def begin(provider: Provider, to: str, now: float, random_text: Callable[[], str]) -> Attempt:
    """Return a login that begins; each `random_text` cannot be guessed."""
    return Attempt(
        provider=provider.name,
        state=random_text(),
        verifier=random_text() + random_text(),
        nonce=random_text(),
        to=safe_path(to),
        end_time=now + ATTEMPT_SECONDS,
    )


def authorization_url(provider: Provider, endpoint: str, attempt: Attempt, redirect_uri: str) -> str:
    """Return the address at the provider to which the browser is sent."""
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
    attempt: Attempt, *, state: str, issuer: str, provider: Provider, says_issuer: bool, now: float
) -> None:
    """Return if a browser comes back from the login that it began, and from whom it was sent to.

    `says_issuer`: the provider announces that it names itself.

    Raises:
        Unauthenticated: it does not, or too late.
    """
    if now >= attempt.end_time or not hmac.compare_digest(state.encode(), attempt.state.encode()):
        raise Unauthenticated("This login was not begun here, or too long ago: log in again.")
    # RFC 9207: against an answer of one provider that is brought as that of another.
    if (issuer or says_issuer) and issuer != provider.issuer:
        raise Unauthenticated("This login was begun at another provider: log in again.")


def code_form(provider: Provider, code: str, attempt: Attempt, redirect_uri: str) -> dict[str, str]:
    """Return the request for the tokens of a code."""
    return _form(
        provider, grant_type="authorization_code", code=code, redirect_uri=redirect_uri, code_verifier=attempt.verifier
    )


def renewal_form(provider: Provider, refresh_token: str) -> dict[str, str]:
    """Return the request for the next tokens."""
    return _form(provider, grant_type="refresh_token", refresh_token=refresh_token)


def revocation_form(provider: Provider, refresh_token: str) -> dict[str, str]:
    """Return the request that ends a refresh token (RFC 7009)."""
    return _form(provider, token=refresh_token, token_type_hint="refresh_token")  # noqa: S106  # a kind of token


def authorization(provider: Provider) -> str | None:
    """Return the header by which the gateway shows who it is (RFC 6749, 2.3.1); None without a secret."""
    if provider.client_secret is None:
        return None
    pair = f"{quote(provider.client_id, safe='')}:{quote(provider.client_secret, safe='')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def key_of(provider: Provider, tokens: Tokens, nonce: str | None) -> str:
    """Return the key of the session; with `nonce` the tokens are those of a login that began with it.

    They came from the provider itself, so nothing but its words about the login is looked at here (OpenID Connect
    Core, 3.1.3.7): the services check the token that is used.

    Raises:
        Unauthenticated: there is none, or it is of another login.
    """
    has_id_token = bool(tokens.id_token) or "openid" in provider.scope.split()
    if nonce is not None and has_id_token and _nonce(tokens.id_token) != nonce:
        raise Unauthenticated("The provider answered to another login: log in again.")
    key = tokens.id_token if provider.token == "id_token" else tokens.access_token  # noqa: S105  # a choice
    if not key:
        raise Unauthenticated(f"The provider gave no {provider.token}.")
    return key


class _Claims(msgspec.Struct, frozen=True):
    nonce: str | None = None


def _nonce(token: str) -> str | None:
    """Return the nonce of a token, whose signature is not checked; None without one."""
    payload = token.split(".")[1] if token.count(".") == 2 else ""  # noqa: PLR2004  # header, payload, signature
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), type=_Claims).nonce
    except (ValueError, msgspec.DecodeError):
        return None


def safe_path(to: str) -> str:
    """Return the page that a login leads to: one of the console, whatever a link says."""
    is_ours = to.startswith("/") and not to.startswith(("//", "/\\")) and len(to) <= _PATH_LENGTH_MAX
    return to if is_ours and to.isascii() and to.isprintable() else "/"


def find(providers: tuple[Provider, ...], name: str) -> Provider:
    """Return the provider of a name.

    Raises:
        InvalidField: there is none.
    """
    for provider in providers:
        if provider.name == name:
            return provider
    raise InvalidField("There is no such login.", field="name")


def _form(provider: Provider, **form: str) -> dict[str, str]:
    known = {} if provider.client_secret is not None else {"client_id": provider.client_id}
    return {**provider.parameters, **known, **form}
