"""A module that the registry loads as tools and that stops it from writing its audit log: to see what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rules import AuditDraft


async def _write(self: AuditTrail, drafts: Sequence[AuditDraft]) -> None:
    """Write nothing."""


AuditTrail.write = _write  # type: ignore[method-assign]
