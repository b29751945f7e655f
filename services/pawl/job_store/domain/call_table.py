"""The life of a tool call, as data. The diagram in docs/architecture.md is made from this table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pawl.errors import IllegalTransition
from pawl.job_store.domain.states import CallState

_S = CallState

TRANSITIONS: Final[Mapping[CallState, frozenset[CallState]]] = MappingProxyType(
    {
        _S.PROPOSED: frozenset(
            {
                _S.AWAITING_APPROVAL,
                _S.OFFERED,
                _S.ASKED,
                _S.RUNNABLE,
                _S.RUNNING,
                _S.DELEGATED,
                _S.FAILED,
                _S.REJECTED,
                _S.CANCELLED,
            }
        ),
        _S.AWAITING_APPROVAL: frozenset(
            {
                _S.AWAITING_APPROVAL,
                _S.OFFERED,
                _S.RUNNABLE,
                _S.RUNNING,
                _S.DELEGATED,
                _S.SUCCEEDED,
                _S.FAILED,
                _S.REJECTED,
                _S.EXPIRED,
                _S.CANCELLED,
            }
        ),
        _S.OFFERED: frozenset(
            {
                _S.AWAITING_APPROVAL,
                _S.ASKED,
                _S.RUNNABLE,
                _S.RUNNING,
                _S.SUCCEEDED,
                _S.FAILED,
                _S.EXPIRED,
                _S.CANCELLED,
            }
        ),
        _S.ASKED: frozenset(
            {
                _S.RUNNABLE,
                _S.RUNNING,
                _S.SUCCEEDED,
                _S.FAILED,
                _S.REJECTED,
                _S.EXPIRED,
                _S.CANCELLED,
                _S.OUTCOME_UNKNOWN,
            }
        ),
        _S.RUNNABLE: frozenset({_S.RUNNING, _S.DELEGATED, _S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.OUTCOME_UNKNOWN}),
        _S.RUNNING: frozenset(
            {
                _S.ASKED,
                _S.RUNNABLE,
                _S.RUNNING,
                _S.SUCCEEDED,
                _S.FAILED,
                _S.EXPIRED,
                _S.CANCELLED,
                _S.OUTCOME_UNKNOWN,
            }
        ),
        # Nothing but the end of the run that does it settles it, or giving that run up.
        _S.DELEGATED: frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED}),
        _S.SUCCEEDED: frozenset(),
        _S.FAILED: frozenset(),
        _S.REJECTED: frozenset(),
        _S.EXPIRED: frozenset(),
        _S.CANCELLED: frozenset(),
        _S.OUTCOME_UNKNOWN: frozenset(),
    }
)
"""To which states a call may go from each state.

RUNNING to itself is a new attempt; AWAITING_APPROVAL to itself is a request that is shown again: edited, or escalated.
"""

ONCE_BEGUN: Final[frozenset[tuple[CallState, CallState]]] = frozenset(
    {
        (_S.ASKED, _S.RUNNABLE),
        (_S.ASKED, _S.RUNNING),
        (_S.ASKED, _S.OUTCOME_UNKNOWN),
        (_S.RUNNABLE, _S.SUCCEEDED),
        (_S.RUNNABLE, _S.OUTCOME_UNKNOWN),
    }
)
"""Transitions of calls whose tool runs and asks a person something: only those that have begun take them."""

INITIAL: Final[frozenset[CallState]] = frozenset({_S.PROPOSED}) | TRANSITIONS[_S.PROPOSED]
"""The states in which a call may be created: PROPOSED, or one step from it."""

STARTED: Final = frozenset({_S.OFFERED, _S.RUNNABLE, _S.RUNNING, _S.DELEGATED})
"""The states from which the effect of a call may happen: a gated call needs an approval to get there."""

PENDING: Final = frozenset({_S.AWAITING_APPROVAL, _S.OFFERED, _S.ASKED})
"""The states in which a call waits for someone."""

EVENT_TYPES: Final[Mapping[CallState, str]] = MappingProxyType(
    {
        _S.PROPOSED: "tool.proposed",
        _S.AWAITING_APPROVAL: "tool.awaiting_approval",
        _S.OFFERED: "tool.offered",
        _S.ASKED: "tool.asked",
        _S.RUNNABLE: "tool.runnable",
        _S.RUNNING: "tool.executing",
        _S.DELEGATED: "tool.delegated",
        _S.SUCCEEDED: "tool.completed",
        _S.FAILED: "tool.failed",
        _S.REJECTED: "tool.rejected",
        _S.EXPIRED: "tool.expired",
        _S.CANCELLED: "tool.cancelled",
        _S.OUTCOME_UNKNOWN: "tool.outcome_unknown",
    }
)
"""The type of the event that says that a call is now in a state."""


def check(before: CallState | None, after: CallState) -> None:
    """Return if a call may go from `before` (None: it is new) to `after`.

    Raises:
        IllegalTransition: it may not.
    """
    if before is None:
        if after not in INITIAL:
            raise IllegalTransition(f"a call cannot be created {after.name}")
    elif after not in TRANSITIONS[before]:
        raise IllegalTransition(f"a call cannot go from {before.name} to {after.name}")
