"""A tool module that disables the registry's audit log, so that the cost of the log can be measured."""

from __future__ import annotations

from collections.abc import Sequence

from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rules import AuditDraft


async def _write(self: AuditTrail, drafts: Sequence[AuditDraft]) -> None:
    pass


AuditTrail.write = _write  # type: ignore[method-assign]
