"""The completion of a call from outside: its token, what is remembered for it, and what somebody brings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from pawl.tool_registry.audit.rules import AuditDraft

ERROR_CHARACTERS_MAX: Final = 4000


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
class Said:
    """The end that somebody brings for a call: strict JSON of a result, or the text of an error."""

    content: bytes = b""
    error: str = ""

    @property
    def digest(self) -> bytes:
        """The digest by which the same end is known again."""
        return hashlib.sha256(b"error " + self.error.encode() if self.error else b"result " + self.content).digest()
