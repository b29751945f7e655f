"""The detection of a model that repeats itself (LOOP-5).

Identical: the same name and canonical arguments. With a limit of 4, the run is
stuck when a call is made for the fourth time, or when its last six rounds were
A B A B A B, where A and B stand for everything that a round called. Neither the
call nor any other of its round is executed: where the next round may be such a
one, not even what only reads before its check has come back.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.loop_state import LoopState

_FINGERPRINTS_KEPT: Final = 1000
_DIGITS: Final = 16


def fingerprint(call: Call) -> str:
    """Return what identical calls have in common. Calls that were refused count by the text the model wrote."""
    arguments = call.arguments_json or call.proposed_arguments.encode()
    return _digest(call.tool_name.encode() + b"\0" + arguments)


def count(loop: LoopState, calls: Sequence[Call], identical_max: int) -> LoopState:
    """Return the state after the calls of one more round."""
    counts = dict(loop.call_counts)
    for key in map(fingerprint, calls):
        # Taken out and put in again, so that the most recent ones stand last.
        counts[key] = counts.pop(key, 0) + 1
    kept = dict(list(counts.items())[-_FINGERPRINTS_KEPT:])
    rounds = (*loop.round_fingerprints, _digest("".join(map(fingerprint, calls)).encode()))
    return replace(loop, call_counts=kept, round_fingerprints=rounds[-_alternation_length(identical_max) :])


def stuck_call(loop: LoopState, calls: Iterable[Call], identical_max: int) -> Call | None:
    """Return the call of the last round by which the run is stuck, given the state that counts it."""
    calls = list(calls)
    repeated = next((call for call in calls if loop.call_counts.get(fingerprint(call), 0) >= identical_max), None)
    if repeated is not None or not calls:
        return repeated
    length = _alternation_length(identical_max)
    return calls[0] if _takes_turns(loop.round_fingerprints[-length:], length) else None


def may_be_stuck(loop: LoopState, calls: Sequence[Call], identical_max: int) -> bool:
    """Return whether the run may be found stuck once these calls are counted.

    They are not checked yet: which of them are identical to others only their canonical arguments will tell.
    """
    of_one_tool = max(Counter(call.tool_name for call in calls).values(), default=0)
    if max(loop.call_counts.values(), default=0) + of_one_tool >= identical_max:
        return True
    before = _alternation_length(identical_max) - 1
    return _takes_turns(loop.round_fingerprints[-before:], before)


def _takes_turns(last: Sequence[str], length: int) -> bool:
    return len(last) == length and len(set(last[::2])) == len(set(last[1::2])) == 1 and last[0] != last[1]


def _alternation_length(identical_max: int) -> int:
    # At least A B A B, however low the limit is.
    return 2 * max(2, identical_max - 1)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
