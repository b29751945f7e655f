"""Settings from environment variables, validated at start. All problems are reported at once.

A service derives from `ServiceSettings`, adds its own fields, and calls `load`. The field `listen` is read from
`PAWL_LISTEN`, and a field with a `validation_alias` is read from the variable of that name. To keep a `SecretStr` out
of the environment, put it in a file and name the file in the variable with the suffix `_FILE`. A `Constant` is only set
by the constructor, never by a variable.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from pawl.chassis.process.address import is_loopback, split_address

_PUBLIC_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII
)


def _check_listen(value: str) -> str:
    if not value.startswith("unix:"):
        split_address(value)
    return value


def _check_tcp(value: str) -> str:
    split_address(value)
    return value


def _check_peers(value: str) -> str:
    for address in value.split(","):
        _check_listen(address.strip())
    return value


def _check_public_url(value: str) -> str:
    match = _PUBLIC_URL.fullmatch(value)
    if value and match is None:
        raise ValueError("must be https://host[:port] and nothing more, for example https://pawl.example.com")
    if match is not None and match["scheme"] == "http" and not is_loopback(f"{match['host']}:80"):
        raise ValueError("must be https: http is allowed only on this machine")
    return value


# `host:port` (port 0 means any free port) or `unix:/path`.
ListenAddress = Annotated[str, AfterValidator(_check_listen)]

# `host:port` (port 0 means any free port).
TcpAddress = Annotated[str, AfterValidator(_check_tcp)]

# One `host:port`, or several separated by commas: calls are spread over them.
PeerAddresses = Annotated[str, AfterValidator(_check_peers)]

# The URL at which browsers reach the gateway, without a trailing slash; empty if they cannot reach it.
PublicUrl = Annotated[str, AfterValidator(_check_public_url)]

_T = TypeVar("_T")
CONSTANT: Final = "constant"
# A field that only the constructor sets.
Constant = Annotated[_T, CONSTANT]

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]


class _Variables(EnvSettingsSource):
    """The environment, without variables that are named like constants."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        if CONSTANT in field.metadata:
            return None, field_name, False
        return super().get_field_value(field, field_name)


