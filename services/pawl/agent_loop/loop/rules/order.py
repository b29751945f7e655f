"""The order in which a batch's calls may start, as defined by D1 (tests/requirements.md).

Read-only and parallel-safe calls start immediately, unless an earlier open call of the batch shares a resource key.
Other backend calls and delegated calls are serial. A serial call waits for the serial calls before it. It also waits
for earlier calls that await a decision, because it may depend on their results. With OVERTAKE_DECISIONS, no call waits
for a decision. Calls never wait for a front end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.run import BatchOrder
from pawl.values import WITH_PEOPLE, CallState, ExecutionContext

_DECISIONS: Final = frozenset({CallState.AWAITING_APPROVAL, CallState.ASKED})
_READY: Final = frozenset({CallState.RUNNABLE, CallState.RUNNING, CallState.DELEGATED})


def may_start(call: Call, batch: Sequence[Call], order: BatchOrder) -> bool:
    return not any(_holds_back(other, call, order) for other in batch if other.index < call.index)


def is_withdrawn_by_steer(call: Call, batch: Sequence[Call]) -> bool:
    """Return whether steering the run withdraws this open call, which has not started.

    This is true for a call that waits for a user, or for an earlier call that awaits a decision.
    """
    if call.state is not CallState.RUNNABLE:
        return call.state in WITH_PEOPLE
    return not call.parallel and any(other.index < call.index and other.state in _DECISIONS for other in batch)


def _holds_back(earlier: Call, call: Call, order: BatchOrder) -> bool:
    if earlier.settled:
        return False
    if earlier.context is ExecutionContext.BACKEND and set(earlier.resource_keys) & set(call.resource_keys):
        return earlier.state in _READY or order is BatchOrder.WAIT_FOR_DECISIONS
    if call.parallel:
        return False
    if earlier.state in _DECISIONS:
        return order is BatchOrder.WAIT_FOR_DECISIONS
    return earlier.state in _READY and not earlier.parallel
