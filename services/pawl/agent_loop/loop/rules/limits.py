"""Limits of runs: defaults, and ceilings for requested values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import asdict, replace

from pawl.errors import InvalidField
from pawl.values import TOKENS_MAX

# Maximum number of users who must approve a call.
APPROVALS_MAX: Final = 5

_SECONDS: Final = (0.001, 366 * 86_400)
# Allowed minimum and maximum in a deployment, _SECONDS if absent. Only whole numbers are allowed if the minimum is an
# int.
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "rounds_max": (1, 1000),
    "calls_per_round_max": (1, 1000),
    # If it were 1, the first call of any tool would count as a loop.
    "identical_calls_max": (2, 1000),
    "model_attempts_max": (1, 20),
    # A result truncated to less than this is little more than its note.
    "result_bytes_per_round_max": (1024, 2**30),
    # Below this, a summary and the message that follows it do not fit together.
    "context_bytes_max": (10_000, 2**30),
    "total_tokens_max": (0, TOKENS_MAX),
    "topped_up_tokens_max": (0, TOKENS_MAX),
    "agent_depth_max": (0, 10),
    "approvals_required": (1, APPROVALS_MAX),
    "provider_wait_seconds": (0.0, 366 * 86_400),
}
_BACKGROUND: Final = ("on", "tool", "off")
# 0 means unlimited for these limits.
NONE_IS_ZERO: Final = frozenset({"total_tokens_max", "topped_up_tokens_max"})
# Maximums for values that tools set. The deployment's value equals the ceiling for runs.
OF_TOOLS: Final = ("tool_timeout_seconds_max", "answer_timeout_seconds_max")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run's limits. See pawl.event.v1.RunLimits for the fields."""

    rounds_max: int = 10
    calls_per_round_max: int = 20
    identical_calls_max: int = 4
    tool_timeout_seconds: float = 10.0
    round_timeout_seconds: float = 120.0
    run_timeout_seconds: float = 300.0
    model_headers_timeout_seconds: float = 30.0
    model_idle_timeout_seconds: float = 45.0
    model_attempts_max: int = 4
    result_bytes_per_round_max: int = 51_200
    approval_expiry_seconds: float = 86_400.0
    offer_deadline_seconds: float = 600.0
    answer_timeout_seconds: float = 86_400.0
    context_bytes_max: int = 400_000
    total_tokens_max: int = 0
    topped_up_tokens_max: int = 0
    top_up_timeout_seconds: float = 86_400.0
    agent_depth_max: int = 2
    tool_timeout_seconds_max: float = 100.0
    answer_timeout_seconds_max: float = 30 * 86_400.0
    provider_wait_seconds: float = 0.0

    def with_asked(self, requested: Mapping[str, float], ceilings: Limits) -> Limits:
        """Return these limits with the values in `requested`. No value may exceed its ceiling in `ceilings`.

        Raises:
            InvalidField: A value is above its ceiling or is too small.
        """
        for name, value in requested.items():
            ceiling = getattr(ceilings, name)
            is_open = name in NONE_IS_ZERO and ceiling == 0
            most = TOKENS_MAX if is_open else ceiling
            least = 1 if name in NONE_IS_ZERO and not is_open else _RANGES.get(name, _SECONDS)[0]
            if not math.isfinite(value) or value < least:
                raise InvalidField(f"limits.{name} must be at least {least:g}", field=f"options.limits.{name}")
            if value > most:
                raise InvalidField(
                    f"limits.{name} must be at most {most:g} in this deployment", field=f"options.limits.{name}"
                )
        return replace(self, **{name: type(getattr(self, name))(value) for name, value in requested.items()})

    def seconds_of_tool(self, own: float) -> float:
        """Return a call's timeout: the tool's `own` timeout or, if that is 0, the default.

        The maximum applies to both.
        """
        return min(own or self.tool_timeout_seconds, self.tool_timeout_seconds_max)

    def seconds_of_question(self, own: float) -> float:
        """Return a question's timeout: its `own` timeout or, if that is 0, the default. The maximum applies to both."""
        return min(own or self.answer_timeout_seconds, self.answer_timeout_seconds_max)


