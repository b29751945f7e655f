"""The completion of a call from outside: its token, what is remembered for it, and what somebody brings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pawl.chassis.ids import CallKey, RunId
from pawl.tool_registry.audit.rules import AuditDraft
from pawl.tool_registry.rules.execution import ExecutionResult

TOKEN_BYTES: Final = 32
"""The random bytes of a token."""
ERROR_CHARACTERS_MAX: Final = 4000


def token_of(random: str) -> str:
    """Return the token with this random text. Its beginning is none of an option on a command line."""
    return f"cmp_{random}"


def digest_of(token: str) -> bytes:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTerms:
    """The memory of a call for whoever completes it. `draft` is the audit entry of its end, without the end."""

    draft: AuditDraft
    result_bytes_max: int
    secret_names: tuple[str, ...] = ()
    """The secrets that its tool has read."""
    is_of_store: bool = False
    """True if its tool has only the secrets of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedCall:
    """A call that has a token."""

    key: CallKey
    run_id: RunId
    terms: CompletionTerms
    is_open: bool
    """True if it has no end yet."""


class Receipt(StrEnum):
    """The answer to a completion."""

    TAKEN = "TAKEN"
    DUPLICATE = "DUPLICATE"
    """The call has this end already."""
    ENDED = "ENDED"
    """The call has another end, or was cancelled."""
    LAPSED = "LAPSED"
    """Its time is over."""
    UNKNOWN = "UNKNOWN"
    """No call has the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The end that somebody brings for a call: strict JSON of a result, or the text of an error."""

    content: bytes = b""
    error: str = ""

    @property
    def digest(self) -> bytes:
        """The digest by which the same end is known again."""
        return hashlib.sha256(b"error " + self.error.encode() if self.error else b"result " + self.content).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class UntoldEnd:
    """The end of a call that had a token, of which neither the audit chain nor its run was told."""

    call: AwaitedCall
    result: ExecutionResult
    draft: AuditDraft
    """The audit entry."""
    is_completed: bool
    """True if somebody brought it: then the run waits for the news."""
