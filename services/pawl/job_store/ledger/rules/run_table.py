"""The life of a run, as data. The diagram in docs/design/architecture.md is made from this table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pawl.errors import IllegalTransition
from pawl.values import RunState

_S = RunState

INITIAL: Final = RunState.QUEUED
"""The state in which every run is created."""


def _states(names: str) -> frozenset[RunState]:
    return frozenset(RunState[name] for name in names.split())


TRANSITIONS: Final[Mapping[RunState, frozenset[RunState]]] = MappingProxyType(
    {
        # Also of a run that an operator lets go on: so it may do what it could before.
        _S.QUEUED: _states("RUNNING WAITING NEEDS_ATTENTION CANCELLING COMPLETED FAILED EXPIRED CANCELLED"),
        _S.RUNNING: _states("WAITING NEEDS_ATTENTION CANCELLING COMPLETED FAILED EXPIRED CANCELLED"),
        _S.WAITING: _states("RUNNING NEEDS_ATTENTION CANCELLING FAILED EXPIRED CANCELLED"),
        _S.NEEDS_ATTENTION: _states("QUEUED RUNNING WAITING CANCELLING FAILED CANCELLED"),
        _S.CANCELLING: _states("NEEDS_ATTENTION CANCELLED FAILED"),
        **{state: frozenset() for state in _S if state.is_terminal},
    }
)
"""To which states a run may go from each state."""

EVENT_TYPES: Final[Mapping[RunState, str]] = MappingProxyType({state: f"run.{state.name.lower()}" for state in _S})
"""The type of the event that says that a run is now in a state."""


def check(before: RunState, after: RunState) -> None:
    """Return if a run may go from `before` to `after`.

    Raises:
        IllegalTransition: it may not.
    """
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"a run cannot go from {before.name} to {after.name}")
