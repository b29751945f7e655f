from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PlainValidator, SecretStr

from pawl.agent_loop.loop.rules.guidelines import GUIDELINES
from pawl.agent_loop.loop.rules.history import ReasoningEcho
from pawl.agent_loop.loop.rules.limits import DeploymentLimits, read_limits
from pawl.agent_loop.loop.rules.options import INSTRUCTIONS_BYTES_MAX, RunDefaults
from pawl.chassis import strict_json
from pawl.chassis.process.start import StartError
from pawl.errors import PawlError
from pawl.server.process.settings import Constant, ListenAddress, PeerAddresses, ServiceSettings

# Its address and key are OPENAI_BASE_URL and OPENAI_API_KEY.
DEFAULT_SERVER: Final = "default"
_LIMITS_BYTES_MAX: Final = 64 * 1024


def _check_base_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("must be a URL, for example https://api.openai.com/v1")
    return value


def _check_instructions(value: str | None) -> str | None:
    if value is not None and len(value.encode()) > INSTRUCTIONS_BYTES_MAX:
        raise ValueError(f"must be at most {INSTRUCTIONS_BYTES_MAX} bytes")
    return value


def _read_limits_file(path: str) -> DeploymentLimits:
    try:
        limits = read_limits(strict_json.loads(Path(path).read_bytes(), bytes_max=_LIMITS_BYTES_MAX))
        for name, server in limits.model_servers.items():
            try:
                if name != DEFAULT_SERVER:
                    _check_base_url(server.base_url)
                elif server.base_url or server.api_key_file:
                    raise ValueError("must be empty: OPENAI_BASE_URL and OPENAI_API_KEY apply")
            except ValueError as error:
                raise ValueError(f"model_servers.{name}.base_url {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except PawlError as error:
        raise ValueError(str(error)) from None
    return limits


def _read_key(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"PAWL_LIMITS_FILE: cannot read the key in {path}: {error}") from None


class AgentLoopSettings(ServiceSettings):
    listen: ListenAddress = "127.0.0.1:7601"
    metrics_listen: ListenAddress = "127.0.0.1:7611"
    service_key: SecretStr
    job_store_address: PeerAddresses = "127.0.0.1:7603"
    tool_registry_address: PeerAddresses = "127.0.0.1:7602"

    openai_base_url: Annotated[str, AfterValidator(_check_base_url)] = Field(
        default="https://api.openai.com/v1", validation_alias="OPENAI_BASE_URL"
    )
    openai_api_key: SecretStr | None = Field(default=None, validation_alias="OPENAI_API_KEY")
    model: str = Field(min_length=1, max_length=256)
    instructions: Annotated[str | None, AfterValidator(_check_instructions)] = None
    reasoning_echo: ReasoningEcho = ReasoningEcho.AUTO
    model_input: Literal["text", "text,image"] = "text"
    output_tokens_field: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    format_with_tools: bool = True
    titles: Literal["first-line", "model"] = "first-line"

    role: Literal["all", "api", "worker"] = "all"
    runs_max: int = Field(default=256, ge=1, le=10_000)
    limits: Annotated[DeploymentLimits, PlainValidator(_read_limits_file)] = Field(
        default=DeploymentLimits(), validate_default=False, validation_alias="PAWL_LIMITS_FILE"
    )

    message_bytes_max: Constant[int] = 1280 * 1024
    # As many as a gateway has, because every open page uses one.
    streams_max: Constant[int] = 4000
    # How long a worker that does not renew its leases keeps its runs.
    lease_seconds: Constant[float] = 10.0
    lease_renew_seconds: Constant[float] = 2.0

    @property
    def serves_clients(self) -> bool:
        return self.role != "worker"

    @property
    def provider(self) -> str:
        """The host of the model server."""
        return urlsplit(self.openai_base_url).hostname or ""

    @property
    def takes_images(self) -> bool:
        return "image" in self.model_input

    @property
    def drives_runs(self) -> bool:
        return self.role != "api"

    @property
    def model_servers(self) -> Mapping[str, tuple[str, str]]:
        """The address and key of each model server, by name. The default server's name is empty."""
        key = self.openai_api_key.get_secret_value() if self.openai_api_key else ""
        found = {"": (self.openai_base_url, key)}
        for name, server in self.limits.model_servers.items():
            if name != DEFAULT_SERVER:
                found[name] = (server.base_url, _read_key(server.api_key_file))
        return found

    @property
    def run_defaults(self) -> RunDefaults:
        return RunDefaults(
            model=self.model,
            instructions=GUIDELINES if self.instructions is None else self.instructions,
            limits=self.limits.defaults,
            ceilings=self.limits.ceilings,
            approvals_required=self.limits.approvals_required,
            without_background=self.limits.background == "off",
        )
