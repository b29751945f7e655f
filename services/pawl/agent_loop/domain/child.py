"""The run that does a call, as the step that delegates the call creates it."""

from __future__ import annotations

import msgspec

from pawl.agent_loop.domain.run import RunAbove, RunOptions


class Delegation(msgspec.Struct, frozen=True, kw_only=True):
    """A run to be created: its first message, how it is driven, and which runs stand above it, the parent last."""

    call_id: str
    run_id: str
    text: str
    options: RunOptions
    above: tuple[RunAbove, ...]
    user_roles: tuple[str, ...] = ()

    @property
    def depth(self) -> int:
        """The number of runs that stand above it."""
        return len(self.above)
