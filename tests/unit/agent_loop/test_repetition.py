"""A model that repeats itself (LOOP-5): nobody is told too late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.domain import repetition
from pawl.agent_loop.domain.call import Call, CallState
from pawl.agent_loop.domain.loop_state import LoopState
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId

_CALLS = st.tuples(st.sampled_from(["look", "find"]), st.integers(0, 1))
_ROUNDS = st.lists(st.lists(_CALLS, min_size=1, max_size=3), max_size=12)


def _call(name: str, number: int) -> Call:
    return Call(
        store_id=StoreId("acme"),
        conversation_id=ConversationId("conversation"),
        run_id=RunId("run"),
        call_id=CallId("call"),
        round=1,
        index=0,
        tool_name=name,
        state=CallState.PROPOSED,
        proposed_arguments=str(number),
        create_time=0.0,
    )


@given(_ROUNDS, st.integers(2, 5))
def test_a_round_by_which_a_run_is_stuck_was_seen_to_come(rounds: list[list[tuple[str, int]]], most: int) -> None:
    loop = LoopState()
    for asked in rounds:
        calls = [_call(*each) for each in asked]
        foreseen = repetition.may_be_stuck(loop, calls, most)
        loop = repetition.count(loop, calls, most)
        if repetition.stuck_call(loop, calls, most) is not None:
            assert foreseen
            return


def test_a_run_that_asks_for_something_else_each_time_is_not_near() -> None:
    loop = LoopState()
    for number in range(20):
        calls = [_call("look", number)]
        assert not repetition.may_be_stuck(loop, calls, 4)
        loop = repetition.count(loop, calls, 4)
