"""Builds a call's HTTP request."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec

from pawl.chassis.strict_json import dumps_canonical
from pawl.tools.rules.definition import require

PLACEHOLDER: Final = re.compile(r"\{([^{}/?#]+)\}")
_QUERY_PART: Final = re.compile(r"[^&;]+")
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,8190}[\x21-\x7e])?")
# Headers that belong to the connection or are set by the HTTP client.
_OWN_HEADERS: Final = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
FORM: Final = "application/x-www-form-urlencoded"
MULTIPART: Final = "multipart/form-data"
_QUERY_VALUES_MAX: Final = 2000
_HEADERS_MAX: Final = 32
_SECRET_NAME_CHARACTERS_MAX: Final = 256
_DOTS: Final = frozenset({"", ".", ".."})


class UnusableArgument(Exception):
    """Raised when an argument cannot be sent in the request. The model sees the error's text."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The location of an argument in the request. `style` and `explode` have the same meaning as in OpenAPI."""

    argument: str
    name: str
    # path, query, header or body.
    place: str
    style: str
    explode: bool = False
    is_json: bool = False


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """A template for requests. It contains names of secrets, never their values."""

    method: str
    # With {name} placeholders in path and query.
    url: str
    placements: list[Placement]
    # The argument that is sent as the body; empty if no single argument is.
    body_argument: str = ""
    # Media type of the body: JSON, FORM or MULTIPART.
    body_type: str = "application/json"
    # Form fields with a non-default encoding.
    body_fields: list[Placement] = []
    # The location of arguments without a placement: query or body. If empty, they are dropped.
    rest: str = ""
    headers: dict[str, str] = {}
    # Secret names by header name.
    secret_headers: dict[str, str] = {}
    idempotency_header: str = ""


