"""What the registry says about tools, calls and executions. Meanings are those of pawl.tool.v1."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from services.agent_loop.domain.call import (
    CallResult,
    EffectClass,
    ExecutionContext,
    OfferFallback,
    Question,
    ToolCategory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool version as the model is told of it."""

    name: str
    version: int
    description: str = ""
    arguments_schema_json: bytes = b""
    fallback_tool_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedCall:
    """A call to be checked; a version of 0 means that the run has no such tool."""

    call_id: str
    tool_name: str
    tool_version: int
    arguments_json: bytes


class Disposition(StrEnum):
    """What may be done with a call."""

    RUN = "RUN"
    APPROVE = "APPROVE"
    OFFER = "OFFER"
    ASK = "ASK"
    REFUSE = "REFUSE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the registry says of a proposed call."""

    call_id: str
    disposition: Disposition
    tool_version: int = 0
    arguments_json: bytes = b""
    note: str = ""
    context: ExecutionContext = ExecutionContext.UNSPECIFIED
    category: ToolCategory = ToolCategory.UNSPECIFIED
    effect_class: EffectClass = EffectClass.UNSPECIFIED
    timeout_seconds: float = 0.0
    parallel: bool = False
    resource_keys: tuple[str, ...] = ()
    digest: str = ""
    preview: str = ""
    approval_cause: str = ""
    question: Question | None = None
    offer_fallback: OfferFallback = OfferFallback.FAIL
    fallback_tool_name: str = ""
    error_reason: str = ""
    error_message: str = ""


class Outcome(StrEnum):
    """How an execution ended."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionProgress:
    """What a tool says while it runs; `fraction` is from 0 to 1."""

    fraction: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """The end of an execution."""

    outcome: Outcome
    result: CallResult


ExecutionPiece: TypeAlias = ExecutionProgress | ExecutionResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The answer to a cancelled execution: whether nothing of it runs any more, and what it came to."""

    stopped: bool
    result: ExecutionResult | None = None
