"""The life of a run, as data. The diagram in docs/architecture.md is made from this table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pawl.errors import IllegalTransition
from pawl.job_store.domain.states import RunState

_S = RunState

INITIAL: Final = RunState.QUEUED
"""The state in which every run is created."""

TRANSITIONS: Final[Mapping[RunState, frozenset[RunState]]] = MappingProxyType(
    {
        # Also of a run that an operator lets go on: so it may do what it could before.
        _S.QUEUED: frozenset(
            {
                _S.RUNNING,
                _S.WAITING,
                _S.NEEDS_ATTENTION,
                _S.CANCELLING,
                _S.COMPLETED,
                _S.FAILED,
                _S.EXPIRED,
                _S.CANCELLED,
            }
        ),
        _S.RUNNING: frozenset(
            {_S.WAITING, _S.NEEDS_ATTENTION, _S.CANCELLING, _S.COMPLETED, _S.FAILED, _S.EXPIRED, _S.CANCELLED}
        ),
        _S.WAITING: frozenset({_S.RUNNING, _S.NEEDS_ATTENTION, _S.CANCELLING, _S.FAILED, _S.EXPIRED, _S.CANCELLED}),
        _S.NEEDS_ATTENTION: frozenset({_S.QUEUED, _S.RUNNING, _S.WAITING, _S.CANCELLING, _S.FAILED, _S.CANCELLED}),
        _S.CANCELLING: frozenset({_S.NEEDS_ATTENTION, _S.CANCELLED, _S.FAILED}),
        _S.COMPLETED: frozenset(),
        _S.FAILED: frozenset(),
        _S.CANCELLED: frozenset(),
        _S.EXPIRED: frozenset(),
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
