"""External completion of a call: the token, the stored terms, and the submitted end."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from pawl.tool_registry.audit.rules import AuditDraft

ERROR_CHARACTERS_MAX: Final = 4000


def digest_of(token: str) -> bytes:
    """Return the digest that is stored instead of the token."""
    return hashlib.sha256(token.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTerms:
    """The terms for completing a call. `draft` is the audit entry for the call's end, without the outcome."""

    draft: AuditDraft
    result_bytes_max: int
    # Secrets that the tool has read.
    secret_names: tuple[str, ...] = ()
    # True if the tool may read only the store's own secrets.
    is_of_store: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """The end that was submitted for a call: a result as strict JSON, or an error text."""

    content: bytes = b""
    error: str = ""

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(b"error " + self.error.encode() if self.error else b"result " + self.content).digest()
