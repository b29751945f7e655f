"""The ports of the registry's policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pawl.tool_registry.domain.audit import AuditDraft, AuditEntry, Head, ToolFigures
from pawl.tool_registry.domain.rate import Exceeded, Rate


class RateLimits(Protocol):
    """Counts what begins, the same for all replicas."""

    async def take(self, store_id: str, rates: Sequence[Rate]) -> Exceeded | None:
        """Count one call against all rates, or against none and return the one that is used up.

        Raises:
            DependencyUnavailable: it is not known whether it was counted.
        """

    async def forget(self) -> None:
        """Delete the rates that nobody uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """The entries of a store that are wanted; empty fields and None mean any. Times are microseconds since 1970."""

    store_id: str
    run_id: str = ""
    call_id: str = ""
    tool_name: str = ""
    user_id: str = ""
    kind: str = ""
    since_us: int | None = None
    before_us: int | None = None


class AuditLog(Protocol):
    """The audit chains of all stores, durable, shared by all replicas."""

    async def append(self, drafts: Sequence[AuditDraft]) -> frozenset[str]:
        """Write entries at the ends of their chains, in order; returns the stores whose chain takes none.

        Somebody has tampered with those: nothing was written to them, and everything
        to the others. A decision that is there already (same call, kind and person)
        is left out.

        Raises:
            DependencyUnavailable: it is not known whether they were written.
        """

    async def head(self, store_id: str) -> Head:
        """Return the recorded last entry of a chain."""

    async def page(self, store_id: str, *, after_seq: int | None, up_to_seq: int, rows_max: int) -> list[AuditEntry]:
        """Return entries in order, those after `after_seq` (None: from whatever is the first)."""

    async def beyond_head(self, store_id: str) -> int:
        """Return the first entry behind the recorded head, 0 if there is none."""

    async def listed(self, wanted: AuditFilter, *, before_seq: int | None, rows_max: int) -> list[AuditEntry]:
        """Return matching entries, the newest first."""

    async def figures(self, wanted: AuditFilter) -> list[ToolFigures]:
        """Return what each tool did, by name."""
