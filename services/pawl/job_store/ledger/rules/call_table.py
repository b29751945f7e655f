"""The state table of tool calls. The documentation site draws it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pawl.errors import IllegalTransition
from pawl.values import CallState

_S = CallState


def _states(names: str) -> frozenset[CallState]:
    return frozenset(CallState[name] for name in names.split())


# The allowed next states of each state. From RUNNING to RUNNING, a new attempt starts. From AWAITING_APPROVAL to
# AWAITING_APPROVAL, approval is requested again after an edit or an escalation.
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
        # Only the end of the child run or a cancellation settles it.
        _S.DELEGATED: _states("SUCCEEDED FAILED CANCELLED"),
        **{state: frozenset() for state in _S if state.is_terminal},
    }
)

# Transitions of calls whose running tool asks a user: only allowed once the call has started.
NEEDS_START: Final[frozenset[tuple[CallState, CallState]]] = frozenset(
    {
        (_S.ASKED, _S.RUNNABLE),
        (_S.ASKED, _S.RUNNING),
        (_S.ASKED, _S.OUTCOME_UNKNOWN),
        (_S.RUNNABLE, _S.SUCCEEDED),
        (_S.RUNNABLE, _S.OUTCOME_UNKNOWN),
    }
)

# States in which a call may be created: PROPOSED, or one step from it.
INITIAL: Final[frozenset[CallState]] = frozenset({_S.PROPOSED}) | TRANSITIONS[_S.PROPOSED]

# States in which a call may take effect: a gated call needs an approval to enter them.
STARTED: Final = frozenset({_S.OFFERED, _S.RUNNABLE, _S.RUNNING, _S.DELEGATED})

# States in which a call is waiting for a user or a client.
PENDING: Final = frozenset({_S.AWAITING_APPROVAL, _S.OFFERED, _S.ASKED})

# Event type for entering each state.
EVENT_TYPES: Final[Mapping[CallState, str]] = MappingProxyType(
    {state: f"tool.{state.name.lower()}" for state in _S}
    | {_S.RUNNING: "tool.executing", _S.SUCCEEDED: "tool.completed"}
)


def check(before: CallState | None, after: CallState) -> None:
    """Check that a call may move from `before` (None if new) to `after`.

    Raises:
        IllegalTransition: The table does not allow it.
    """
    if before is None:
        if after not in INITIAL:
            raise IllegalTransition(f"a call cannot be created in state {after.name}")
    elif after not in TRANSITIONS[before]:
        raise IllegalTransition(f"a call cannot go from {before.name} to {after.name}")