class BuiltRequest(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    headers: dict[str, str]
    body: bytes | None


def may_be_header(name: str) -> bool:
    folded = name.lower()
    is_own = folded in _OWN_HEADERS or folded.startswith("proxy-")
    return _HEADER_NAME.fullmatch(name) is not None and not is_own


def may_be_header_value(value: str) -> bool:
    """Return whether a string can be a header value: printable ASCII without leading or trailing spaces."""
    return _HEADER_VALUE.fullmatch(value) is not None


def check_headers(field: str, headers: Mapping[str, str], secret_headers: Mapping[str, str]) -> None:
    """Validate a source's headers.

    Raises:
        InvalidField: A header is invalid.
    """
    names = [*headers, *secret_headers]
    require(
        len(names) <= _HEADERS_MAX,
        f"{field}.headers",
        f"must have at most {_HEADERS_MAX} entries, including secret ones",
    )
    require(len({name.lower() for name in names}) == len(names), f"{field}.headers", "names must be unique")
    for name in headers:
        require(may_be_header(name), f"{field}.headers", f"{name[:100]!r} is not an allowed header")
        require(may_be_header_value(headers[name]), f"{field}.headers", f"{name} must be printable ASCII")
    for name, secret in secret_headers.items():
        require(may_be_header(name), f"{field}.secret_headers", f"{name[:100]!r} is not an allowed header")
        require(
            1 <= len(secret) <= _SECRET_NAME_CHARACTERS_MAX,
            f"{field}.secret_headers",
            f"{name} must be the name of a secret",
        )


def build(binding: Binding, arguments: Mapping[str, Any]) -> BuiltRequest:
    """Return a call's request.

    Raises:
        UnusableArgument: An argument cannot be sent, or would change the URL's path.
    """
    left = {name: value for name, value in arguments.items() if value is not None}
    body = left.pop(binding.body_argument, None) if binding.body_argument else None
    inside: dict[str, str] = {}
    query: list[tuple[str, str]] = []
    headers = dict(binding.headers)
    for placement in binding.placements:
        if placement.argument not in left:
            continue
        value = left.pop(placement.argument)
        if placement.is_json:
            value = dumps_canonical(value).decode()
        if placement.place == "path":
            inside[placement.name] = _joined(value, explode=placement.explode)
        elif placement.place == "query":
            query += _query(placement, value)
        else:
            headers[placement.name] = _header(placement, value)
    if binding.rest == "query":
        for name, value in left.items():
            query += _query(Placement(argument=name, name=name, place="query", style="form", explode=True), value)
    elif binding.rest == "body" and left:
        body = left
    url = _fill(binding.url, inside)
    if query:
        pairs = "&".join(f"{quote(name, safe='[]')}={value}" for name, value in query)
        url += ("&" if "?" in url else "?") + pairs
    if body is None:
        return BuiltRequest(url=url, headers=headers, body=None)
    headers["Content-Type"], packed = _packed(binding, body)
    return BuiltRequest(url=url, headers=headers, body=packed)


def _packed(binding: Binding, body: Any) -> tuple[str, bytes]:
    if binding.body_type not in {FORM, MULTIPART}:
        return binding.body_type, dumps_canonical(body)
    if not isinstance(body, dict):
        raise UnusableArgument(f"{binding.body_argument} must be an object, because it is sent as a form")
    given = {placement.name: placement for placement in binding.body_fields}
    fields: list[tuple[str, Any]] = []
    for name, value in body.items():
        if value is not None:
            fields += _fields(given.get(name), name, value)
    if binding.body_type == FORM:
        pairs = (f"{quote(name, safe='[]')}={_encoded(value)}" for name, value in fields)
        return FORM, "&".join(pairs).encode()
    return _multipart(fields)


def _fields(placement: Placement | None, name: str, value: Any) -> list[tuple[str, Any]]:
    if placement is not None and placement.is_json:
        return [(name, value if isinstance(value, dict | list) else dumps_canonical(value).decode())]
    if placement is not None and placement.style == "deepObject":
        return _deep(name, value)
    if isinstance(value, list) and (placement is None or placement.explode):
        return [(name, item) for item in value]
    return [(name, ",".join(map(_text, value)) if isinstance(value, list) else value)]


def _deep(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict | list):
        return [(name, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [field for part, item in items for field in _deep(f"{name}[{part}]", item)]


def _multipart(fields: list[tuple[str, Any]]) -> tuple[str, bytes]:
    parts: list[bytes] = []
    for name, value in fields:
        quoted = name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        kind = "Content-Type: application/json\r\n" if isinstance(value, dict | list) else ""
        parts.append(f'Content-Disposition: form-data; name="{quoted}"\r\n{kind}\r\n{_text(value)}\r\n'.encode())
    boundary = hashlib.sha256(b"".join(parts)).hexdigest().encode()
    body = b"".join(b"--" + boundary + b"\r\n" + part for part in parts) + b"--" + boundary + b"--\r\n"
    return f"{MULTIPART}; boundary={boundary.decode()}", body


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Return the URL with its placeholders filled in. A value in the path cannot leave its segment."""

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UnusableArgument(f"{match[1]} is missing; it is part of the URL")
        return values[match[1]]

    path, mark, query = template.partition("?")
    segments = []
    for segment in path.split("/"):
        filled = PLACEHOLDER.sub(value_of, segment)
        if filled != segment and filled in _DOTS:
            raise UnusableArgument(f"{segment} in the URL must not be {filled!r}")
        segments.append(filled)
    return "/".join(segments) + mark + PLACEHOLDER.sub(value_of, query)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        return dumps_canonical(value).decode()
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _encoded(value: Any) -> str:
    return quote(_text(value), safe="")


def _joined(value: Any, *, explode: bool, text_of: Callable[[Any], str] = _encoded) -> str:
    """Encode a value in the style `simple`, which is the same as the style `form` without `explode`."""
    if isinstance(value, list):
        return ",".join(map(text_of, value))
    if isinstance(value, dict):
        between = "=" if explode else ","
        return ",".join(f"{text_of(name)}{between}{text_of(item)}" for name, item in value.items())
    return text_of(value)


def _query(placement: Placement, value: Any) -> list[tuple[str, str]]:
    name = placement.name
    if isinstance(value, list | dict) and len(value) > _QUERY_VALUES_MAX:
        raise UnusableArgument(
            f"{placement.argument} has more than {_QUERY_VALUES_MAX} values, which is the limit for the URL"
        )
    if placement.style == "deepObject" and isinstance(value, dict):
        return [(f"{name}[{part}]", _encoded(item)) for part, item in value.items()]
    if placement.explode and isinstance(value, list):
        return [(name, _encoded(item)) for item in value]
    if placement.explode and isinstance(value, dict):
        return [(part, _encoded(item)) for part, item in value.items()]
    return [(name, _joined(value, explode=False))]


def _header(placement: Placement, value: Any) -> str:
    text = _joined(value, explode=placement.explode, text_of=_text)
    if not may_be_header_value(text):
        raise UnusableArgument(f"{placement.argument} must be printable ASCII, because it is sent as a header")
    return text


def without_values(url: str) -> str:
    """Return a URL with the names and placeholders in its query, but without the values, which may be secrets."""
    path, mark, query = url.partition("#")[0].partition("?")
    return path + mark + _QUERY_PART.sub(_name_and_placeholders, query)


def _name_and_placeholders(part: re.Match[str]) -> str:
    name, mark, value = part.group().partition("=")
    # A part without `=` may be a secret key.
    placeholders = "".join(match.group() for match in PLACEHOLDER.finditer(value if mark else name))
    return name + mark + placeholders if mark else placeholders
