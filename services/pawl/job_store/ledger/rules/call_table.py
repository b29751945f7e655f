"""The life of a tool call, as data. The diagram in docs/design/architecture.md is made from this table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pawl.errors import IllegalTransition
from pawl.values import CallState

_S = CallState


def _states(names: str) -> frozenset[CallState]:
    return frozenset(CallState[name] for name in names.split())


TRANSITIONS: Final[Mapping[CallState, frozenset[CallState]]] = MappingProxyType(
    {
        _S.PROPOSED: _states(
            "AWAITING_APPROVAL OFFERED ASKED RUNNABLE RUNNING DELEGATED FAILED REJECTED CANCELLED DETACHED"
        ),
        _S.AWAITING_APPROVAL: _states(
            "AWAITING_APPROVAL OFFERED RUNNABLE RUNNING DELEGATED SUCCEEDED FAILED REJECTED EXPIRED CANCELLED"
        ),
        _S.OFFERED: _states("AWAITING_APPROVAL ASKED RUNNABLE RUNNING SUCCEEDED FAILED EXPIRED CANCELLED"),
        _S.ASKED: _states("RUNNABLE RUNNING SUCCEEDED FAILED REJECTED EXPIRED CANCELLED OUTCOME_UNKNOWN"),
        _S.RUNNABLE: _states("RUNNING DELEGATED SUCCEEDED FAILED CANCELLED OUTCOME_UNKNOWN"),
        _S.RUNNING: _states("ASKED RUNNABLE RUNNING SUCCEEDED FAILED EXPIRED CANCELLED OUTCOME_UNKNOWN"),
        # Nothing but the end of the run that does it settles it, or giving that run up.
        _S.DELEGATED: _states("SUCCEEDED FAILED CANCELLED"),
        **{state: frozenset() for state in _S if state.is_terminal},
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
    {state: f"tool.{state.name.lower()}" for state in _S}
    | {_S.RUNNING: "tool.executing", _S.SUCCEEDED: "tool.completed"}
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
