"""The events that the owner of a run supplies; the ledger derives all others."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
from msgspec import field

from pawl.chassis.ids import CallId
from pawl.values import Usage

TAKEOVER: Final = "TAKEOVER"
"""Reason of RoundRetrying when the worker that made the call is gone."""


class RoundStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The model is being called."""

    round: int
    model_attempt: int
    model: str
    without_tools: bool = False
    summary: bool = False


class RoundRetrying(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt failed and the next one, of `model`, follows; output from `void_from_seq` on is void.

    `usage` is what the failed one used.
    """

    round: int
    model_attempt: int
    reason: str
    message: str
    delay_seconds: float = 0.0
    void_from_seq: int = 0
    usage: Usage = field(default_factory=Usage)
    model: str = ""


class RoundEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The model call ended."""

    round: int
    model_attempt: int
    finish_reason: str
    usage: Usage


class CallFragment(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a call that the model is writing, for display."""

    index: int
    tool_name: str = ""
    arguments_text: str = ""


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A coalesced piece of the model's output."""

    round: int
    model_attempt: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallFragment, ...] = ()
    refusal: str = ""


class ToolProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A running tool reports progress; `fraction` is from 0 to 1."""

    call_id: CallId
    tool_name: str
    fraction: float | None = None
    message: str = ""


class Warned(msgspec.Struct, frozen=True, kw_only=True):
    """A remark on the run: a reason for programs, a message for people."""

    reason: str
    message: str


OwnerEvent: TypeAlias = RoundStarted | RoundRetrying | RoundEnded | OutputDelta | ToolProgress | Warned
