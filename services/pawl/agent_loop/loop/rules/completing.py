"""Calls that somebody outside completes: the run waits for the news, and asks the registry then, or when time is over.

Such a call stays RUNNING, and to begin it again is to ask the registry by its id.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.state import State
from pawl.chassis.ids import CallId
from pawl.values import CallState

# The registry tells by its own clock when the time is over.
_SECONDS_MIN: Final = 1.0
_AT_ONCE: Final = 0.0


def awaits(state: State, call: Call, now: float) -> bool:
    """Return whether a call waits to be completed, and its time is not over."""
    until = state.loop.completions.get(call.call_id, _AT_ONCE)
    return call.state is CallState.RUNNING and until > max(now, _AT_ONCE)


def times(state: State, now: float) -> list[float]:
    """Return the times at which the registry is to be asked again."""
    return [state.loop.completions[call.call_id] for call in state.open_calls if awaits(state, call, now)]


def begun(state: State, call: Call, seconds_left: float, now: float) -> State:
    """Return the state with a call that is to be completed; one of which the news came first is asked for again."""
    if call.state is not CallState.RUNNING:
        return state
    known = {each: time for each, time in state.loop.completions.items() if each != call.call_id}
    if state.loop.completions.get(call.call_id) != _AT_ONCE:
        known[call.call_id] = now + max(_SECONDS_MIN, seconds_left)
    return replace(state, loop=replace(state.loop, completions=known))


def completed(state: State, call_id: CallId) -> State:
    """Return the state after the news that a call was completed."""
    call = state.calls.get(call_id)
    if call is None or call.state is not CallState.RUNNING:
        return state
    return replace(state, loop=replace(state.loop, completions={**state.loop.completions, call_id: _AT_ONCE}))


def ended(state: State, call_id: CallId) -> State:
    """Return the state without what is kept of a call that has its result."""
    if call_id not in state.loop.completions:
        return state
    known = {each: time for each, time in state.loop.completions.items() if each != call_id}
    return replace(state, loop=replace(state.loop, completions=known))