class ServiceSettings(BaseSettings):
    """Settings of every service. See `.env.example` for the variables."""

    model_config = SettingsConfigDict(
        env_prefix="PAWL_", env_ignore_empty=True, extra="ignore", frozen=True, hide_input_in_errors=True
    )

    database_url: SecretStr | None = None
    database_owner_url: SecretStr | None = None
    nats_url: SecretStr | None = None
    service_key: SecretStr | None = None
    service_keys_file: Path | None = None
    api_keys_file: Path | None = None
    oidc_file: Path | None = None
    local_key: SecretStr | None = Field(default=None, min_length=16)
    tls_certificate_file: Path | None = None
    tls_key_file: Path | None = None
    tls_ca_file: Path | None = None
    listen: ListenAddress = "127.0.0.1:0"
    internal_listen: ListenAddress | None = None
    metrics_listen: TcpAddress = "127.0.0.1:0"
    address_file: Path | None = None
    log_level: LogLevel = "info"
    database_connections_max: int = Field(default=10, ge=1)
    database_unsafe: bool = False

    message_bytes_max: Constant[int] = 4 * 1024 * 1024
    streams_max: Constant[int] = 1000
    store_share: Constant[float] = 0.5
    user_share: Constant[float] = 0.2
    # An open request stream counts as the largest message plus an eighth, because an idle stream looks the same as one
    # in the middle of a message.
    request_stream_bytes_max: Constant[int] = 1536 * 1024 * 1024
    drain_seconds: Constant[float] = 1.5

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read constructor arguments first, then the environment."""
        return init_settings, _Variables(settings_cls)

    @model_validator(mode="after")
    def _check_local_key(self) -> Self:
        listens = (self.listen, self.internal_listen or self.listen)
        if self.local_key is not None and not all(map(is_loopback, listens)):
            raise ValueError(
                "PAWL_LOCAL_KEY grants every right, so PAWL_LISTEN and PAWL_INTERNAL_LISTEN must be on loopback"
                "; for other addresses give each caller its own key"
            )
        if self.local_key is not None and self.api_keys_file is not None:
            raise ValueError(
                "PAWL_API_KEYS_FILE: set either this or PAWL_LOCAL_KEY (on a single machine only), not both"
            )
        return self

    @model_validator(mode="after")
    def _check_tls_files(self) -> Self:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("set both PAWL_TLS_CERTIFICATE_FILE and PAWL_TLS_KEY_FILE, or neither")
        if self.tls_ca_file is not None and self.tls_certificate_file is None:
            raise ValueError("PAWL_TLS_CA_FILE requires a certificate: set PAWL_TLS_CERTIFICATE_FILE too")
        return self


SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def load(cls: type[SettingsT]) -> SettingsT:
    """Return this process's settings, or exit.

    If they are invalid, print one line per problem to standard error and exit with code 2.
    """
    try:
        return read(cls)
    except SettingsError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)  # noqa: T201  # there is no log before there are settings
        sys.exit(2)


class SettingsError(Exception):
    """Raised when the environment contains invalid settings."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def read(cls: type[SettingsT]) -> SettingsT:
    """Return this process's settings.

    Raises:
        SettingsError: The message has one sentence per problem, each starting with the name of the variable. Values
            are not quoted, because they may be secret.
    """
    variables = {_key(name, field): _variable(cls, name, field) for name, field in cls.model_fields.items()}
    secret_keys = [_key(name, field) for name, field in cls.model_fields.items() if _is_secret(field)]
    values: dict[str, str] = {}
    problems: dict[str, str] = {}
    for key in secret_keys:
        try:
            secret = read_secret(variables[key], os.environ)
        except ValueError as error:
            problems[key] = str(error)
        else:
            values |= {} if secret is None else {key: secret}
    try:
        settings = cls(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        for problem in error.errors():
            key = str(problem["loc"][0]) if problem["loc"] else ""
            problems.setdefault(key, _sentence(variables.get(key), problem["type"], problem["msg"]))
    if problems:
        raise SettingsError(list(problems.values()))
    return settings


def _sentence(variable: str | None, kind: str, message: str) -> str:
    message = "is required" if kind == "missing" else message.removeprefix("Value error, ")
    if variable is None:
        return message
    return f"{variable} {message}" if message.startswith(("must ", "is ")) else f"{variable}: {message}"


def _key(name: str, field: FieldInfo) -> str:
    return field.validation_alias if isinstance(field.validation_alias, str) else name


def _variable(cls: type[BaseSettings], name: str, field: FieldInfo) -> str:
    if isinstance(field.validation_alias, str):
        return field.validation_alias
    return f"{cls.model_config.get('env_prefix', '')}{name}".upper()


def _is_secret(field: FieldInfo) -> bool:
    return field.annotation is SecretStr or SecretStr in get_args(field.annotation)


def secret_file(variable: str) -> Path | None:
    path = os.environ.get(f"{variable}_FILE")
    return Path(path) if path else None


def parse_secret(content: bytes) -> str:
    """Return the secret in a file's content, without its last line break.

    Raises:
        ValueError: The content is empty or not UTF-8.
    """
    try:
        secret = content.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    if not secret:
        raise ValueError("it is empty")
    return secret


def read_secret(variable: str, environment: Mapping[str, str]) -> str | None:
    """Return a secret from the variable, or from the file that `<variable>_FILE` names, or None if neither is set.

    Raises:
        ValueError: Both variables are set, or the file cannot be read or does not contain a secret.
    """
    value, path = environment.get(variable), environment.get(f"{variable}_FILE")
    if not path:
        return value or None
    if value:
        raise ValueError(f"{variable}: set either {variable} or {variable}_FILE, not both")
    try:
        return parse_secret(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{variable}_FILE: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{variable}_FILE: {path}: {error}") from None