# Ceilings that apply if the deployment does not set them.
CEILINGS: Final = Limits(
    rounds_max=1000,
    calls_per_round_max=100,
    identical_calls_max=100,
    # Shorter than a round, so that a slow tool makes its call fail rather than its run.
    tool_timeout_seconds=100.0,
    round_timeout_seconds=3600.0,
    run_timeout_seconds=86_400.0,
    model_headers_timeout_seconds=600.0,
    model_idle_timeout_seconds=600.0,
    model_attempts_max=20,
    result_bytes_per_round_max=1024 * 1024,
    approval_expiry_seconds=30 * 86_400.0,
    offer_deadline_seconds=7 * 86_400.0,
    answer_timeout_seconds=30 * 86_400.0,
    context_bytes_max=4_000_000,
    top_up_timeout_seconds=30 * 86_400.0,
    agent_depth_max=10,
    provider_wait_seconds=86_400.0,
)


class ModelServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model server that settings can assign to stores. The file `api_key_file` contains its key.

    The limits per minute apply to all processes together. 0 means no limit.
    """

    base_url: str = ""
    api_key_file: str = ""
    requests_per_minute: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0


class DeploymentLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment's limits, as read from PAWL_LIMITS_FILE."""

    # Limits of a run that does not request any.
    defaults: Limits = Limits(provider_wait_seconds=900.0)
    # The highest values that a run may request.
    ceilings: Limits = CEILINGS
    approvals_required: int = 1
    background: str = "on"
    # Model servers by name.
    model_servers: Mapping[str, ModelServer] = {}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    defaults: dict[str, Any] = {}
    ceilings: dict[str, Any] = {}
    model_servers: dict[Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")], ModelServer] = {}


def read_limits(document: object) -> DeploymentLimits:
    """Parse limits from a JSON value such as {"defaults": {"rounds_max": 20}, "ceilings": {"rounds_max": 50}}.

    An unset ceiling is the value in CEILINGS or the default, whichever is higher. Because tokens cost money, the
    ceiling for a token budget equals its default unless the ceiling is set.

    Raises:
        ValueError: The structure, a name or a value is invalid. The message lists all invalid names and values.
    """
    file, usual = msgspec.convert(document, _File), DeploymentLimits()
    if problems := [*_problems(file, asdict(usual.defaults))]:
        raise ValueError("; ".join(problems))
    options = {name: file.defaults.pop(name, getattr(usual, name)) for name in ("approvals_required", "background")}
    defaults = _with(usual.defaults, file.defaults)
    most = {name: max(value, getattr(CEILINGS, name)) for name, value in asdict(defaults).items()}
    most |= {name: getattr(defaults, name) for name in NONE_IS_ZERO}
    ceilings = _with(CEILINGS, most | file.ceilings)
    of_tools = {name: getattr(ceilings, name.removesuffix("_max")) for name in OF_TOOLS}
    return DeploymentLimits(
        defaults=replace(defaults, **of_tools),
        ceilings=replace(ceilings, **of_tools),
        model_servers=file.model_servers,
        **options,
    )


def _with(limits: Limits, numbers: Mapping[str, float]) -> Limits:
    return replace(limits, **{name: type(getattr(limits, name))(value) for name, value in numbers.items()})


def _problems(file: _File, usual: Mapping[str, float]) -> Iterator[str]:
    defaults = {**usual, **{name: value for name, value in file.defaults.items() if type(value) in {int, float}}}
    for name, value in file.defaults.items():
        if name == "background":
            if value not in _BACKGROUND:
                yield f"defaults.background must be on, tool or off, got {value!r}"
        elif problem := _problem(name, value, {*usual, "approvals_required"}):
            yield f"defaults.{name} {problem}"
    for name, value in file.ceilings.items():
        if problem := _problem(name, value, usual.keys()):
            yield f"ceilings.{name} {problem}"
        elif value < defaults[name] and not (name in NONE_IS_ZERO and value == 0):
            yield f"ceilings.{name} must be at least the default ({defaults[name]}), got {value}"


def _problem(name: str, value: object, names: Collection[str]) -> str:
    """Return why a limit cannot have this value, or an empty string if it can."""
    if name not in names or name in OF_TOOLS:
        return "is not the name of a limit"
    least, most = _RANGES.get(name, _SECONDS)
    kinds, kind = ((int,), "whole number") if isinstance(least, int) else ((int, float), "number")
    is_right = isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most
    return "" if is_right else f"must be a {kind} between {least} and {most}, got {value!r}"
