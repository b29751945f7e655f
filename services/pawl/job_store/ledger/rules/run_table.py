"""The state table of runs. The documentation site draws it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pawl.errors import IllegalTransition
from pawl.values import RunState

_S = RunState

INITIAL: Final = RunState.QUEUED


def _states(names: str) -> frozenset[RunState]:
    return frozenset(RunState[name] for name in names.split())


# The allowed next states of each state.
TRANSITIONS: Final[Mapping[RunState, frozenset[RunState]]] = MappingProxyType(
    {
        # Includes runs that an operator re-drives: they may do whatever they could do before.
        _S.QUEUED: _states("RUNNING WAITING NEEDS_ATTENTION CANCELLING COMPLETED FAILED EXPIRED CANCELLED"),
        _S.RUNNING: _states("WAITING NEEDS_ATTENTION CANCELLING COMPLETED FAILED EXPIRED CANCELLED"),
        _S.WAITING: _states("RUNNING NEEDS_ATTENTION CANCELLING FAILED EXPIRED CANCELLED"),
        _S.NEEDS_ATTENTION: _states("QUEUED RUNNING WAITING CANCELLING FAILED CANCELLED"),
        _S.CANCELLING: _states("NEEDS_ATTENTION CANCELLED FAILED"),
        **{state: frozenset() for state in _S if state.is_terminal},
    }
)

# Event type for entering each state.
EVENT_TYPES: Final[Mapping[RunState, str]] = MappingProxyType({state: f"run.{state.name.lower()}" for state in _S})


def check(before: RunState, after: RunState) -> None:
    """Check that a run may move from `before` to `after`.

    Raises:
        IllegalTransition: The table does not allow it.
    """
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"a run cannot go from {before.name} to {after.name}")
