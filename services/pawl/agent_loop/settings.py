"""Settings of the loop."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from msgspec.structs import replace
from pydantic import AfterValidator, Field, SecretStr, model_validator

from pawl.agent_loop.domain.guidelines import GUIDELINES
from pawl.agent_loop.domain.history import ReasoningEcho
from pawl.agent_loop.domain.limits import (
    CONTEXT_BYTES_MIN,
    IDENTICAL_CALLS_MIN,
    OF_TOOLS,
    RESULT_BYTES_MIN,
    Limits,
    read_ceilings,
)
from pawl.agent_loop.domain.options import APPROVALS_MAX, INSTRUCTIONS_BYTES_MAX, RunDefaults
from pawl.chassis.settings import ListenAddress, PeerAddresses, ServiceSettings
from pawl.values import TOKENS_MAX

_LEASE_RENEWALS_MIN = 2


def _check_base_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("must be a URL, for example https://api.openai.com/v1")
    return value


def _check_instructions(value: str | None) -> str | None:
    if value is not None and len(value.encode()) > INSTRUCTIONS_BYTES_MAX:
        raise ValueError(f"may have at most {INSTRUCTIONS_BYTES_MAX} bytes")
    return value


class AgentLoopSettings(ServiceSettings):
    """The settings of the loop: its peers and the model, how much it takes on, and the bounds of every run.

    A run that asks for nothing gets the bounds that stand here; it may ask for others up to the ceilings.
    """

    listen: ListenAddress = "127.0.0.1:7601"
    metrics_listen: ListenAddress = "127.0.0.1:7611"
    message_bytes_max: int = Field(default=1280 * 1024, ge=1024)
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
    lease_seconds: float = Field(default=10.0, ge=1, le=300)
    lease_renew_seconds: float = Field(default=2.0, gt=0)
    poll_seconds: float = Field(default=1.0, gt=0)

    rounds_max: int = Field(default=10, ge=1, le=1000)
    calls_per_round_max: int = Field(default=20, ge=1, le=1000)
    identical_calls_max: int = Field(default=4, ge=IDENTICAL_CALLS_MIN)
    tool_timeout_seconds: float = Field(default=10.0, gt=0)
    round_timeout_seconds: float = Field(default=120.0, gt=0)
    run_timeout_seconds: float = Field(default=300.0, gt=0)
    model_headers_timeout_seconds: float = Field(default=30.0, gt=0)
    model_idle_timeout_seconds: float = Field(default=45.0, gt=0)
    model_attempts_max: int = Field(default=4, ge=1, le=20)
    provider_wait_seconds: float = Field(default=900.0, ge=0)
    result_bytes_per_round_max: int = Field(default=51_200, ge=RESULT_BYTES_MIN)
    approval_expiry_seconds: float = Field(default=86_400.0, gt=0)
    approvals_required: int = Field(default=1, ge=1, le=APPROVALS_MAX)
    offer_deadline_seconds: float = Field(default=600.0, gt=0)
    answer_timeout_seconds: float = Field(default=86_400.0, gt=0)
    context_bytes_max: int = Field(default=400_000, ge=CONTEXT_BYTES_MIN)
    total_tokens_max: int = Field(default=0, ge=0, le=TOKENS_MAX)
    topped_up_tokens_max: int = Field(default=0, ge=0, le=TOKENS_MAX)
    top_up_timeout_seconds: float = Field(default=86_400.0, gt=0)
    agent_depth_max: int = Field(default=2, ge=0, le=10)
    background: Literal["on", "tool", "off"] = "on"
    limit_ceilings: str = ""

    @model_validator(mode="after")
    def _check_ceilings(self) -> Self:
        try:
            read_ceilings(self.limit_ceilings, self._own_limits)
        except ValueError as error:
            raise ValueError(f"PAWL_LIMIT_CEILINGS: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_lease(self) -> Self:
        if self.lease_renew_seconds * _LEASE_RENEWALS_MIN > self.lease_seconds:
            raise ValueError("PAWL_LEASE_RENEW_SECONDS: must be at most half of PAWL_LEASE_SECONDS")
        return self

    @property
    def serves_clients(self) -> bool:
        """False for a process that does nothing but drive runs."""
        return self.role != "worker"

    @property
    def takes_images(self) -> bool:
        """True if messages may have images for the models."""
        return "image" in self.model_input

    @property
    def drives_runs(self) -> bool:
        """False for a process that does nothing but serve clients."""
        return self.role != "api"

    @property
    def run_defaults(self) -> RunDefaults:
        """The options of a run that asks for nothing."""
        return RunDefaults(
            model=self.model,
            instructions=GUIDELINES if self.instructions is None else self.instructions,
            limits=self.limits,
            ceilings=self.ceilings,
            approvals_required=self.approvals_required,
            without_background=self.background == "off",
        )

    @property
    def limits(self) -> Limits:
        """The bounds of a run that asks for none."""
        of_tools = {name: getattr(self.ceilings, name) for name in OF_TOOLS}
        return replace(self._own_limits, **of_tools)

    @property
    def ceilings(self) -> Limits:
        """The most that a run may ask for."""
        return read_ceilings(self.limit_ceilings, self._own_limits)

    @property
    def _own_limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__ if name not in OF_TOOLS})
