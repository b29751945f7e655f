"""The ledger against its reference model: any asks in any order (I1 to I4, I6, I7, I9 to I13, I16).

Hypothesis chooses the asks and shrinks failures.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.ledger.game import MOVES, Game, game
from tests.ledger.model import LIMITS
from tests.ledger.stores import MemoryStore


class LedgerMachine(RuleBasedStateMachine):
    """Plays random asks; the product and the model must always agree."""

    def __init__(self) -> None:
        super().__init__()
        self.agrees = True
        self.loop = asyncio.new_event_loop()
        self.data: st.DataObject | None = None

    @initialize(data=st.data(), limits=st.sampled_from(LIMITS))
    def begin(self, data: st.DataObject, limits: dict[str, int]) -> None:
        self.data = data
        self.context: AbstractAsyncContextManager[Game] = game([MemoryStore(limits)], self.pick)
        self.game = self.run(self.context.__aenter__())

    @rule(data=st.data(), move=st.sampled_from(MOVES))
    def move(self, data: st.DataObject, move: Callable[[Game], Coroutine[Any, Any, None]]) -> None:
        self.data = data
        self.run(move(self.game))

    def teardown(self) -> None:
        try:
            if hasattr(self, "game"):
                if self.agrees:
                    self.data = None
                    self.run(self.game.end_all())
                    self.run(self.game.check_logs())
                self.run(self.context.__aexit__(None, None, None))
        finally:
            self.loop.close()

    def pick(self, options: Sequence[Any]) -> Any:
        return self.data.draw(st.sampled_from(options)) if self.data is not None else options[0]

    def run(self, play: Coroutine[Any, Any, Any]) -> Any:
        agreed, self.agrees = self.agrees, False
        result = self.loop.run_until_complete(play)
        self.agrees = agreed
        return result


_EXAMPLES = int(os.environ.get("TESTS_EXAMPLES", "60"))

LedgerMachine.TestCase.settings = settings(
    max_examples=_EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.timeout(3600)
class TestLedger(LedgerMachine.TestCase):  # type: ignore[misc,valid-type]  # made at run time
    """`TESTS_EXAMPLES=20000` runs all night."""
